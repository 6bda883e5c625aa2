"""The house keeps its shape: arrows go one way, core is pure, and what is never done is not done."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "scheduler"
FILES = sorted(HOUSE.rglob("*.py"))
PURE = frozenset(
    "__future__ bisect collections dataclasses datetime decimal difflib enum functools hashlib heapq itertools json"
    " math operator re shlex statistics typing".split()
)
MOST_LINES = 700

# Room → what of ours it may import (a name stands for itself and for all below it).
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "core": ("core",),
    "intake": ("core", "intake", "crashpoints", "opening"),
    "probes": ("core", "probes", "crashpoints"),
    "store": ("core", "store", "crashpoints", "opening"),
    "runners": ("core", "runners", "crashpoints", "opening"),
    "desk": ("core", "intake", "overview", "store"),
    "overview": ("core", "overview", "runners.recorded_end", "store"),
    "engine": ("core", "intake", "probes", "store", "runners", "crashpoints", "opening", "engine"),
    "faces": (
        "",  # where the package lies
        "__version__",
        "core",
        "desk",
        "engine",
        "faces",
        "intake",
        "opening",
        "overview",
        "probes",
        "proc",
        "store.office",
        "store.places",
        "store.safely",
    ),
    "examples": (),
    "crashpoints": (),
    "opening": (),
    "proc": (),
    "__main__": ("faces.front",),
    "__init__": (),
}
# Tighter than the room: files that know less than their neighbours.
MAY_ONLY_IMPORT: dict[str, tuple[str, ...]] = {
    "runners/keeper.py": (),
    "runners/exec_within.py": (),
    "runners/mailer.py": (),
    "probes/reader.py": (),
    "runners/activate.py": (),
    "faces/render.py": ("core", "desk", "faces.terminal", "overview"),
    "faces/terminal.py": (),
    "faces/stream.py": ("engine.telling", "faces.folding", "faces.terminal", "opening"),
    "faces/finding.py": ("core", "faces.terminal", "intake.settings", "store.office", "store.places"),
    "faces/front.py": ("core.errors", "faces"),
    "faces/cli/show.py": ("core", "desk", "faces", "overview"),
    "faces/cli/logs.py": ("core", "desk", "faces", "proc"),
    "faces/folding.py": ("opening", "faces.unpacking"),
    "faces/unpacking.py": (),
    "store/safely.py": ("crashpoints",),
    "probes/fixed.py": ("core.gpu",),
}
# Libraries and powers that belong to some rooms only.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "sqlite3": ("store", "desk", "overview", "engine"),
    "subprocess": ("probes", "runners", "faces/cli", "faces/handing.py"),
    "typer": ("faces/cli",),
    "rich": ("faces",),
    "yaml": ("intake",),
    "watchdog": ("intake",),
    "filelock": ("store",),
    "GPUtil": ("probes/reader.py",),
    "psutil": ("engine/gpus.py",),
    "pynvml": ("probes/reader.py",),
    "random": ("engine", "examples"),
    "marshal": ("runners",),
    "starlette": ("faces/web",),
    "anyio": ("faces/web",),
    "uvicorn": ("faces/web",),
    "jinja2": ("faces/web",),
    "sse_starlette": ("faces/web",),
    "prometheus_client": ("faces/web",),
}


def name_of(path: Path) -> str:
    return path.relative_to(HOUSE).as_posix()


def room_of(path: Path) -> str:
    return name_of(path).split("/")[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def module_exists(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, inside functions as well; the module, not what is taken of it."""
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


