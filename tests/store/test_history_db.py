"""Tests of the history file: its limited size, its mode, the averages, and the replacement of an unusable file."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.counters import TICK_BUCKETS
from scheduler.core.history import KEEP_LONG_S, KEEP_SHORT_S, LONG_S, QUEUE, SHORT_S, Batch, PauseSpan, bucket_of
from scheduler.store import history_db
from scheduler.store.history_db import HistoryFile

NOW = 1_800_000_000.0
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "history.db")


def gpu(at: float, used: float | None = 100.0, load: float | None = 0.5, index: int = 0) -> tuple[float | None, ...]:
    return (index, at, used, used, 0, 0, load, 60, 300, 1.0, 0, used, load)


def job(at: float, memory: float | None = 100.0, number: int = 1, attempt: int = 1) -> tuple[float | None, ...]:
    return (number, attempt, at, memory, 0.5, memory, 0.5)


def fill(
    file: HistoryFile, rows: Iterable[tuple[float | None, ...]], jobs: Iterable[tuple[float | None, ...]] = ()
) -> None:
    """Write these rows of GPUs and of jobs into the history file, one batch for each interval."""
    by_time: dict[float, tuple[list[tuple[float | None, ...]], list[tuple[float | None, ...]]]] = {}
    for row in rows:
        by_time.setdefault(row[1] or 0.0, ([], []))[0].append(row)
    for row in jobs:
        by_time.setdefault(row[2] or 0.0, ([], []))[1].append(row)
    for at, (gpus, of_jobs) in by_time.items():
        file.write(Batch(at + SHORT_S, tuple(gpus), tuple(of_jobs)))


def rows_in(path: str, table: str) -> int:
    connection = sqlite3.connect(path)
    try:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    finally:
        connection.close()


def test_five_minute_rows_contain_means_and_maxima(path: str) -> None:
    """A five-minute row has the mean and the maximum of its ten-second rows.

    A missing value does not count in a mean.
    """
    dice = random.Random(8)
    start = bucket_of(NOW, LONG_S) - 40 * LONG_S
    rows = []
    for n in range(1200):
        if not 400 <= n < 700:  # a gap, in which no scheduler ran
            told = n % 7 != 0
            rows.append(
                gpu(start + n * SHORT_S, dice.randrange(80_000) if told else None, dice.random() if n % 3 else None)
            )
    file = HistoryFile(path)
    fill(file, rows)
    file.close()
    found = history_db.gpu_history(path, start, NOW, LONG_S, NOW)[0]
    expected = {}
    for row in rows:
        expected.setdefault(bucket_of(row[1] or 0, LONG_S), []).append(row)
    assert [sample.at for sample in found] == sorted(expected)  # the gap has no samples
    for sample in found:
        used = [row[2] for row in expected[sample.at] if row[2] is not None]
        load = [row[6] for row in expected[sample.at] if row[6] is not None]
        assert sample.used_mib == pytest.approx(sum(used) / len(used), abs=0.06) and sample.used_max_mib == max(used)
        assert sample.load == pytest.approx(sum(load) / len(load), abs=1e-4) and sample.load_max == pytest.approx(
            max(load)
        )
        assert (sample.power_w, sample.paused) == (300, False)
    fine = history_db.gpu_history(path, start, NOW, SHORT_S, NOW)[0]
    assert [(sample.at, sample.used_mib) for sample in fine] == [(row[1], row[2]) for row in rows]


def test_ten_second_rows_are_kept_for_a_day_and_five_minute_rows_for_90_days(path: str) -> None:
    """Ten-second rows are kept for a day, and five-minute rows for 90 days. A query uses both kinds."""
    file = HistoryFile(path)
    old = bucket_of(NOW, LONG_S) - KEEP_LONG_S - 10 * LONG_S
    fill(file, [gpu(old + n * SHORT_S) for n in range(60)])
    assert rows_in(path, "gpu_short") == 60 and rows_in(path, "gpu_long") == 2
    fill(file, [gpu(NOW - KEEP_SHORT_S - 2 * LONG_S + n * SHORT_S, 200.0) for n in range(60)])
    assert rows_in(path, "gpu_short") == 60  # the rows of 90 days ago are deleted
    fill(file, [gpu(NOW - SHORT_S, 300.0), gpu(NOW, 300.0)])
    file.close()
    assert rows_in(path, "gpu_short") == 2
    assert {s.used_mib for s in history_db.gpu_history(path, 0, NOW + 60, 0, NOW)[0]} == {200.0, 300.0}
    assert history_db.gpu_history(path, NOW - 60, NOW + 60, 0, NOW)[0][-1].at == NOW
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("SELECT min(at) FROM gpu_long").fetchone()[0] > NOW - KEEP_LONG_S


def test_the_number_of_history_rows_is_limited(path: str) -> None:
    """K18: The number of rows is limited. The oldest rows are deleted first."""
    file = HistoryFile(path, most_rows=500)
    start = bucket_of(NOW, LONG_S)
    for n in range(120):
        at = start + n * SHORT_S
        file.write(Batch(at + SHORT_S, jobs=tuple(job(at, number=20 * n + one) for one in range(20))))
    file.close()
    assert rows_in(path, "job_short") <= 500 + 20 * LONG_S / SHORT_S  # the limit is checked every five minutes
    assert rows_in(path, "job_long") <= 500 + 20 * LONG_S / SHORT_S
    assert history_db.job_history(path, 20 * 119) and not history_db.job_history(path, 0)


def test_each_attempt_of_a_job_has_its_own_curve(path: str) -> None:
    """Each attempt of a job has its own curve, which has at most 2,000 points.

    The curve uses ten-second rows. If these were deleted, it uses five-minute rows.
    """
    file = HistoryFile(path)
    start = bucket_of(NOW, LONG_S) - KEEP_SHORT_S - 20 * LONG_S
    fill(file, (), (job(start + n * SHORT_S, 10.0) for n in range(300)))
    fill(file, (), (job(NOW + n * SHORT_S, 20.0 + n % 2, attempt=2) for n in range(3000)))
    file.close()
    found = history_db.job_history(path, 1)
    assert list(found) == [1, 2] and {sample.memory_mib for sample in found[1]} == {10.0}
    assert len(found[1]) == 10 and 1000 < len(found[2]) <= 2000
    assert {sample.memory_max_mib for sample in found[2]} == {21.0}
    assert history_db.job_history(path, 2) == {}


def test_pauses_are_stored_with_exact_times_across_restarts(path: str) -> None:
    """Pauses are stored with exact times. This also holds if the file is closed and opened again.

    The last change of each GPU is never deleted.
    """
    none: frozenset[int] = frozenset()
    file = HistoryFile(path)
    file.write(Batch(NOW, pauses=((NOW - 50, none), (NOW - 40.5, frozenset({1})), (NOW - 30, frozenset({1, QUEUE})))))
    file.write(Batch(NOW + 10, pauses=((NOW - 30, frozenset({1, QUEUE})),)))
    file.close()
    again = HistoryFile(path)
    again.write(Batch(NOW + 100, pauses=((NOW + 90, frozenset({1})),)))
    assert history_db.pauses(path, NOW - 60, NOW) == [PauseSpan(1, NOW - 40.5, None), PauseSpan(None, NOW - 30, None)]
    assert history_db.pauses(path, 0, NOW + 200) == [
        PauseSpan(1, NOW - 40.5, None),
        PauseSpan(None, NOW - 30, NOW + 90),
    ]
    again.write(Batch(NOW + 2 * KEEP_LONG_S, pauses=((NOW + 90, frozenset({1})),)))
    again.close()
    assert [span.gpu for span in history_db.pauses(path, 0, NOW + 3 * KEEP_LONG_S)] == [1]


def test_pass_counts_continue_over_restarts(path: str) -> None:
    """The counts of passes continue after the file was closed and opened again."""
    counts = (*range(len(TICK_BUCKETS)), 3)
    assert history_db.ticks(path) is None
    for run in (1, 2):
        file = HistoryFile(path)
        file.write(Batch(NOW, ticks=counts, tick_sum=1.5))
        file.write(Batch(NOW + 10, ticks=tuple(2 * n for n in counts), tick_sum=4.0))
        file.close()
        found = history_db.ticks(path)
        assert found is not None and sum(found[0].values()) == run * 2 * sum(counts) and found[1] == run * 4.0


def test_after_the_clock_is_set_back_only_samples_of_the_future_are_deleted(path: str) -> None:
    file = HistoryFile(path)
    fill(file, [gpu(NOW + 3 * KEEP_SHORT_S + n * SHORT_S, 1.0) for n in range(90)])  # rows with future times
    fill(file, [gpu(NOW + n * SHORT_S, 2.0) for n in range(90)])
    file.close()
    found = history_db.gpu_history(path, NOW - 3600, NOW + 3600, LONG_S, NOW + 1000)[0]
    assert {sample.used_mib for sample in found} == {2.0} and rows_in(path, "gpu_short") == 90


# -- damage and errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["noise", "empty", "other tables", "another version", "a page"])
def test_a_damaged_history_file_is_replaced_by_a_new_one(path: str, what: str) -> None:
    file = HistoryFile(path)
    fill(file, [gpu(NOW - 1000 + n * SHORT_S) for n in range(100)])
    file.close()
    if what == "noise":
        Path(path).write_bytes(os.urandom(20_000))
    elif what == "empty":
        Path(path).write_bytes(b"")
    elif what == "a page":
        with open(path, "r+b") as stream:
            for page in range(1, os.path.getsize(path) // 4096):
                stream.seek(page * 4096)
                stream.write(os.urandom(2000))
    else:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DROP TABLE gpu_short" if what == "other tables" else "PRAGMA user_version=9")
    again = HistoryFile(path)
    again.write(Batch(NOW, (gpu(NOW - 10),)))
    again.close()
    assert [s.at for s in history_db.gpu_history(path, NOW - 2000, NOW, 0, NOW)[0]] == [NOW - 10]
    assert os.stat(path).st_mode & 0o777 == 0o600
    aside = f"{path}.v9" if what == "another version" else f"{path}.damaged"
    assert os.path.exists(aside) is (what != "empty") and len(again.told) == (what != "empty")


def test_a_removed_history_file_is_created_again(path: str) -> None:
    file = HistoryFile(path)
    file.write(Batch(NOW, (gpu(NOW - 10),)))
    os.unlink(path)
    file.write(Batch(NOW + 10, (gpu(NOW),)))
    assert [s.at for s in history_db.gpu_history(path, NOW - 99, NOW + 10, 0, NOW)[0]] == [NOW] and not file.told
    file.close()


@pytest.mark.parametrize("what", ["link", "folder", "fifo"])
def test_a_history_path_that_is_no_regular_file_is_not_used(path: str, tmp_path: Path, what: str) -> None:
    """If a link, folder or FIFO is at the path of the history file, an error is raised without waiting.

    A link is not followed.
    """
    if what == "link":
        os.symlink(tmp_path / "victim", path)
    elif what == "fifo":
        os.mkfifo(path)
    else:
        os.mkdir(path)
    with pytest.raises(OSError):
        HistoryFile(path).write(Batch(NOW, (gpu(NOW),)))
    assert not (tmp_path / "victim").exists()


def test_a_locked_history_file_loses_only_the_current_samples(path: str) -> None:
    file = HistoryFile(path)
    file.write(Batch(NOW, (gpu(NOW - 10),), pauses=((NOW, frozenset({1})),)))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        file.write(Batch(NOW + 10, (gpu(NOW),), pauses=((NOW + 5, frozenset()),)))
    other.close()
    file.write(Batch(NOW + 20, (gpu(NOW + 10),), pauses=((NOW + 5, frozenset()),)))
    file.close()
    assert [s.at for s in history_db.gpu_history(path, NOW - 99, NOW + 30, 0, NOW + 20)[0]] == [NOW - 10, NOW + 10]
    assert history_db.pauses(path, 0, NOW + 30) == [PauseSpan(1, NOW, NOW + 5)] and not file.told


_FULL = """
import resource, sqlite3, sys
from scheduler.core.history import Batch
from scheduler.store.history_db import HistoryFile
file, n = HistoryFile(sys.argv[1]), 0
row = lambda n: (0, 1e9 + 10 * n, *[n] * 8, 0, n, 1)
file.write(Batch(1e9, (row(0),)))
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
failed = 0
for n in range(1, 300):
    try:
        file.write(Batch(1e9 + 10 * n, tuple((gpu, *row(n)[1:]) for gpu in range(50))))
    except (sqlite3.Error, OSError) as error:
        failed += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.write(Batch(2e9, (row(10 ** 8),)))
