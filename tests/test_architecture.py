"""Checks of the architecture: imports between packages, no side effects in `core`, and calls that no file may make."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "scheduler"
FILES = sorted(PROGRAM.rglob("*.py"))
PURE = frozenset(
    "__future__ bisect collections dataclasses datetime decimal difflib enum functools hashlib heapq itertools json"
    " math operator re shlex statistics typing".split()
)
MOST_LINES = 700


@dataclass(frozen=True)
class Package:
    """The contents of a package, and the imports that it may have.

    ``may``: dotted names of packages, or of single modules.
    """

    holds: str
    may: tuple[str, ...] = ()


BASE = ("core", "system")
HANDS = (
    *BASE,
    "intake",
    "environments",
    "gpus",
    "store",
    "runners",
    "sharing",
)  # each handles one part of the outside world
# From bottom to top: a package may import only packages that are listed before it, and only those that its row names.
PACKAGES: dict[str, Package] = {
    "core": Package("what needs no clock, disk, process, network or chance: jobs, states, placement, decisions"),
    "system": Package("thin helpers over the operating system", ("core",)),
    "intake": Package("files and settings that people edit, read as typed values", BASE),
    "environments": Package("how a job enters conda, a virtual environment or an interpreter", (*BASE, "intake")),
    "gpus": Package("reading the GPUs of this machine", BASE),
    "store": Package("the SQLite store and the files beside it", BASE),
    "runners": Package("starting attempts, watching them and finding them again", BASE),
    "sharing": Package("bookings that schedulers of one machine share", BASE),
    "recovery": Package("rebuilding a damaged store", HANDS),
    "daemon": Package("the running scheduler", (*HANDS, "recovery")),
    "client": Package("what a user interface may ask of a scheduler", (*HANDS, "recovery", "daemon.state_writer")),
    "doctor": Package("checks of this machine and of the state folder", (*HANDS, "recovery", "client")),
    "views": Package("how jobs, GPUs, logs and errors look as text and JSON", (*BASE, "client")),
    "cli": Package("the command line", (*HANDS, "recovery", "client", "doctor", "views")),
    "ts": Package("the task spooler's command line", (*BASE, "client", "views", "store.paths", "store.daemon_lock")),
    "track": Package("`gpujob track`, which runs its commands itself", (*BASE, "runners", "client", "views")),
    "web": Package("the web page and the HTTP API", (*BASE, "client", "views", "store.paths")),
    "warm": Package("the process that runs commands in forks, and its client", ("system",)),
    "gpujobd": Package("the scheduler of all users", (*HANDS, "daemon", "client", "views", "web", "warm.client")),
    "command_line": Package(
        "which user interface a command line is for", (*BASE, "warm", "client", "cli", "ts", "track", "web")
    ),
    "entrypoint": Package("the installed command", ("warm", "command_line")),
    "__main__": Package("`python -m scheduler`", ("entrypoint",)),
    "__init__": Package("the version"),
    "examples": Package("scripts for `gpujob demo`"),
}
# A file that may import more than its package, and why.
MAY_ALSO_IMPORT: dict[str, tuple[tuple[str, ...], str]] = {
    "cli/serve.py": (("daemon.process",), "`start` is the daemon"),
    "cli/machine_verbs.py": (
        (
            "gpujobd.installation",
            "gpujobd.system_run",
        ),
        "`system run` becomes the launcher",
    ),
    "cli/system_service.py": (
        (
            "gpujobd.installation",
            "gpujobd.system_run",
        ),
        "`system install` makes what `system run` needs",
    ),
    "client/system_client.py": (("warm.client",), "who is at the other end of a socket"),
    "cli/run.py": (("daemon.process", "daemon.interrupt", "daemon.run_resume"), "`run` is a daemon that drains"),
    "web/command.py": (("daemon.helper_child",), "the protocol with the daemon that is its parent"),
    "web/commands.py": (("environments.discovery",), "a form offers the programs that a submit would find"),
}
# A file that may import less than its package, because it is its own program or is loaded by every command.
MAY_ONLY_IMPORT: dict[str, tuple[str, ...]] = {
    "gpujobd/launcher.py": (),
    "gpujobd/in_cgroup.py": (),
    "runners/supervisor.py": (),
    "runners/exec_limited.py": (),
    "runners/mailer.py": (),
    "gpus/reader_process.py": (),
    "environments/activate.py": (),
    "views/terminal.py": ("system.terminal_text",),
    "views/terminal_replay.py": (),
    "warm/client.py": (),
    "system/packed_log.py": (),
    "system/terminal_text.py": (),
    "system/atomic_files.py": ("system.crash_points", "system.private_files"),
}
# Libraries that only some packages may import.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "sqlite3": ("store", "client", "daemon", "recovery", "doctor", "gpujobd"),
    "subprocess": ("gpus", "environments", "runners", "cli", "doctor/programs.py", "client/submit_context.py"),
    "typer": ("cli",),
    "rich": ("cli", "views", "web"),
    "yaml": ("intake", "environments/discovery.py"),
    "watchdog": ("intake",),
    "filelock": ("store",),
    "msgspec": ("system/typed_json.py",),
    "GPUtil": ("gpus/reader_process.py",),
    "psutil": ("gpus/monitor.py", "client/lease_booking.py", "client/who.py", "cli/lease.py"),
    "pynvml": ("gpus/reader_process.py",),
    "random": ("daemon", "examples"),
    "marshal": ("runners", "warm"),
    "starlette": ("web", "gpujobd/page.py"),
    "anyio": ("web",),
    "uvicorn": ("web",),
    "jinja2": ("web",),
    "sse_starlette": ("web",),
    "prometheus_client": ("web",),
}


def name_of(path: Path) -> str:
    return path.relative_to(PROGRAM).as_posix()


def package_of(path: Path) -> str:
    return name_of(path).split("/")[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def module_exists(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the full dotted module name of each import in a file, also of imports inside functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively; write it in full"
            module = node.module or ""
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                yield node.lineno, whole if module == "scheduler" or module_exists(whole) else module


def ours(path: Path) -> Iterator[tuple[int, str]]:
    for line, name in imports_of(path):
        if name == "scheduler" or name.startswith("scheduler."):
            yield line, name.removeprefix("scheduler").removeprefix(".")


def allowed(name: str, may: tuple[str, ...]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in may)


def module_of(path: Path) -> str:
    """Return the module's dotted name below the program ("core.job"). For `__init__.py` this is the package's name."""
    return ".".join(path.relative_to(PROGRAM).with_suffix("").parts).removesuffix(".__init__")


def find_circle(arrows: dict[str, set[str]]) -> list[str]:
    """Return the modules of an import cycle, in order; the last entry repeats the first one.

    Empty if there is no cycle.
    """
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(arrows.get(module, ())):
            found = search(other, [*path, module])
            if found:
                return found
        done.add(module)
        return []

    for module in sorted(arrows):
        found = search(module, [])
        if found:
            return found
    return []


def each_file(paths: list[Path] = FILES) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Return a decorator that turns a check of one file into one test of all files.

    If the test fails, its message names each file in which the check failed.
    """

    def made(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            failed = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    failed.append(f"{name_of(path)}: {error}")
            assert not failed, "\n".join(failed)

        test.__doc__ = check.__doc__
        return test

    return made


def test_every_package_is_listed_in_packages() -> None:
    missing = sorted({package_of(path) for path in FILES} - set(PACKAGES))
    assert not missing, f"add to PACKAGES what {', '.join(missing)} holds and which packages it may import"


def test_import_rules_for_single_files_name_existing_files() -> None:
    assert not [name for name in (*MAY_ONLY_IMPORT, *MAY_ALSO_IMPORT) if not (PROGRAM / name).is_file()]


def test_packages_import_only_packages_below_them() -> None:
    """A package may import only packages that PACKAGES lists before it."""
    below: list[str] = []
    for name, package in PACKAGES.items():
        up = [other for other in package.may if other.split(".")[0] not in below]
        assert not up, f"{name} stands below {', '.join(up)}: move what both need into a package below both"
        below.append(name)


@each_file()
def test_modules_import_only_lower_layers(path: Path) -> None:
    name, package = name_of(path), package_of(path)
    row = PACKAGES[package]
    may = (*row.may, package, *MAY_ALSO_IMPORT.get(name, ((), ""))[0])
    may = MAY_ONLY_IMPORT.get(name, may)
    for line, other in ours(path):
        if other in ("", "__version__"):  # `scheduler/__init__.py`, which imports nothing
            continue
        home = PACKAGES.get(other.split(".")[0])
        assert allowed(other, may), (
            f"{name}:{line} imports {other}; {package} holds {row.holds} and may import {', '.join(may) or 'nothing'}: "
            f"move what is needed into one of these, or this code to where {home.holds if home else other} belongs"
        )


def test_there_are_no_import_cycles() -> None:
    """There are no import cycles. Imports inside functions and imports of types count too."""
    arrows = {module_of(path): {other for _, other in ours(path)} for path in FILES}
    circle = find_circle(arrows)
    assert not circle, f"{' -> '.join(circle)}: move what they share into a module that both import"


def test_an_import_cycle_is_detected() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert find_circle({"x": {"a"}, "a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


@each_file([path for path in FILES if package_of(path) == "core"])
def test_core_imports_only_the_pure_part_of_the_standard_library(path: Path) -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for line, name in imports_of(path)
        if name.split(".")[0] not in PURE | {"scheduler"}
    ]
    assert not wrong


@each_file([path for path in FILES if package_of(path) == "core"])
def test_core_does_no_input_or_output(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "__import__", "breakpoint"}, f"line {node.lineno}"


@each_file()
def test_restricted_modules_are_imported_only_in_their_packages(path: Path) -> None:
    name = name_of(path)
    for line, module in imports_of(path):
        homes = ONLY_IN.get(module.split(".")[0])
        if homes is not None:
            inside = any(name == home or name.startswith(f"{home}/") for home in homes)
            assert inside, f"{name}:{line} imports {module}, which belongs to {', '.join(homes)}"


def test_the_package_init_file_imports_nothing() -> None:
    assert list(imports_of(PROGRAM / "__init__.py")) == []


@each_file()
def test_each_file_begins_with_a_docstring_sentence(path: Path) -> None:
    first = path.read_text("utf-8").splitlines()[0]
    assert first.startswith('"""'), f"{name_of(path)} does not begin with a docstring"
    said = (ast.get_docstring(tree_of(path)) or "").splitlines()[0]
    assert said and said[-1] in ".:", f"{name_of(path)}: the first line is no sentence: {said!r}"


@each_file()
def test_a_file_is_shorter_than_seven_hundred_lines(path: Path) -> None:
    lines = len(path.read_text("utf-8").splitlines())
    assert lines < MOST_LINES, f"{name_of(path)} has {lines} lines; split it"


@each_file()
def test_no_file_runs_text_as_a_program(path: Path) -> None:
    banned_methods = {
        ("os", "system"),
        ("os", "popen"),
        ("yaml", "load"),
        ("yaml", "unsafe_load"),
        ("tempfile", "mktemp"),
    }
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Call):
            continue
        where = f"{name_of(path)}:{node.lineno}"
        if isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec"}, f"{where} calls {node.func.id}()"
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            called = (node.func.value.id, node.func.attr)
            assert called not in banned_methods, f"{where} calls {'.'.join(called)}()"
        for keyword in node.keywords:
            if keyword.arg == "shell":
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                assert off, f"{where} goes through a shell"


@each_file()
def test_no_file_imports_pickle(path: Path) -> None:
    names = {name.split(".")[0] for _, name in imports_of(path)}
    assert not names & {"pickle", "cPickle", "dill", "shelve", "joblib"}


@each_file()
def test_no_file_ignores_all_exceptions_silently(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        where = f"{name_of(path)}:{node.lineno}"
        assert node.type is not None, f"{where}: bare except"
        caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
        silent = all(isinstance(step, ast.Pass) for step in node.body)
        assert not (silent and caught & {"Exception", "BaseException"}), f"{where}: except {sorted(caught)}: pass"


def test_docs_architecture_md_names_every_package() -> None:
    drawing = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    packages = {path.name for path in PROGRAM.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert not {package for package in packages if f"`{package}`" not in drawing}


def test_no_file_refers_to_files_outside_the_repository() -> None:
    elsewhere = re.compile("(?<![\\w-])" + "shared" + "/" + r"|\.\./" + "shared")
    texts = [
        *FILES,
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "docs").rglob("*"),
        *ROOT.glob("*.md"),
        ROOT / "Makefile",
    ]
    texts = [path for path in texts if path.is_file()]
    found = [str(path) for path in texts if elsewhere.search(path.read_text("utf-8", "replace"))]
    assert not found
