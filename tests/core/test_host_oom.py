"""Tests of the kernel's messages about processes that it ended for lack of memory, and of what they say about a failure."""

from __future__ import annotations

import pytest

from scheduler.core.failure_classes import classify
from scheduler.core.gpu import ResourceRequest
from scheduler.core.host_oom import Victim, pids_in, victims_in, was_killed, with_host_oom
from scheduler.core.job import Failure
from scheduler.core.own_classes import OwnClass

NEED = ResourceRequest(1, 1000)
# In the formats of Linux 3.10 (RHEL 7), 4.4, 4.15 (cgroup), 5.4, 5.15 (cgroup); that of 6.18 (cgroup v1) was recorded.
LINES: dict[str, tuple[list[str], tuple[int, int, bool, str]]] = {
    "3.10": (
        [
            "Out of memory: Kill process 4216 (java) score 617 or sacrifice child",
            "Killed process 4216 (java), UID 1000, total-vm:3146220kB, anon-rss:1024000kB, file-rss:0kB, shmem-rss:0kB",
        ],
        (4216, 1000, False, "Killed process 4216 (java) total-vm:3146220kB, anon-rss:1024000kB, file-rss:0kB, shmem-rss:0kB"),
    ),
    "4.4": (
        [
            "Out of memory: Kill process 1893 (python) score 900 or sacrifice child",
            "Killed process 1901 (python) total-vm:8392120kB, anon-rss:2048000kB, file-rss:1024kB",
        ],
        (1901, 2001, False, "Killed process 1901 (python) total-vm:8392120kB, anon-rss:2048000kB, file-rss:1024kB"),
    ),
    "4.15-cgroup": (
        [
            "Memory cgroup out of memory: Kill process 27182 (stress) score 1972 or sacrifice child",
            "Killed process 27182 (stress) total-vm:131628kB, anon-rss:65536kB, file-rss:0kB, shmem-rss:0kB",
            "oom_reaper: reaped process 27182 (stress), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
        ],
        (27182, 64, True, "Killed process 27182 (stress) total-vm:131628kB, anon-rss:65536kB, file-rss:0kB, shmem-rss:0kB"),
    ),
    "4.19-cgroup": (
        [
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=user,mems_allowed=0,oom_memcg=/u,task_memcg=/u,task=a,pid=77,uid=5",
            "Memory cgroup out of memory: Kill process 77 (a) score 1000 or sacrifice child",
            "Killed process 77 (a) total-vm:2048kB, anon-rss:1024kB, file-rss:0kB, shmem-rss:0kB",
        ],
        (77, 1, True, "Killed process 77 (a) total-vm:2048kB, anon-rss:1024kB, file-rss:0kB, shmem-rss:0kB"),
    ),
    "5.4": (
        [
            "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
            "task_memcg=/user.slice,task=pt_main_thread,pid=5150,uid=1000",
            "Out of memory: Killed process 5150 (pt_main_thread) total-vm:61217416kB, anon-rss:32505856kB, file-rss:70000kB, "
            "shmem-rss:8192kB, UID:1000 pgtables:70000kB oom_score_adj:0",
        ],
        (
            5150, 31820, False,
            "Out of memory: Killed process 5150 (pt_main_thread) total-vm:61217416kB, anon-rss:32505856kB, "
            "file-rss:70000kB, shmem-rss:8192kB",
        ),
    ),
    "6.18-cgroup": (
        [
            "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/h,task_memcg=/h,"
            "task=python3,pid=18572,uid=0",
            "Memory cgroup out of memory: Killed process 18572 (python3) total-vm:221356kB, anon-rss:65024kB, "
            "file-rss:6604kB, shmem-rss:0kB, UID:0 pgtables:196kB oom_score_adj:0",
        ],
        (
            18572, 69, True,
            "Memory cgroup out of memory: Killed process 18572 (python3) total-vm:221356kB, anon-rss:65024kB, "
            "file-rss:6604kB, shmem-rss:0kB",
        ),
    ),
    "own-choice": (
        [
            "Out of memory (oom_kill_allocating_task): Killed process 9 (a) b) total-vm:1kB, anon-rss:2048kB, file-rss:0kB, "
            "shmem-rss:0kB, UID:1 pgtables:1kB oom_score_adj:0",
        ],
        (
            9, 2, False,
            "Out of memory (oom_kill_allocating_task): Killed process 9 (a) b) total-vm:1kB, anon-rss:2048kB, "
            "file-rss:0kB, shmem-rss:0kB",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_the_messages_of_several_kernels_are_understood(lines: tuple[list[str], tuple[int, int, bool, str]]) -> None:
    texts, (pid, mib, limited, sentence) = lines
    records = [(5.0, "usb 1-1: new device"), *((7.5, text) for text in texts), (9.0, "eth0: link up")]
    assert victims_in(records) == [Victim(pid, 7.5, mib, limited, sentence)]


def test_other_messages_of_the_kernel_tell_nothing() -> None:
    """A limit that ran out belongs to the next message alone; a name of a process cannot imitate a message."""
    others = [
        "Killed process 12 (python)",
        "x[5]: Killed process 12 (a) total-vm:1kB, anon-rss:2048kB",
        "Killed process twelve (a) total-vm:1kB, anon-rss:2048kB",
        "",
    ]
    assert victims_in((1.0, text) for text in others) == []
    first, second = LINES["4.15-cgroup"][0][:2], LINES["4.4"][0][1:]
    assert [victim.limited for victim in victims_in((1.0, text) for text in (*first, *second))] == [True, False]


VICTIM = Victim(40, 7.0, 31820, False, "Out of memory: Killed process 40 (python) total-vm:1kB, anon-rss:32505856kB")
WORKER = "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Killed."
POOL = "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while the future was running or pending."
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 3, in <module>\n    f()\n'


@pytest.mark.parametrize(
    ("log", "exit_code", "signal", "alone", "probable", "certain"),
    [
        ("", None, 9, "killed", "host_memory", "host_memory"),
        ("", 137, None, "killed", "host_memory", "host_memory"),
        ("step 1\n", 1, None, None, "host_memory", "host_memory"),
        ("x: line 3: 1234 Killed   python y.py\n", 137, None, "killed", "host_memory", "host_memory"),
        (f"{TRACE}{WORKER}\n", 1, None, "host_memory", "host_memory", "host_memory"),
        (f"{TRACE}{POOL}\n", 1, None, "traceback", "host_memory", "host_memory"),
        (f"{TRACE}MemoryError\n", 1, None, "host_memory", "host_memory", "host_memory"),
        (f"{TRACE}ValueError: x\n", 1, None, "traceback", "traceback", "traceback"),
        (f"{TRACE}torch.OutOfMemoryError: CUDA out of memory.\n", 1, None, "oom", "oom", "oom"),
        ("", None, 11, "crash", "crash", "crash"),
        ("", 127, None, "start", "start", "start"),
        ("", 0, None, None, None, None),
    ],
)  # fmt: skip
def test_the_kernel_decides_where_the_log_tells_no_better_cause(
    log: str, exit_code: int | None, signal: int | None, alone: str | None, probable: str | None, certain: str | None
) -> None:
    found = classify(log, NEED, exit_code, signal) if exit_code != 0 else None

    def kind(kills: int, victim: Victim | None = None) -> str | None:
        failure = with_host_oom(found, exit_code, kills, victim)
        return None if failure is None else failure.kind

    assert (kind(0), kind(2), kind(0, VICTIM)) == (alone, probable, certain)
    assert with_host_oom(found, exit_code, 0) is found


def test_the_hint_tells_how_sure_it_is_and_what_to_do() -> None:
    killed = Failure("killed", "x: line 3: 1234 Killed", "dmesg")
    certain = with_host_oom(killed, None, 1, VICTIM)
    assert certain is not None and certain.line == f"kernel: {VICTIM.sentence}"
    assert certain.hint.startswith(
        "the kernel ended it because the memory of the machine ran out (its process 40 had 31.1 GiB)"
    )
    probable = with_host_oom(killed, None, 1)
    assert probable is not None and probable.line == killed.line
    assert probable.hint.startswith("probably the kernel ended it") and "one process of this cgroup" in probable.hint
    assert "fewer workers" in certain.hint and "fewer workers" in probable.hint
    several = with_host_oom(None, 1, 3)
    assert several is not None and "3 processes of this cgroup" in several.hint
    own = [OwnClass("host_memory", (), "ask Ada")]
    assert [
        one and one.hint for one in (with_host_oom(None, 1, 3, None, own), with_host_oom(None, 1, 0, VICTIM, own))
    ] == ["ask Ada"] * 2
    log = Failure("host_memory", "MemoryError", "hint")
    assert with_host_oom(log, 1, 3) is log, "the log is as clear"


def test_pids_are_taken_only_from_lines_about_a_kill() -> None:
    assert pids_in(Failure("host_memory", WORKER)) == {1234}
    assert pids_in(Failure("killed", "bash: line 30: 12345 Killed   python x.py")) == {30, 12345}
    assert (
        pids_in(Failure("traceback", "ValueError: 1234")) == pids_in(Failure("killed")) == pids_in(None) == frozenset()
    )


def test_a_shell_tells_sigkill_by_137() -> None:
    assert [was_killed(*end) for end in ((None, 9), (137, None), (9, None), (None, 15), (1, None))] == [
        True,
        True,
        *[False] * 3,
    ]
