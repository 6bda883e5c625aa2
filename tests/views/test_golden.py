"""Golden tests of printed output: piped, on terminals of 100 and 20 columns, in colour, and in a C locale.

A real scheduler has written the store. Then its times, pids and paths were replaced by fixed values. If a change of the
output is intended, run ``GPUJOB_GOLDEN=write pytest tests/views/test_golden.py``, and check the new texts with ``git
diff tests/views/golden``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests import fork_server
from tests.stories.harness import Scheduler, wait_for

GOLDEN = Path(__file__).parent / "golden"
WRITE = os.environ.get("GPUJOB_GOLDEN") == "write"
THEN = 1767323045  # 2026-01-02T03:04:05Z
AGO_S = 7290  # 2 h 01 min 30 s: the printed minutes stay equal for 30 s
VERBS = {
    "status": ["status"],
    "jobs": ["jobs"],
    "show-done": ["show", "1"],
    "show-running": ["show", "4"],
    "show-waiting": ["show", "5", "7"],
    "report": ["report", "--label", "base"],
    "why-failed": ["why", "2"],
    "why-waiting": ["why", "5-7"],
    "why-running": ["why", "4"],
    "screens": ["screens"],
}
ESCAPE = "\x1b"


class House:
    """The folder of a scheduler that has ended. To commands, the scheduler seems to run.

    The test holds the daemon's lock and writes `daemon.json`.
    """

    def __init__(self, scheduler: Scheduler, session: str) -> None:
        self.s, self.session = scheduler, session

    def _set_clock(self, verb: str) -> None:
        """Set the start times of the daemon and of the running job, just before a verb prints them.

        Both times are set to AGO_S seconds ago. But if the verb is `show`, which prints the start time of the job, this
        start time is set to the constant THEN.
        """
        now = time.time()
        info = {"pid": 4711, "started_at": now - AGO_S, "runner": "screen"}
        (self.s.folder / ".gpujob" / "daemon.json").write_text(json.dumps(info))
        with contextlib.closing(sqlite3.connect(self.s.folder / ".gpujob" / "store.db")) as store:
            store.execute(
                "UPDATE jobs SET started_at=? WHERE state='running'", (THEN if verb == "show" else now - AGO_S,)
            )
            store.commit()

    def _same(self, text: str) -> str:
        """Return the text, with the parts that differ from run to run replaced by fixed texts of the same width."""
        folder = str(self.s.folder)
        text = text.replace(folder, "/srv/gpujob".ljust(len(folder), "-")).replace(
            self.session.split(".")[0] + ".", "PID."
        )
        text = re.sub(r"/tmp/gj\w*(?=…)", lambda found: "/srv/gpujob"[: len(found[0])], text)  # a path that was cut
        text = re.sub(r"(?<![\d:T])\d\d:\d\d(?![:\d])", "14:20", text)
        text = re.sub(r"20\d\d-\d\d-\d\d(?=\s+14:20)", "2026-01-04", text)  # a time of a later day
        text = re.sub(r" to\s+20[-:.\dT\s]+Z$", lambda found: re.sub(r"\d", "N", found[0]), text, flags=re.M)
        return re.sub(r"^ran( +)\d+ d( |\n  )\d+ h$", r"ran\1N d\2N h", text, flags=re.M)

    def piped(self, *words: str, **environ: str) -> str:
        self._set_clock(words[0])
        with tempfile.TemporaryFile() as out:
            child = fork_server.start(words, self.s.folder, {**self.s.environ, **environ}, out, out)
            code = child.wait(90)
            out.seek(0)
            text = out.read()
        assert code in (0, 2, 6), text
        return self._same(text.decode())

    def on_terminal(self, columns: int, *words: str, **environ: str) -> str:
        self._set_clock(words[0])
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        environ = {**self.s.environ, **environ}
        child = fork_server.start(words, self.s.folder, environ, theirs, theirs, theirs)
        os.close(theirs)
        data = b""
        with contextlib.suppress(OSError):  # EIO: the command has closed its end
            while piece := os.read(ours, 65536):
                data += piece
        os.close(ours)
        assert child.wait(60) in (0, 2, 6), data
        return self._same(data.decode().replace("\r\n", "\n"))


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    """Yield a folder with eight jobs: 1 and 3 done, 2 failed, 4 running, 8 cancelled, 5 to 7 waiting. GPU 1 is paused.

    Job 5 waits for a free GPU, job 6 for a dependency, and job 7 for its script.
    """
    folder = Path(tempfile.mkdtemp(prefix="gj", dir="/tmp"))
    s = Scheduler(folder, 2)
    # The local time is about noon, so that expected times are never of another day, which would be shown.
    s.environ |= {
        "TZ": f"<noon>{time.gmtime().tm_hour - 12:+d}",
        "TERM": "xterm-256color",
        "LC_ALL": "C.UTF-8",
        "PYTHONIOENCODING": "utf-8",
    }
    s.environ.pop("NO_COLOR", None)
    (folder / "train.py").write_text("print('epoch 1')\n")
    (folder / "bad.py").write_text(
        "print('加载 model')\nprint('no such layer: \\x1b[31mhead\\x1b[0m')\nprint('ModuleNotFoundError: No module named apex')\nraise SystemExit(3)\n"
    )
    (folder / "long.py").write_text("import os, time\nwhile os.path.exists('hold-run'): time.sleep(0.05)\n")
    s.hold("run")
    s.append("0,train.py,,--lr 0.1,0;label=base", "0,bad.py,,--layers 12 --name r\u00e9sum\u00e9,1", "0,train.py,,,0", "x,train.py,,", "0,train.py,,--lr 0.1,0")  # fmt: skip
    s.start()
    s.wait_ended(3)
    s.cli("pause", "1")
    s.append("0,long.py,,--d 数据 --mode fp16,0;label=长任务")
    s.wait_state(4, "running")
    s.append("0,train.py,,--lr 0.2 --a-rather-long-option=with-a-rather-long-value --and-another 12345678,0;gpus=0.5;time=1h",
             "1,train.py,,--lr 0.3;after_ok=4", "0,gone.py,,--x", "0,train.py,,--lr 0.4,0")  # fmt: skip
    wait_for(lambda: s.rows("SELECT 1 FROM jobs WHERE id=7 AND reason_code='missing'"), "it misses its script")
    wait_for(lambda: len(s.states()) == 8, "eight jobs")
    s.cli("cancel", "8")
    wait_for(lambda: s.rows("SELECT 1 FROM reasons"), "reasons")
    wait_for(
        lambda: "PAUSED" in s.cli("status").stdout and "no-room" in s.cli("why", "5").stdout + "no-room", "reasons"
    )
    s.kill()
    session = "gpujob_0_fp16_4"
    server = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)", session], stdout=subprocess.DEVNULL
    )
    _fix(s, f"{server.pid}.{session}")
    lock = os.open(folder / ".gpujob" / "daemon.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield House(s, f"{server.pid}.{session}")
    finally:
        os.close(lock)
        server.send_signal(signal.SIGKILL)
        server.wait()
        s.end_all()
        shutil.rmtree(folder)


def _fix(s: Scheduler, session: str) -> None:
    """Set values in the store that differ from run to run to fixed values: times, pids, log names, interpreter."""
    with contextlib.closing(sqlite3.connect(s.folder / ".gpujob" / "store.db")) as store:
        store.execute("UPDATE jobs SET submitted_at=?+id", (THEN,))
        for job, argv, log in store.execute("SELECT id, argv, log FROM jobs WHERE argv!=''").fetchall():
            words, same = json.loads(argv), re.sub(r"_\d{8}_\d{6}", "_20260102_030405", log)
            os.rename(log, same)
            fixed = json.dumps(["/usr/bin/python3", *words[1:]])
            store.execute("UPDATE jobs SET argv=?, log=? WHERE id=?", (fixed, same, job))
        store.execute("UPDATE jobs SET interpreter='/usr/bin/python3 (Python 3.11.2)' WHERE interpreter!=''")
        store.execute("UPDATE jobs SET started_at=?+10*id WHERE started_at IS NOT NULL", (THEN,))
        store.execute("UPDATE jobs SET finished_at=?+10*id+61 WHERE finished_at IS NOT NULL", (THEN,))
        store.execute("UPDATE jobs SET pid=4242 WHERE pid IS NOT NULL")
        store.execute("UPDATE jobs SET session=? WHERE state='running'", (session,))
        for job, n, detail in store.execute("SELECT job, n, detail FROM events").fetchall():
            detail = re.sub(r'"pid": \d+', '"pid": 4242', detail)
            detail = re.sub(r'"ran": [\d.]+', '"ran": 61.0', detail)
            store.execute("UPDATE events SET at=?, detail=? WHERE job=? AND n=?", (THEN + 100 * n, detail, job, n))
        store.commit()


def golden(name: str, text: str) -> None:
    """Assert that the text equals the golden file with this name.

    With GPUJOB_GOLDEN=write, first write the text to it.
    """
    path = GOLDEN / f"{name}.txt"
    shown = text.replace(ESCAPE, "<ESC>")
    if WRITE:
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(shown)
    assert shown == path.read_text(), f"{path.name}: see the top of {Path(__file__).name}"


def harmless(text: str) -> bool:
    return not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


@pytest.mark.parametrize("verb", VERBS)
def test_k09_piped_output_equals_the_golden_file_without_colours(house: House, verb: str) -> None:
    """K09, S3.38, S3.39: Piped output has no colours, even with FORCE_COLOR, and equals the golden file."""
    text = house.piped(*VERBS[verb])
    golden(f"{verb}.piped", text)
    assert harmless(text) and text == house.piped(*VERBS[verb], FORCE_COLOR="1")


@pytest.mark.parametrize("columns", [100, 20])
@pytest.mark.parametrize("verb", VERBS)
def test_k09_no_line_is_wider_than_the_terminal(house: House, verb: str, columns: int) -> None:
    """K09: No line is wider than the terminal. A wide character takes two columns."""
    text = house.on_terminal(columns, *VERBS[verb], NO_COLOR="1")
    golden(f"{verb}.{columns}", text)
    assert harmless(text)
    assert max(map(cell_len, text.splitlines())) <= columns
    assert house.on_terminal(columns, *VERBS[verb], TERM="dumb") == text


def test_k09_at_twenty_columns_ids_and_states_are_shown_whole(house: House) -> None:
    """K09: On a terminal of 20 columns, the ids and states of jobs and GPUs are not cut."""
    text = house.on_terminal(20, "jobs", NO_COLOR="1")
    for number, state in enumerate("done failed done running pending pending pending cancelled".split(), 1):
        assert re.search(rf"^{number} +{state}", text, re.M)
    text = house.on_terminal(20, "status", NO_COLOR="1")
    assert re.search(r"^0 +BUSY \(100%\)", text, re.M) and re.search(r"^4 +running", text, re.M)


@pytest.mark.parametrize("verb", ["status", "jobs", "show-done", "why-failed", "why-running"])
def test_k09_colours_do_not_change_the_words_on_a_terminal(house: House, verb: str) -> None:
    """K09: On a terminal the output has colours unless NO_COLOR is set.

    The words are the same with and without colours.
    """
    text = house.on_terminal(100, *VERBS[verb])
    golden(f"{verb}.colour", text)
    assert ESCAPE in text and harmless(text.replace(ESCAPE, ""))
    assert re.sub(r"\x1b\[\d*m", "", text) == house.on_terminal(100, *VERBS[verb], NO_COLOR="yes")
    assert ESCAPE not in house.on_terminal(100, *VERBS[verb], NO_COLOR="0")


@pytest.mark.parametrize(("verb", "variable"), [*((verb, "LC_ALL") for verb in VERBS), ("status", "LANG")])
def test_k09_all_output_is_ascii_in_a_c_locale(house: House, verb: str, variable: str) -> None:
    """K09: All output is ASCII if LC_ALL or LANG selects the C locale."""
    said = {"LC_ALL": "", "LC_CTYPE": "", "PYTHONIOENCODING": "", variable: "C"}
    text = house.on_terminal(60, *VERBS[verb], NO_COLOR="1", **said)
    assert text.isascii() and harmless(text) and max(map(len, text.splitlines())) <= 60
    if variable == "LC_ALL":
        golden(f"{verb}.ascii", text)
    assert house.piped(*VERBS[verb], **said).isascii()


def test_k09_errors_and_help_are_ascii_in_a_c_locale(house: House) -> None:
    """K09: In a C locale errors and help are ASCII and not empty, and there is no traceback."""
    for words in (["show", "长"], ["--help"], ["cancel", "--help"], ["jobs", "--state", "…"]):
        text = house.piped(*words, LC_ALL="C", PYTHONIOENCODING="")
        assert text.isascii() and "Traceback" not in text and text.strip()


@pytest.mark.smoke
def test_k09_the_error_for_a_mistyped_word_names_the_most_similar_one(house: House) -> None:
    """K09: For a mistyped verb, option, state or label, one line is printed.

    If a known word is similar, it is named.
    """
    lines = [
        f"{' '.join(words)}\n{house.piped(*words)}"
        for words in (
            ["statsu"], ["cancle", "3"], ["submit", "--prioritty", "3", "--", "x"], ["jobs", "--state", "faild"],
            ["cancel", "bsae"], ["show", "99"], ["why", "9-7"], ["help", "cancle"], ["nothing-like-it"],
            ["submit", "--", "echo hi; sleep 1"], ["--json", "status"], ["queue", "stop"],
        )
    ]  # fmt: skip
    assert all(line.count("\n") == 2 for line in lines), lines
    golden("mistakes", "\n".join(lines))


@pytest.mark.parametrize("verb", ["status", "jobs", "show-done"])
def test_k09_a_closed_pipe_is_no_error(house: House, verb: str) -> None:
    """K09: If the reader of a pipe closes it early, as in `gpujob jobs | head -1`, the exit code is 0.

    No message is printed.
    """
    words = " ".join(VERBS[verb])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m scheduler {words} | head -c 1"], cwd=house.s.folder,
        env=house.s.environ, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert (done.returncode, done.stderr, len(done.stdout)) == (0, "", 1)