def each_file(paths: list[Path] = FILES) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test of a check for one file; its failure names every file that fails."""

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


def test_every_room_has_a_row() -> None:
    assert {room_of(path) for path in FILES} == set(MAY_IMPORT)


def test_the_tighter_rows_name_files_that_exist() -> None:
    assert not [name for name in MAY_ONLY_IMPORT if not (HOUSE / name).is_file()]


@each_file()
def test_arrows_go_one_way(path: Path) -> None:
    may = MAY_ONLY_IMPORT.get(name_of(path), MAY_IMPORT[room_of(path)])
    if name_of(path) == "faces/cli/serve.py":
        may = (*MAY_IMPORT["faces"], "")  # `--detach` starts the package again, so it asks where the package lies
    wrong = [f"{name_of(path)}:{line} imports {name}" for line, name in ours(path) if not allowed(name, may)]
    assert not wrong, f"may import {', '.join(may) or 'nothing of ours'}: {wrong}"


def test_the_middle_rooms_do_not_know_each_other() -> None:
    middle = {"intake", "probes", "store", "runners"}
    for room in middle:
        known = {name.split(".")[0] for name in MAY_IMPORT[room]}
        assert not known & ((middle - {room}) | {"desk", "engine", "faces"})


@each_file([path for path in FILES if room_of(path) == "core"])
def test_core_imports_only_the_pure_part_of_the_standard_library(path: Path) -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for line, name in imports_of(path)
        if name.split(".")[0] not in PURE | {"scheduler"}
    ]
    assert not wrong


@each_file([path for path in FILES if room_of(path) == "core"])
def test_core_touches_nothing(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "__import__", "breakpoint"}, f"line {node.lineno}"


@each_file()
def test_powers_stay_in_their_rooms(path: Path) -> None:
    name = name_of(path)
    for line, module in imports_of(path):
        rooms = ONLY_IN.get(module.split(".")[0])
        if rooms is not None:
            inside = any(name == room or name.startswith((f"{room}/", f"{room}.py")) for room in rooms)
            assert inside, f"{name}:{line} imports {module}, which belongs to {', '.join(rooms)}"


def test_the_package_itself_imports_nothing() -> None:
    assert list(imports_of(HOUSE / "__init__.py")) == []


@each_file()
def test_a_file_says_in_its_first_line_what_it_is_for(path: Path) -> None:
    first = path.read_text("utf-8").splitlines()[0]
    assert first.startswith('"""'), f"{name_of(path)} does not begin with a docstring"
    said = (ast.get_docstring(tree_of(path)) or "").splitlines()[0]
    assert said and said[-1] in ".:", f"{name_of(path)}: the first line is no sentence: {said!r}"


@each_file()
def test_a_file_is_shorter_than_seven_hundred_lines(path: Path) -> None:
    lines = len(path.read_text("utf-8").splitlines())
    assert lines < MOST_LINES, f"{name_of(path)} has {lines} lines; split it"


# It writes out methods from the names of our own fields, when it is imported, as `dataclasses` does.
RUNS_ITS_OWN_TEXT = "core/quick_dataclass.py"


@each_file()
def test_nothing_runs_text_as_a_program(path: Path) -> None:
    banned_names = {"eval"} if name_of(path) == RUNS_ITS_OWN_TEXT else {"eval", "exec"}
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
            assert node.func.id not in banned_names, f"{where} calls {node.func.id}()"
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            called = (node.func.value.id, node.func.attr)
            assert called not in banned_methods, f"{where} calls {'.'.join(called)}()"
        for keyword in node.keywords:
            if keyword.arg == "shell":
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                assert off, f"{where} goes through a shell"


@each_file()
def test_nothing_unpickles(path: Path) -> None:
    names = {name.split(".")[0] for _, name in imports_of(path)}
    assert not names & {"pickle", "cPickle", "dill", "shelve", "joblib"}


@each_file()
def test_no_error_is_swallowed_unseen(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        where = f"{name_of(path)}:{node.lineno}"
        assert node.type is not None, f"{where}: bare except"
        caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
        silent = all(isinstance(step, ast.Pass) for step in node.body)
        assert not (silent and caught & {"Exception", "BaseException"}), f"{where}: except {sorted(caught)}: pass"


def test_the_drawing_names_every_room() -> None:
    drawing = ast.get_docstring(tree_of(HOUSE / "__init__.py")) or ""
    rooms = {path.name for path in HOUSE.iterdir() if path.is_dir() and path.name not in {"__pycache__", "examples"}}
    assert not {room for room in rooms | {"desk"} if room not in drawing}


def test_the_product_stands_alone() -> None:
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
