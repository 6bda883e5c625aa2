"""Ten plausible bugs, which are put one after another into a copy of the program: the tests must catch each of them.

``make planted`` (``python -m tests.planted [NAME…]``) writes the result to planted.md beside this file.
`test_planted.py` checks that each bug can still be planted, and that planted.md records each bug as caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).with_name("planted.md")
LIMIT_S = 900


@dataclass(frozen=True)
class Bug:
    """A bug that can be planted.

    ``changes``: tuples of a file, a text that occurs exactly once in this file, and the text that replaces it.
    ``tests``: the tests that are run. At least one of these tests must fail.
    """

    name: str
    what: str
    changes: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


MACHINE = "tests/core/test_machine.py::test_the_guarantees_hold_in_random_histories_of_faults"
POINT = "tests/stories/test_crash_points.py::test_a01_to_a17_each_attempt_runs_once_after_a_kill_of_the_daemon"
BUGS = (
    Bug(
        "skipped fence",
        "a start is taken back without claiming its record",
        (
            (
                "scheduler/runners/adoption.py",
                "if attempt_record.give_up(path, job, boot_id(), int(now * 1e9)):",
                "if not os.path.exists(path):",
            ),
        ),
        ("tests/stories/test_starters.py", f"{POINT}[fence.taken-once]"),
    ),
    Bug(
        "commit after the start",
        "the supervisor is told before the transaction is committed",
        (
            (
                "scheduler/daemon/loop.py",
                "            if plan.starts:\n                crash_point(\"start.chosen\")\n",
                "            for job, launch in launches:\n                self.runner.start(job, launch)\n"
                "            self.runner.flush()\n            if plan.starts:\n                crash_point(\"start.chosen\")\n",
            ),
            (
                "scheduler/daemon/loop.py",
                "        for job, launch in launches:\n            self.runner.start(job, launch)\n        if launches:\n            self.runner.flush()\n",
                "        if launches:\n",
            ),
        ),
        (f"{POINT}[start.chosen-once]", f"{POINT}[store.before_commit-third]"),
    ),
    Bug(
        "offset outside the transaction",
        "how far the jobs file was read is written by itself, before the jobs of it",
        (
            ("scheduler/daemon/ingest.py", "        kept.save_mark(connection, batch.mark)\n", ""),
            (
                "scheduler/daemon/loop.py",
                "        with db.writing(sync=sync) as connection:\n",
                "        with db.writing() as connection:\n            for _, batch in batches:\n"
                "                kept.save_mark(connection, batch.mark)\n        with db.writing(sync=sync) as connection:\n",
            ),
        ),
        (f"{POINT}[ingest.batch-once]", f"{POINT}[start.chosen-once]"),
    ),
    Bug(
        "pid alone",
        "a process is known by its number, whenever it was started",
        (
            (
                "scheduler/system/processes.py",
                "    return found if found is not None and found.ticks == process.ticks else None\n",
                "    return found\n",
            ),
        ),
        ("tests/stories/test_crashes.py", "tests/runners"),
    ),
    Bug(
        "unknown is free",
        "a GPU that does not tell its memory is given out",
        (
            (
                "scheduler/core/admission.py",
                "if reading.memory_used_mib is None or not reading.memory_total_mib:\n            return Verdict(",
                "if False:\n            return Verdict(",
            ),
        ),
        (MACHINE, "tests/core/test_admission_properties.py"),
    ),
    Bug(
        "no fsync",
        "what is committed before a start is not brought to the disk",
        (
            (
                "scheduler/store/database.py",
                "PRAGMA synchronous={'FULL' if sync else 'NORMAL'}",
                "PRAGMA synchronous={'NORMAL' if sync else 'NORMAL'}",
            ),
        ),
        ("tests/breaking/test_sweep.py",),
    ),
    Bug(
        "shares as floats",
        "parts of a GPU are booked as fractions",
        (
            (
                "scheduler/core/placement.py",
                "self._book(i, -need.parts)",
                "self._unbooked[i] = int((self._unbooked[i] / WHOLE - need.parts / WHOLE) * WHOLE); self._book(i, 0)",
            ),
        ),
        (MACHINE, "tests/core/test_placement.py", "tests/core/test_decide_twin.py"),
    ),
    Bug(
        "csv over lines",
        "a quote that is not closed goes on in the next line",
        (
            (
                "scheduler/intake/tail.py",
                "            raw, position = data[position:end], end + 1\n",
                "            while data.count(b'\"', position, end) % 2 and data.find(b\"\\n\", end + 1) > 0:\n"
                "                end = data.find(b\"\\n\", end + 1)\n"
                "            raw, position = data[position:end], end + 1\n",
            ),
        ),
        ("tests/intake/test_tail.py", "tests/stories/test_bad_lines.py"),
    ),
    Bug(
        "released with the leader",
        "a GPU is free as soon as the leader ended, whatever lives of the job",
        (
            (
                "scheduler/core/decide.py",
                "        if leftovers and job.gpus:\n            holding",
                "        if False:\n            holding",
            ),
        ),
        (MACHINE, "tests/contracts", "tests/core/test_decide.py"),
    ),
    Bug(
        "clean state on damage",
        "a store that cannot be trusted is put aside and begun anew",
        (
            (
                "scheduler/store/database.py",
                '    integrity.check_begun(places)\n    if not os.path.exists(places.store)',
                '    try:\n        connection = read_only(places.store)\n        sound = connection.execute("PRAGMA quick_check(1)").fetchone()[0]\n'
                '        connection.close()\n    except sqlite3.Error:\n        sound = "no"\n    if sound != "ok":\n'
                '        for end in ("", "-wal", "-shm"):\n            with contextlib.suppress(OSError):\n'
                "                os.unlink(places.store + end)\n    if not os.path.exists(places.store)",
            ),
        ),
        ("tests/stories/test_recover.py",),
    ),
)  # fmt: skip


def plant(bug: Bug, folder: Path) -> None:
    """Make the changes of a bug in the copy of the program in ``folder``.

    Raises ValueError if a text that the bug replaces does not occur exactly once in its file.
    """
    for name, old, new in bug.changes:
        path = folder / name
        text = path.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{bug.name}: {name} holds {text.count(old)} times: {old!r}")
        path.write_text(text.replace(old, new))


def copy_to(folder: Path) -> None:
    """Copy the tracked files of the repository, with uncommitted changes, to ``folder``."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def caught_by(bug: Bug) -> tuple[str, float]:
    """Run the tests of a bug. Return the name of the first test that fails, and the seconds until its failure.

    The name is empty if no test fails.
    """
    with tempfile.TemporaryDirectory(prefix="planted-") as made:
        folder = Path(made) / "copy"
        copy_to(folder)
        plant(bug, folder)
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *bug.tests],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{bug.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
        found = failed[0].removeprefix("FAILED ").partition(" - ")[0] if failed else ""
        return found, time.monotonic() - began


def main(words: list[str]) -> int:
    """Plant the bugs that ``words`` name, or all bugs; return 1 if a bug is not caught.

    Exit with 2 for an unknown name.
    """
    reader = argparse.ArgumentParser(prog="python -m tests.planted", description=main.__doc__)
    names = [bug.name for bug in BUGS]
    reader.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(names)}")
    wanted = reader.parse_args(words).names
    if unknown := [name for name in wanted if name not in names]:
        reader.error(f"no such bug: {unknown[0]}; known: {', '.join(names)}")
    missed = 0
    for bug in BUGS:
        if wanted and bug.name not in wanted:
            continue
        found, seconds = caught_by(bug)
        missed += not found
        note(bug, found)
        print(f"{bug.name}: {found or 'NOT CAUGHT'} ({seconds:.0f} s)", flush=True)
    return 1 if missed else 0


def note(bug: Bug, found: str) -> None:
    """Write the result of a bug into planted.md. The rows of other bugs stay unchanged."""
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in RESULT.read_text().splitlines() if " | " in line}
    rows[bug.name] = f"| {bug.name} | {bug.what} | {f'`{found}`' if found else '**not caught**'} |"
    head = "Written by `make planted`: each bug was put into a copy of the program, and its tests were run.\n"
    table = "| planted bug | what | the first test that failed |\n|---|---|---|\n"
    RESULT.write_text(
        f"# Planted bugs\n\n{head}\n{table}" + "\n".join(rows[b.name] for b in BUGS if b.name in rows) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
