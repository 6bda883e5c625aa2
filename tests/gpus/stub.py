"""Stand-ins for an NVIDIA driver: a library that pynvml loads and a program that GPUtil runs, both told by a test."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "nvml_stub.c"
NVIDIA_SMI = HERE / "nvidia-smi"
LIBRARY = "libnvidia-ml.so.1"  # the one name that pynvml asks the loader for
FLAGS = ("-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}")
KEYS = ("name", "total", "used", "reserved", "load", "temp", "power", "energy", "mig", "ecc", "bus")
EVERY_CALL = "*"
COMPILE_S = 120

Value = int | str | None
"""Of a GPU: a number, a name, or None for what the driver does not support."""


@functools.cache
def functions() -> frozenset[str]:
    """Names of all functions that the stand-in for NVML has."""
    return frozenset(re.findall(r"^(?:nvmlReturn_t|const char \*)\s*(nvml\w+)\(", SOURCE.read_text("utf-8"), re.M))


# -- compiling ------------------------------------------------------------------------------------------------------


def _cache_folder() -> Path:
    """A folder of this user's own below the temporary one; a new one each time if another user holds that name."""
    folder = Path(tempfile.gettempdir()) / f"gpujob-tests-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # not stat: a link planted under our name must not lead us elsewhere
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="gpujob-tests-"))


def _without_compiler(problem: str) -> None:
    sentence = f"{problem}; as root run: apt-get install -y gcc libc6-dev"
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(sentence)
    pytest.skip(sentence)


@functools.cache
def library_folder(old: bool = False) -> Path:
    """The folder that holds the compiled stand-in; ``old`` for the driver that lacks the newer calls."""
    return compiled(SOURCE, LIBRARY, (*FLAGS, "-DOLD_DRIVER") if old else FLAGS).parent


def compiled(source: Path, name: str, flags: tuple[str, ...]) -> Path:
    """The library made of this C file.

    Compiled once per machine and state of the source. Several test workers may come here at once: each compiles aside
    and renames, so a library is there whole or not at all.
    """
    state = "\0".join((*flags, os.uname().machine)).encode() + source.read_bytes()
    folder = _cache_folder() / f"{source.stem}-{hashlib.sha256(state).hexdigest()[:20]}"
    library = folder / name
    if library.is_file():
        return library
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        _without_compiler(f"no C compiler to build {source.name}")
    assert compiler is not None
    folder.mkdir(mode=0o700, exist_ok=True)
    aside = folder / f".{os.getpid()}.so"
    done = subprocess.run(
        [compiler, *flags, "-o", str(aside), str(source)],
        capture_output=True,
        text=True,
        timeout=COMPILE_S,
        check=False,
    )
    if done.returncode:
        aside.unlink(missing_ok=True)
        if re.search(
            r"stdio\.h|crt1\.o|crti\.o|cannot find -lc", done.stderr
        ):  # a compiler without the C library's files
            _without_compiler(f"the C compiler finds no C library to build {source.name}")
        pytest.fail(f"{source.name} does not compile:\n{done.stderr}")
    aside.rename(library)
    return library


# -- the files ------------------------------------------------------------------------------------------------------


class _Described:
    """GPUs as a test describes them, in a file that is always whole."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / name
        self._driver = "550.54.15"
        self._gpus: dict[str, dict[str, Value]] = {}
        self._last_ns = 0
        self._held = False
        self._write()

    def gpu(self, uuid: str, **values: Value) -> None:
        """Add a GPU, behind the others, or change the given values of one that is there."""
        wrong = set(values) - set(KEYS)
        if wrong:
            raise TypeError(f"a GPU has no {', '.join(sorted(wrong))}; it has {', '.join(KEYS)}")
        self._gpus.setdefault(uuid, {}).update(values)
        self._write()

    def remove(self, uuid: str) -> None:
        """Take a GPU out: who holds a handle of it is told that it is lost."""
        del self._gpus[uuid]
        self._write()

    def order(self, uuids: Iterable[str]) -> None:
        """Give the GPUs new indices, as after a reboot; all of them must be named."""
        uuids = list(uuids)
        if sorted(uuids) != sorted(self._gpus):
            raise ValueError(f"not an order of {sorted(self._gpus)}: {uuids}")
        self._gpus = {uuid: self._gpus[uuid] for uuid in uuids}
        self._write()

    def version(self, driver: str) -> None:
        """Another driver version."""
        self._driver = driver
        self._write()

    @contextmanager
    def together(self) -> Iterator[None]:
        """All changes made inside are seen at once."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self._write()

    def _lines(self) -> Iterator[str]:
        yield f"driver {self._driver}"
        for uuid, values in self._gpus.items():
            yield " ".join(("gpu", uuid, *(f"{key}={_word(value)}" for key, value in values.items())))

    def _write(self) -> None:
        if self._held:
            return
        aside = self.file.with_name(f".{self.file.name}.aside")
        aside.write_text("".join(f"{line}\n" for line in self._lines()), "utf-8")
        # The clock of files moves in steps of milliseconds and inodes come back: without a time of its own, the second
        # of two quick edits could look like the file before the first.
        self._last_ns = max(self._last_ns + 1, time.time_ns())
        os.utime(aside, ns=(self._last_ns, self._last_ns))
        aside.replace(self.file)


def _word(value: Value) -> str:
    return "-" if value is None else str(value).replace(" ", "_")