print(failed > 0, file.told)
"""


def test_a_full_disk_loses_samples_but_keeps_the_history_file(path: str) -> None:
    """F01: On a full disk samples are lost, but the history file is kept.

    When there is room, samples are written again. In this test a limit on the size of files replaces the full disk.
    """
    done = subprocess.run(
        [sys.executable, "-c", _FULL, path], env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)), check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip() == "True []", done.stdout + done.stderr
    assert history_db.gpu_history(path, 2e9 - 1, 2e9 + 20, 0, 2e9)[0][0].at == 2e9


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every history file that a test has opened, because Python 3.13 and later warn about open files."""
    made: list[HistoryFile] = []
    begin = HistoryFile.__init__

    def remembered(self: HistoryFile, *words: Any, **named: Any) -> None:
        begin(self, *words, **named)
        made.append(self)

    monkeypatch.setattr(HistoryFile, "__init__", remembered)
    yield
    for one in made:
        one.close()


@pytest.mark.parametrize("mask", ["0", "077", "0777"])
def test_the_history_file_is_private_at_any_umask(tmp_path: Path, mask: str) -> None:
    """P9: At any umask the history file, its write-ahead log and the index of this log have mode 0600."""
    code = (
        "import os, sys; os.umask(int(sys.argv[2], 8))\n"
        "from scheduler.core.history import Batch\nfrom scheduler.store.history_db import HistoryFile\n"
        "file = HistoryFile(sys.argv[1])\nfile.write(Batch(1e9))\n"
        "for name in os.listdir(os.path.dirname(sys.argv[1])):\n"
        " print(oct(os.stat(os.path.join(os.path.dirname(sys.argv[1]), name)).st_mode & 0o777), name)\n"
        "os._exit(0)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "history.db"), mask]
    env = {**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert sorted(done.stdout.split()[1::2]) == ["history.db", "history.db-shm", "history.db-wal"]
    assert set(done.stdout.split()[::2]) == {"0o600"}


def test_readers_see_committed_samples_and_do_not_block_writers(path: str) -> None:
    file = HistoryFile(path)
    file.write(Batch(NOW, (gpu(NOW - 10),)))
    reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM gpu_short").fetchone()
    file.write(Batch(NOW + 10, (gpu(NOW),)))
    assert len(history_db.gpu_history(path, NOW - 99, NOW + 30, 0, NOW + 20)[0]) == 2
    reader.close()
    file.close()
