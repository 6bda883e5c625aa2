"""Commands run in processes forked from one that has everything imported: the same words, folder and environment, without
the third of a second of imports that a test suite of thousands of commands would spend on each.

What a new interpreter does differently (locale, output encoding, crash points) is left to new interpreters, and so are
commands that start others of their kind.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLD_VERBS = frozenset({"start", "demo", "attach"})
COLD_VARIABLES = ("PYTHON", "LC_", "LANG", "TZ", "LD_PRELOAD", "GPUJOB_CRASH_AT")

_SERVER = """
import json, os, select, signal, socket, sys, tempfile, traceback
from scheduler.faces import front
import scheduler.engine.examining, scheduler.engine.offline
import scheduler.faces.cli.app, scheduler.faces.cli.config, scheduler.faces.cli.doctor, scheduler.faces.cli.logs
import scheduler.faces.tracker, scheduler.faces.ts.acting, scheduler.faces.ts.queueing


def run(words, folder, environ, files):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    for number, fd in enumerate(files):
        os.dup2(fd, number)
    sys.argv = [front.__file__, *words]
    code = 1
    try:
        code = front.main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(connection):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection, connection.makefile("rb") as stream:
        words, folder, environ, given = json.loads(stream.readline())
        files = [tempfile.TemporaryFile() for _ in range(3)]
        files[0].write(given.encode("utf-8", "surrogateescape"))
        files[0].seek(0)
        child = os.fork()
        if not child:
            run(words, folder, environ, [file.fileno() for file in files])
        _, status = os.waitpid(child, 0)
        texts = []
        for file in files[1:]:
            file.seek(0)
            texts.append(file.read().decode("utf-8", "surrogateescape"))
        connection.sendall(json.dumps([os.waitstatus_to_exitcode(status), *texts]).encode() + b"\\n")
    os._exit(0)


signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listener = socket.socket(fileno=int(sys.argv[1]))
while True:
    ready, _, _ = select.select([0, listener], [], [])
    if 0 in ready:
        sys.exit()  # whoever started us has ended
    connection, _ = listener.accept()
    if not os.fork():
        listener.close()
        serve(connection)
    connection.close()
"""


class _Warm:
    """The process that commands are forked from; it ends with us."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.cold = self.told(environ)
        self.folder = tempfile.TemporaryDirectory(prefix="gjw", dir="/tmp")
        self.path = os.path.join(self.folder.name, "s")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(64)
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(listener.fileno())],
                # not the marks by which a test ends what it has started: this one outlives it
                env={k: v for k, v in environ.items() if k not in ("SCREENDIR", "TS_SOCKET")}, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )  # fmt: skip

    @staticmethod
    def told(environ: Mapping[str, str]) -> dict[str, str]:
        """What an interpreter reads of it only when it starts."""
        return {name: value for name, value in environ.items() if name.startswith(COLD_VARIABLES)}


_warm: dict[int, _Warm] = {}


def run(
    words: Sequence[str], folder: Path, environ: Mapping[str, str], given: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    """`gpujob WORDS…` to its end. Raises TimeoutError."""
    warm = _warm.get(os.getpid())
    if warm is None and not set(words) & COLD_VERBS and "LD_PRELOAD" not in environ:
        warm = _warm[os.getpid()] = _Warm(environ)
    if warm is None or set(words) & COLD_VERBS or warm.told(environ) != warm.cold:
        return subprocess.run(
            [sys.executable, "-m", "scheduler", *words],
            cwd=folder, env=dict(environ), capture_output=True, text=True, timeout=timeout, input=given,
        )  # fmt: skip
    with socket.socket(socket.AF_UNIX) as connection, contextlib.closing(connection.makefile("rwb")) as stream:
        connection.settimeout(timeout)
        connection.connect(warm.path)
        stream.write(json.dumps([list(words), str(folder), dict(environ), given]).encode() + b"\n")
        stream.flush()
        code, out, err = json.loads(stream.readline())
    return subprocess.CompletedProcess(list(words), code, out, err)