class FakeDriver(_Described):
    """An NVIDIA driver for processes that are started with ``environ()``; they see every change at their next call."""

    def __init__(self, folder: Path, old: bool = False) -> None:
        self.library_folder = library_folder(old)
        self._processes: dict[tuple[str, int, str], tuple[int | None, int | None]] = {}
        self._errors: list[str] = []
        self._xids: list[str] = []
        self._topology: dict[tuple[str, str], int] = {}
        super().__init__(folder, "nvml.txt")

    def remove(self, uuid: str) -> None:
        """Take a GPU out with its processes: who holds a handle of it is told that it is lost."""
        self._processes = {key: value for key, value in self._processes.items() if key[0] != uuid}
        super().remove(uuid)

    def process(self, uuid: str, pid: int, mem: int | None, type: str = "C", util: int | None = None) -> None:
        """Add or change a process on a GPU: its memory in MiB (None: not told), C or G, its load (None: no sample).

        The used memory of the GPU is told apart, by ``gpu``.
        """
        if type not in ("C", "G"):
            raise ValueError(f"type is C for compute or G for graphics, not {type!r}")
        self._processes[uuid, pid, type] = mem, util
        self._write()

    def no_process(self, pid: int) -> None:
        """This process is on no GPU any more."""
        self._processes = {key: value for key, value in self._processes.items() if key[1] != pid}
        self._write()

    def error(self, function: str, code: int, uuid: str | None = None) -> None:
        """This function answers this code, for one GPU or all; ``*``: every call about a GPU. The first told wins."""
        self._rule("error", function, uuid, str(code))

    def hang(self, function: str, uuid: str | None = None) -> None:
        """This function never returns, for one GPU or all; ``*``: every call about a GPU."""
        self._rule("hang", function, uuid)

    def clear_errors(self) -> None:
        """No errors and no hangs any more; calls that hang already stay so."""
        self._errors = []
        self._write()

    def xid(self, uuid: str, code: int) -> None:
        """An XID event of this GPU: told once to each process that waits for it, now or later."""
        self._xids.append(f"xid {uuid} {code} {len(self._xids)}")
        self._write()

    def topology(self, one: str, other: str, level: int) -> None:
        """How near two GPUs are, as NVML counts it: 10 behind one switch ... 50 on different sockets."""
        self._topology[one, other] = level
        self._write()

    def environ(self) -> dict[str, str]:
        """What a process needs in its environment before it starts: the loader looks at it only then."""
        after = os.environ.get("LD_LIBRARY_PATH")
        path = f"{self.library_folder}:{after}" if after else str(self.library_folder)
        return {"LD_LIBRARY_PATH": path, "NVML_STUB_FILE": str(self.file)}

    def _rule(self, kind: str, function: str, uuid: str | None, *code: str) -> None:
        if function != EVERY_CALL and function not in functions():
            raise ValueError(f"the stand-in for NVML has no {function}; it has {', '.join(sorted(functions()))}")
        self._errors.append(" ".join((kind, function, *([uuid] if uuid else []), *code)))
        self._write()

    def _lines(self) -> Iterator[str]:
        yield from super()._lines()
        for (uuid, pid, type), (mem, util) in self._processes.items():
            yield f"proc {uuid} pid={pid} mem={_word(mem)} type={type} util={_word(util)}"
        yield from self._errors
        yield from self._xids
        for (one, other), level in self._topology.items():
            yield f"topology {one} {other} {level}"


class FakeSmi(_Described):
    """An nvidia-smi for processes that are started with ``environ()``; each run of it sees what is told by then."""

    def __init__(self, folder: Path) -> None:
        self._ending: list[str] = []
        super().__init__(folder, "nvidia-smi.txt")
        self.program_folder = folder / "bin"
        self.program_folder.mkdir(exist_ok=True)
        program = self.program_folder / NVIDIA_SMI.name
        if not program.is_symlink():
            program.symlink_to(NVIDIA_SMI)
        never = folder / f"{self.file.name}.never"
        if not never.exists():
            os.mkfifo(never, 0o600)  # what hangs waits here for a writer that never comes

    def text(self, *lines: str) -> None:
        """These lines come after the rows of the GPUs, as they stand."""
        self._end(*(f"text {line}" for line in lines))

    def cut(self, text: str) -> None:
        """This text comes after the rows of the GPUs, without a line's end."""
        self._end(f"cut {text}")

    def exit(self, code: int, text: str = "") -> None:
        """It prints this text, after the rows of the GPUs, and ends with this code."""
        self._end(*(f"text {line}" for line in text.splitlines()), f"exit {code}")

    def hang(self, deaf: bool = False) -> None:
        """It prints the rows of the GPUs and never ends; ``deaf``: even when told to by TERM, INT or HUP."""
        self._end("hang deaf" if deaf else "hang")

    def stop(self) -> None:
        """It prints the rows of the GPUs and stops itself, as a program in uninterruptible sleep."""
        self._end("stop")

    def clear(self) -> None:
        """Nothing but the rows of the GPUs any more."""
        self._ending = []
        self._write()

    def environ(self, path: str | None = None) -> dict[str, str]:
        """What a process needs in its environment; ``path`` is what comes behind the stand-in, PATH if not told."""
        behind = os.environ.get("PATH", os.defpath) if path is None else path
        return {"PATH": f"{self.program_folder}:{behind}", "NVIDIA_SMI_FILE": str(self.file)}

    def _end(self, *lines: str) -> None:
        self._ending.extend(lines)
        self._write()

    def _lines(self) -> Iterator[str]:
        yield from super()._lines()
        yield from self._ending
