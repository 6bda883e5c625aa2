"""Tests of the differences between a failed run and the last good run of the same script."""

from dataclasses import replace

import pytest

from scheduler.core.job import Failure, JobSpec
from scheduler.core.run_differences import (
    NO_GOOD_RUN,
    UNKNOWN,
    compared,
    difference_lines,
    differences,
    is_compared,
    since_good_run,
)
from scheduler.core.run_facts import Code, GoodRun, Run, RunFacts
from scheduler.core.run_target import group_of, target_of
from tests.builders import a_job

GOOD = Run(words=("--lr", "0.01", "data"), interpreter="/e/bin/python (3.10.4)", folder="/w", gpus=("A100-80GB",))
SETS = {
    "e1": {"HF_HOME": "1", "FOO": "2", "SAME": "3"},
    "e2": {"HF_HOME": "9", "SAME": "3", "BATCH_DEBUG": "4"},
    "p1": {"torch": "2.4.0", "scipy": "1.0"},
    "p2": {"torch": "2.5.1", "numpy": "2.1"},
    "same": {"torch": "2.4.0", "scipy": "1.0"},
}
CODE = Code("/w/train.py", 10, "aa", "1a2b3c4d" * 5)


def code(**changes: object) -> RunFacts:
    return RunFacts(code=replace(CODE, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "before", "told"),
    [
        ({}, {}, ()),
        ({"words": ("--lr", "0.1", "data")}, {}, ("arguments: --lr 0.1 instead of --lr 0.01",)),
        ({"words": ("--lr", "0.01", "data", "--fast")}, {}, ("arguments: added --fast",)),
        ({"words": ("data",)}, {}, ("arguments: removed --lr 0.01",)),
        ({"words": ("--lr", "0.01", "more")}, {}, ("arguments: more instead of data",)),
        ({"words": ("data", "--lr", "0.01")}, {}, ("arguments: in another order",)),
        ({"words": ("lr=3",)}, {"words": ("lr=4",)}, ("arguments: lr=3 instead of lr=4",)),
        ({"words": ("--x=-3",)}, {"words": ("--x=4",)}, ("arguments: --x=-3 instead of --x=4",)),
        ({"words": ("--x", "-3")}, {"words": ("--x", "-4")}, ("arguments: --x -3 instead of --x -4",)),
        ({"words": ("--token", "s3cr3tA", "-v")}, {"words": ("--token", "s3cr3tB")},
         ("arguments: another value of --token, added -v",)),
        ({"words": ("--token", "s3cr3tA")}, {"words": ()}, ("arguments: added --token ***",)),
        ({"words": ("--wandb_key", "-9abcSECRET")}, {"words": ("--wandb_key", "-8abcSECRET")},
         ("arguments: another value of --wandb_key",)),
        ({"words": ("--lr", "-1e-3")}, {"words": ("--lr", "-.5")}, ("arguments: --lr -1e-3 instead of --lr -.5",)),
        ({"words": ("PASSWORD=s3cr3tA",)}, {"words": ("PASSWORD=s3cr3tB",)}, ("arguments: another value of PASSWORD",)),
        ({"words": tuple("abcdefgh")}, {"words": ()}, ("arguments: added a b c d e f g h",)),
        ({"words": tuple(f"--{c}" for c in "abcdefgh")}, {"words": ()},
         ("arguments: added --a, added --b, added --c, added --d, added --e, added --f, and 2 more",)),
        ({"interpreter": "/f/bin/python (3.11.7)"}, {}, ("Python 3.10.4 → 3.11.7",)),
        ({"interpreter": "/f/bin/python (3.10.4)"}, {}, ("interpreter: /f/bin/python instead of /e/bin/python",)),
        ({"interpreter": ""}, {}, ()),
        ({"conda_env": "base"}, {}, ("conda environment: base instead of none",)),
        ({"folder": "/x"}, {}, ("folder: /x instead of /w",)),
        ({"need": "0.25 of one GPU"}, {"need": "one whole GPU"}, ("need: 0.25 of one GPU instead of one whole GPU",)),
        ({"gpus": ("A100-40GB",)}, {}, ("GPU: A100-40GB instead of A100-80GB",)),
        ({"gpus": ("A100-80GB", "A100-80GB")}, {}, ("GPU: 2 × A100-80GB instead of A100-80GB",)),
        ({"driver": "535.1"}, {"driver": "550.2"}, ("driver: 535.1 instead of 550.2",)),
        ({"driver": ""}, {"driver": "550.2"}, ()),
        ({"facts": RunFacts("e2")}, {"facts": RunFacts("e1")},
         ("environment: HF_HOME changed, BATCH_DEBUG added, FOO removed",)),
        ({"facts": RunFacts("e1", (("SAME", "8"), ("NEW", "1")))}, {"facts": RunFacts("e1")},
         ("environment: SAME changed, NEW added",)),
        ({"facts": RunFacts("")}, {"facts": RunFacts("e1")}, ()),
        ({"facts": RunFacts("gone")}, {"facts": RunFacts("e1")}, ()),
        ({"facts": RunFacts(packages="p2")}, {"facts": RunFacts(packages="p1")},
         ("versions: torch 2.4.0 → 2.5.1, numpy added, scipy removed",)),
        ({"facts": RunFacts(packages="same")}, {"facts": RunFacts(packages="p1")}, ()),
        ({"facts": RunFacts(packages="")}, {"facts": RunFacts(packages="p1")}, ()),
        ({"facts": code(digest="bb", commit="5d6e7f80" * 5)}, {"facts": code()},
         ("code: train.py has changed since (commit 1a2b3c4 → 5d6e7f8)",)),
        ({"facts": code(digest="bb")}, {"facts": code()}, ("code: train.py has changed since",)),
        ({"facts": code(size=11)}, {"facts": code()}, ("code: train.py has changed since",)),
        ({"facts": code(commit="5d6e7f80" * 5)}, {"facts": code()},
         ("code: commit 1a2b3c4 → 5d6e7f8 (train.py itself has not changed)",)),
        ({"facts": code(commit="")}, {"facts": code()}, ()),
        ({"facts": RunFacts()}, {"facts": code()}, ()),
    ],
)  # fmt: skip
def test_differences_are_told_in_short_sentences(
    now: dict[str, object], before: dict[str, object], told: tuple[str, ...]
) -> None:
    """Each kind of difference is one sentence; secrets are hidden, and what is not known is not compared."""
    assert differences(replace(GOOD, **now), replace(GOOD, **before), SETS) == told  # type: ignore[arg-type]


