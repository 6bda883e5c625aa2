"""Many command lines, each in a process of its own, forked from one that has everything imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tests.stories.harness import Scheduler

_SERVER = """
import functools, json, os, sys, tempfile
import typer.main
from scheduler.faces import front
import scheduler.faces.cli.app, scheduler.engine.offline
typer.main.get_command = functools.cache(typer.main.get_command)  # 90 ms for each of hundreds
front.main(["show", "--no-such-option"])  # whatever a mistake imports
gate = os.pipe()


def begin(line):
    words, out, err = json.loads(line), tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if child:
        return child, out, err
    os.read(gate[0], 1)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((null, out.fileno(), err.fileno())):
        os.dup2(fd, number)
    sys.stdin = open(0)
    sys.argv = ["gpujob", *words]
    try:
        code = front.main(words)
        sys.stdout.flush()
    except SystemExit as error:
        code = error.code
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 99
    os._exit(code)


def end(child, *streams):
    _, status = os.waitpid(child, 0)
    texts = []
    for stream in streams:
        stream.seek(0)
        texts.append(stream.read().decode("utf-8", "replace"))
        stream.close()
    print(json.dumps([os.waitstatus_to_exitcode(status), *texts]), flush=True)


lines = sys.stdin.readlines()
if sys.argv[1:] == ["at once"]:
    begun = [begin(line) for line in lines]
    os.write(gate[1], b"." * len(begun))
    for one in begun:
        end(*one)
else:
    for line in lines:
        os.write(gate[1], b".")
        end(*begin(line))
"""


@dataclass(frozen=True)
class Ran:
    """One command line and what came of it."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str


def run_all(s: Scheduler, lines: Sequence[Sequence[str]], *, at_once: bool = False) -> list[Ran]:
    """Run each in the scheduler's folder, one after the other, or all at once."""
    done = subprocess.run(
        [sys.executable, "-c", _SERVER, *(["at once"] if at_once else [])],
        input="".join(json.dumps(list(words)) + "\n" for words in lines),
        cwd=s.folder,
        env=s.environ,
        capture_output=True,
        text=True,
        timeout=170,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(lines), (done.stderr, lines[len(answers)])
    return [Ran(tuple(words), *answer) for words, answer in zip(lines, answers, strict=True)]
