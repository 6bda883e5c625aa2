"""Fakes of the NVIDIA driver for tests: a library that pynvml loads, and an nvidia-smi that GPUtil runs."""

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
LIBRARY = "libnvidia-ml.so.1"  # the name that pynvml loads
FLAGS = ("-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}")
KEYS = ("name", "total", "used", "reserved", "load", "temp", "power", "energy", "mig", "ecc", "bus")
EVERY_CALL = "*"
COMPILE_S = 120

Value = int | str | None
"""Of a GPU: a number, a name, or None for what the driver does not support."""


@functools.cache
def functions() -> frozenset[str]:
    """Return the names of all functions of the fake NVML."""
    return frozenset(re.findall(r"^(?:nvmlReturn_t|const char \*)\s*(nvml\w+)\(", SOURCE.read_text("utf-8"), re.M))


# -- compiling ------------------------------------------------------------------------------------------------------


def _cache_folder() -> Path:
    """Return a private cache folder below the temporary folder.

    If the folder with the usual name belongs to another user, or other users can write to it, create a folder with a
    random name.
    """
    folder = Path(tempfile.gettempdir()) / f"gpujob-tests-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # not stat: the name may be a link of another user
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
    """Return the folder of the compiled fake NVML. ``old``: imitate a driver that lacks the newer functions."""
    return compiled(SOURCE, LIBRARY, (*FLAGS, "-DOLD_DRIVER") if old else FLAGS).parent