def test_a_failure_without_a_known_cause_gets_a_class_if_there_is_a_good_run() -> None:
    """Without a good run, the failure stays as it was found, and says that no good run is known."""
    good = GoodRun(17, 100.0, GOOD)
    oom = Failure("oom", "CUDA out of memory", "less")
    found = compared(oom, replace(GOOD, words=()), good, SETS)
    assert found is not None and (found.kind, found.good_run, found.good_at) == ("oom", 17, 100.0)
    assert found.differs == ("arguments: removed --lr 0.01, removed data",)
    unknown = compared(None, GOOD, good, SETS)
    assert unknown is not None and (unknown.kind, unknown.differs) == (UNKNOWN, ())
    assert compared(None, GOOD, None, SETS) is None
    assert compared(oom, GOOD, None, SETS) == replace(oom, differs=(NO_GOOD_RUN,))


def test_the_good_run_is_named_with_its_age() -> None:
    """The lines for people name the job of the good run, or say that it is an earlier attempt of the same job."""
    job = a_job(id=20, finished_at=100.0 + 2 * 86400)
    job.log_finding = Failure("oom", good_run=17, good_at=100.0)
    assert since_good_run(job) == "job 17, the last good run (2 d 0 h before)"
    assert difference_lines(job) == (
        "compared with job 17, the last good run (2 d 0 h before):",
        "  nothing differs in what is compared",
    )
    job.log_finding = Failure("oom", good_run=20, good_at=None, differs=("a", "b"))
    assert difference_lines(job) == ("compared with an earlier attempt, the last good run:", "  a", "  b")
    job.log_finding = Failure("oom", differs=(NO_GOOD_RUN,))
    assert difference_lines(job) == (NO_GOOD_RUN,)
    job.log_finding = Failure("oom")
    assert difference_lines(job) == () == difference_lines(a_job())


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "GPUJOB_ID", "PWD", "SSH_CLIENT", "TERM_PROGRAM", "_", "PS1"])
def test_variables_that_always_differ_are_not_compared(name: str) -> None:
    """Variables of a terminal session, and those that the scheduler sets, tell nothing about a failure."""
    assert not is_compared(name) and is_compared("PATH") and is_compared("MY_PWD") and is_compared("TEMPERATURE")


def spec(*words: str, cwd: str = "/w", user: str = "") -> JobSpec:
    return JobSpec(source="submit", arguments=words, cwd=cwd, user=user)


@pytest.mark.parametrize(
    ("job", "name", "path", "words"),
    [
        (JobSpec(script="/w/t.py", arguments=("-a",)), "/w/t.py", "/w/t.py", ("-a",)),
        (spec("python", "-u", "t.py", "--lr", "1"), "/w/t.py", "/w/t.py", ("-u", "--lr", "1")),
        (spec("torchrun", "--nproc_per_node", "2", "./t.py"), "/w/t.py", "/w/t.py", ("--nproc_per_node", "2")),
        (spec("python", "-m", "pkg.train", "-a"), "python pkg.train", "", ("-m", "pkg.train", "-a")),
        (spec("bin/train", "x"), "/w/bin/train", "/w/bin/train", ("x",)),
        (spec("sh", "-c", "A=1 python t.py 'a b'"), "/w/t.py", "/w/t.py", ("A=1", "a b")),
        (spec("bash", "-lc", "echo 'open"), "echo 'open", "", ("'open",)),
        (spec("python", "t.py", cwd=""), "t.py", "t.py", ()),
        (spec("A=1"), "", "", ("A=1",)),
    ],
)
def test_the_script_of_a_command_is_found(job: JobSpec, name: str, path: str, words: tuple[str, ...]) -> None:
    """Runs of one script are compared, whether a line, a command or a shell names it."""
    found = target_of(job)
    assert (found.name, found.path, found.words) == (name, path, words)


def test_runs_of_other_users_are_not_compared() -> None:
    """The group of runs depends on user and script, not on the arguments."""
    first = group_of(spec("python", "t.py", "-a"))
    assert first == group_of(spec("python", "-u", "t.py")) == group_of(JobSpec(script="/w/t.py"))
    assert first != group_of(spec("python", "t.py", user="lab3")) and first != group_of(spec("python", "u.py"))