def compiled(source: Path, name: str, flags: tuple[str, ...]) -> Path:
    """Compile a C file to a library, and return its path. A library that is already in the cache is not compiled again.

    Each test process compiles into its own file and then renames this file. So the library is never incomplete.
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
        ):  # the C library's files are not installed
            _without_compiler(f"the C compiler finds no C library to build {source.name}")
        pytest.fail(f"{source.name} does not compile:\n{done.stderr}")
    aside.rename(library)
    return library


# -- the files ------------------------------------------------------------------------------------------------------


class _Described:
    """Base class of the fakes. A text file describes the GPUs; each change replaces the whole file."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / name
        self._driver = "550.54.15"
        self._gpus: dict[str, dict[str, Value]] = {}
        self._last_ns = 0
        self._held = False
        self._write()

    def gpu(self, uuid: str, **values: Value) -> None:
        """Add a GPU after the existing GPUs, or change values of an existing GPU.

        ``KEYS`` lists the names of the values.
        """
        wrong = set(values) - set(KEYS)
        if wrong:
            raise TypeError(f"a GPU has no {', '.join(sorted(wrong))}; it has {', '.join(KEYS)}")
        self._gpus.setdefault(uuid, {}).update(values)
        self._write()

    def remove(self, uuid: str) -> None:
        """Remove a GPU. A program that has a handle of this GPU then gets GPU_IS_LOST for each call with the handle."""
        del self._gpus[uuid]
        self._write()

    def order(self, uuids: Iterable[str]) -> None:
        """Give the GPUs new indices in the order of ``uuids``.

        Raises ValueError unless ``uuids`` contains each GPU exactly once.
        """
        uuids = list(uuids)
        if sorted(uuids) != sorted(self._gpus):
            raise ValueError(f"not an order of {sorted(self._gpus)}: {uuids}")
        self._gpus = {uuid: self._gpus[uuid] for uuid in uuids}
        self._write()

    def version(self, driver: str) -> None:
        """Set the driver version."""
        self._driver = driver
        self._write()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make all changes within the ``with`` block visible at its end, at the same time."""
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
        # File times have a granularity of milliseconds, and inode numbers are reused: without a new time for each edit,
        # a reader could mistake the file after two quick edits for the file before them.
        self._last_ns = max(self._last_ns + 1, time.time_ns())
        os.utime(aside, ns=(self._last_ns, self._last_ns))
        aside.replace(self.file)


def _word(value: Value) -> str:
    return "-" if value is None else str(value).replace(" ", "_")


class FakeDriver(_Described):
    """A fake NVIDIA driver for processes that are started with the variables of ``environ()``.

    Each call that such a process makes sees the latest changes.
    """

    def __init__(self, folder: Path, old: bool = False) -> None:
        self.library_folder = library_folder(old)
        self._processes: dict[tuple[str, int, str], tuple[int | None, int | None]] = {}
        self._errors: list[str] = []
        self._xids: list[str] = []
        self._topology: dict[tuple[str, str], int] = {}
        self._nvlinks: list[tuple[str, ...]] = []
        self._instances: dict[str, tuple[str, str, dict[str, Value]]] = {}
        super().__init__(folder, "nvml.txt")

    def remove(self, uuid: str) -> None:
        """Remove a GPU and its processes.

        A program that has a handle of this GPU then gets GPU_IS_LOST for each call with the handle.
        """
        self._processes = {key: value for key, value in self._processes.items() if key[0] != uuid}
        super().remove(uuid)

    def process(self, uuid: str, pid: int, mem: int | None, type: str = "C", util: int | None = None) -> None:
        """Add or change a process on a GPU. The used memory of the GPU stays unchanged; ``gpu`` sets it.

        ``mem``: MiB, or None if the driver does not report it. ``type``: C (compute) or G (graphics). ``util``:
        percent, or None if the driver has no sample.
        """
        if type not in ("C", "G"):
            raise ValueError(f"type is C for compute or G for graphics, not {type!r}")
        self._processes[uuid, pid, type] = mem, util
        self._write()

    def no_process(self, pid: int) -> None:
        """Remove the process with this pid from all GPUs."""
        self._processes = {key: value for key, value in self._processes.items() if key[1] != pid}
        self._write()

    def error(self, function: str, code: int, uuid: str | None = None) -> None:
        """Let a function of NVML return the error ``code`` for this GPU. Without ``uuid``, this holds for all GPUs.

        ``function``: a name, or ``*`` for every function about a GPU. If several calls of `error` and `hang` apply to a
        function and GPU, the earliest of these calls decides.
        """
        self._rule("error", function, uuid, str(code))

    def hang(self, function: str, uuid: str | None = None) -> None:
        """Let a function of NVML never return for this GPU. Without ``uuid``, this holds for all GPUs.

        ``function``: a name, or ``*`` for every function about a GPU.
        """
        self._rule("hang", function, uuid)

    def clear_errors(self) -> None:
        """Remove all errors and hangs. A call that already hangs still never returns."""
        self._errors = []
        self._write()

    def xid(self, uuid: str, code: int) -> None:
        """Add an XID event of this GPU. Each process that waits for its events already receives the event once.

        ``uuid`` of a MIG instance: its GPU reports the event, and names the instance.
        """
        self._xids.append(f"xid {uuid} {code} {len(self._xids)}")
        self._write()

    def topology(self, one: str, other: str, level: int) -> None:
        """Set the topology level of two GPUs, as a number of NVML: 10 for the same switch, 50 for different sockets."""
        self._topology[one, other] = level
        self._write()

    def instance(self, parent: str, uuid: str, profile: str = "1g.10gb", **values: Value) -> None:
        """Add or change a MIG instance of a GPU. The driver shows it while ``mig`` of the GPU is 1.

        ``values``: ``total`` and ``used`` in MiB.
        """
        self._instances[uuid] = parent, profile, self._instances.get(uuid, (parent, profile, {}))[2] | values
        self._write()

    def no_instance(self, uuid: str) -> None:
        """Remove a MIG instance."""
        del self._instances[uuid]
        self._write()

    def nvlink(self, one: str, other: str) -> None:
        """Add an active NVLink between two GPUs. A GPU that the driver does not show can be the other end."""
        self._nvlinks.append(("nvlink", one, other))
        self._write()

    def dgx(self) -> None:
        """Join all GPUs by NVLink switches; every four of them are on one CPU."""
        self._nvlinks = [("nvswitch", uuid) for uuid in self._gpus]
        self._write()

    def islands(self, size: int = 4) -> None:
        """Join groups of ``size`` GPUs by NVLink; GPUs of different groups are on different CPUs."""
        uuids = list(self._gpus)
        with self.together():
            self.no_links()
            for number, one in enumerate(uuids):
                for other_number, other in enumerate(uuids[:number]):
                    if number // size == other_number // size:
                        self.nvlink(other, one)
                        self.topology(other, one, 40)
                    else:
                        self.topology(other, one, 50)

    def pcie_pairs(self) -> None:
        """Put each two GPUs on a PCIe switch of their own; every four of them are on one CPU. There is no NVLink."""
        uuids = list(self._gpus)
        with self.together():
            self._nvlinks, self._topology = [], {}
            for one, other in zip(uuids[::2], uuids[1::2], strict=False):
                self.topology(one, other, 10)

    def no_links(self) -> None:
        """Put each GPU on a CPU of its own. There is no NVLink."""
        uuids = list(self._gpus)
        self._nvlinks = []
        self._topology = {(one, other): 50 for one in uuids for other in uuids if one < other}
        self._write()

    def environ(self) -> dict[str, str]:
        """Return the environment variables with which a process loads the fake instead of NVML."""
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
        for uuid, (parent, profile, values) in self._instances.items():
            yield " ".join(("instance", parent, uuid, profile, *(f"{k}={_word(v)}" for k, v in values.items())))
        for words in self._nvlinks:
            yield " ".join(words)


class FakeSmi(_Described):
    """A fake nvidia-smi for processes that are started with the variables of ``environ()``.

    Each run of nvidia-smi sees the latest changes.
    """

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
            os.mkfifo(never, 0o600)  # a hanging nvidia-smi waits in its open(): there is no writer

    def text(self, *lines: str) -> None:
        """Let nvidia-smi print the rows of the GPUs, and after them these lines unchanged."""
        self._end(*(f"text {line}" for line in lines))

    def cut(self, text: str) -> None:
        """Let nvidia-smi print the rows of the GPUs, and after them this text without a newline."""
        self._end(f"cut {text}")

    def exit(self, code: int, text: str = "") -> None:
        """Let nvidia-smi print the rows of the GPUs and this text, and exit with this code."""
        self._end(*(f"text {line}" for line in text.splitlines()), f"exit {code}")

    def hang(self, deaf: bool = False) -> None:
        """Let nvidia-smi print the rows of the GPUs and then hang. ``deaf``: it ignores SIGTERM, SIGINT and SIGHUP."""
        self._end("hang deaf" if deaf else "hang")

    def stop(self) -> None:
        """Let nvidia-smi print the rows of the GPUs and then stop itself (SIGSTOP).

        This is similar to a program that the kernel does not let run or die (uninterruptible sleep).
        """
        self._end("stop")

    def clear(self) -> None:
        """Let nvidia-smi print only the rows of the GPUs again, and exit with 0."""
        self._ending = []
        self._write()

    def environ(self, path: str | None = None) -> dict[str, str]:
        """Return the environment variables with which a process finds the fake nvidia-smi.

        ``path``: the folders that follow the folder of the fake in PATH. None: the PATH of this process.
        """
        behind = os.environ.get("PATH", os.defpath) if path is None else path
        return {"PATH": f"{self.program_folder}:{behind}", "NVIDIA_SMI_FILE": str(self.file)}

    def _end(self, *lines: str) -> None:
        self._ending.extend(lines)
        self._write()

    def _lines(self) -> Iterator[str]:
        yield from super()._lines()
        yield from self._ending
