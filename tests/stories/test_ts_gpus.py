"""`ts` on a machine with GPUs: a real server with a fake NVIDIA driver."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpus.stub import FakeDriver, FakeSmi
from tests.stories.harness import alive, wait_for
from tests.stories.spooler import Spooler

TOTAL = 80_000
IDLE = 500  # MiB in use on an empty card
RUNS = 'echo "sees $CUDA_VISIBLE_DEVICES"; while [ -e "$0" ]; do sleep 0.02; done; exit "$1"'
LOST, UNKNOWN, MISMATCH = 15, 999, 18


class Graphics:
    """A `ts` server with simulated GPUs, and jobs that run until `release`.

    ``cards``: a letter for each GPU; "ab" gives GPU-a with index 0 and GPU-b with index 1.
    """

    def __init__(self, make: Callable[..., Spooler], folder: Path, cards: str, **environ: str) -> None:
        self.driver, smi = FakeDriver(folder / "driver"), FakeSmi(folder / "smi")
        smi.exit(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
        with self.driver.together():
            for card in cards:
                self.driver.gpu(f"GPU-{card}", total=TOTAL, used=IDLE, load=0)
        if not cards:
            environ["NVML_STUB_FILE"] = str(folder / "no such file")
        self.s = make(
            folder, **{**self.driver.environ(), **smi.environ(), "GPUJOB_SET_GPU_INTERVAL": "0.25", **environ}
        )
        self.gates: dict[int, Path] = {}

    def use(self, card: str, mib: int) -> None:
        """Set the used memory of a GPU; there is no process that uses the memory.

        Wait until a running server has read the value. ``mib``: the used memory in MiB, without the memory that is in
        use on an empty card.
        """
        self.driver.gpu(f"GPU-{card}", used=IDLE + mib)

        def seen() -> bool:
            said = json.loads(self.s.gpujob("status", "--json").stdout)
            return any(gpu["memory_used"] == (IDLE + mib) << 20 for gpu in said["gpus"] if gpu["uuid"] == f"GPU-{card}")

        if self.s.server.alive():
            wait_for(seen, f"{mib} MiB on {card} to be seen")

    def hold(self, *options: str, code: int = 0) -> int:
        """Queue a job that prints which GPUs it sees and runs until `release`; return its id."""
        gate = self.s.folder / f"gate{len(self.gates)}"
        gate.touch()
        number = self.s.add(*options, "sh", "-c", RUNS, str(gate), str(code))
        self.gates[number] = gate
        return number

    def release(self, *jobs: int) -> None:
        """End these jobs, which `hold` has queued, and wait until they have ended."""
        for job in jobs:
            self.gates[job].unlink()
        for job in jobs:
            self.s.wait_state(job, "finished")

    def sees(self, job: int) -> str:
        """Wait until the job has started; return its CUDA_VISIBLE_DEVICES."""
        self.s.wait_state(job, "running", "finished")
        text: str = wait_for(lambda: re.search(r"^sees (.*)\n", self.s.output(job), re.M), f"output of {job}").group(1)
        return text

    def waits(self, job: int, code: str, text: str = "") -> None:
        """Wait until the job has this reason code and ``text`` in its reason; check that `-s` prints `allocating`.

        ``code``: one reason code, or several that are separated by `|`.
        """
        seen: dict[str, Any] = {}

        def so() -> bool:
            seen.update(json.loads(self.s.gpujob("show", str(job), "--json").stdout))
            return seen["reason_code"] in code.split("|") and text in seen["reason"]

        try:
            wait_for(so, f"job {job} to wait with {code} {text}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {seen}") from None
        assert self.s.ts("-s", str(job)) == "allocating"

    def refused(self, *words: str) -> str:
        """Run `ts WORDS`, and check that it fails with one error line.

        Return this line without its beginning, which is `Error in the request: `.
        """
        done = self.s.run(*words)
        assert (done.returncode, done.stdout) == (255, ""), done
        assert done.stderr.startswith("Error in the request: ") and done.stderr.count("\n") == 1, done.stderr
        return done.stderr.removeprefix("Error in the request: ")


@pytest.fixture
def graphics(spooler: Callable[..., Spooler], tmp_path: Path) -> Iterator[Callable[..., Graphics]]:
    """Return a function that creates servers with GPUs; at the end of the test, let their jobs end."""
    made: list[Graphics] = []

    def make(cards: str = "ab", **environ: str) -> Graphics:
        made.append(Graphics(spooler, tmp_path, cards, **environ))
        return made[-1]

    yield make
    for one in made:
        for gate in one.gates.values():
            gate.unlink(missing_ok=True)


@pytest.mark.smoke
def test_s4_30_a_job_waits_for_free_gpus_with_enough_memory(graphics: Callable[..., Graphics]) -> None:
    """S4.30: A -G job is `allocating` until enough GPUs are free and each of them has enough free memory.

    The job sees only its own GPUs.
    """
    g = graphics("abc")
    g.use("b", 32_000)
    one, two = g.hold("-G", "1"), g.hold("-G", "1")
    assert {g.sees(one), g.sees(two)} == {"0", "2"}
    three = g.hold("--gpus", "1")
    g.waits(three, "foreign", "GPU 1")
    assert "allocating" in g.s.ts("-l").splitlines()[3]
    g.use("b", 0)
    assert g.sees(three) == "1"
    wide = g.hold("-G2")
    g.waits(wide, "no-wide-room")
    g.release(one)
    g.waits(wide, "no-wide-room", "1 is free")
    g.release(three)
    assert g.sees(wide) == "0,1"
    assert [g.s.ts("-w", str(job)) for job in (one, three)] == ["", ""]
    for options in ((), ("-G", "0")):
        assert g.sees(g.hold(*options)) == "-1", "no GPU is shown to a job without"
        g.release(max(g.gates))


def test_s4_31_s4_32_named_gpus_are_used_immediately_and_claimed(
    graphics: Callable[..., Graphics],
) -> None:
    """S4.31 S4.32 (bug 8): A -g job gets its GPUs immediately; a GPU stays claimed until its last -g job has ended."""
    g = graphics("ab")
    g.use("a", 70_000)
    named, also = g.hold("-g", "0"), g.hold("-g", "0,1")
    assert (g.sees(named), g.sees(also)) == ("0", "0,1"), "whatever is in use there, and by whom"
    third = g.hold("--gpu_indices", "1")
    assert g.sees(third) == "1"
    assert g.s.ts("-g").splitlines() == [
        "ID   GPU-IDs", f"{named:<4} 0", f"{also:<4} 0 1", f"{third:<4} 1",
    ]  # fmt: skip
    g.use("a", 0)
    waits = g.hold("-G", "1")
    g.waits(waits, "claimed", "a running job named ")
    g.release(named, third)
    g.waits(waits, "claimed", "no other job starts on GPUs 0,1: a running job named each of them (on=)")
    assert g.s.ts("-g").splitlines()[1:] == [f"{also:<4} 0 1"]
    g.s.kill()  # the next server must know the claims of running jobs
    g.waits(waits, "claimed")
    assert g.s.states()[also] == "running"
    g.release(also)
    assert g.sees(waits) in ("0", "1")
    over = g.hold("-g", g.sees(waits))
    assert g.sees(over) == g.sees(waits), "also where a -G job is"
    g.release(waits)
    both = g.hold("-G", "2")
    g.waits(both, "claimed")
    g.release(over)
    assert g.sees(both) == "0,1"


def test_s4_33_a_job_gets_only_gpus_with_the_required_free_memory(graphics: Callable[..., Graphics]) -> None:
    """S4.33 (bug 11): -G needs 90 % free memory by default; a new percentage (1 to 100) applies to waiting jobs."""
    g = graphics("a")
    assert g.s.ts("--get_gpu_free_perc") == "90"
    for text in ("0", "101", "150", "-5", "ten", "", "9.5"):
        assert "1 to 100" in g.refused("--set_gpu_free_perc", text)
    assert g.s.ts("--get_gpu_free_perc") == "90"
    g.use("a", 24_000)
    job = g.hold("-G", "1")
    g.waits(job, "foreign")
    assert g.s.ts("--set_gpu_free_perc", "80") == "" and g.s.ts("--get_gpu_free_perc") == "80"
    g.waits(job, "foreign")
    g.s.ts("--set_gpu_free_perc", "60")
    assert g.sees(job) == "0"
    for text in ("1", "100"):
        g.s.ts("--set_gpu_free_perc", text)
        assert g.s.ts("--get_gpu_free_perc") == text
    assert g.s.states()[job] == "running", "who runs is not touched"
    g.release(job)
    second = g.hold("-G", "1")
    g.waits(second, "releasing|foreign")  # the driver lists no process: it may be the ended job's memory or foreign
    g.use("a", 0)
    assert g.sees(second) == "0"


def test_s4_34_ts_visible_devices_limits_gpus_and_can_be_changed_later(graphics: Callable[..., Graphics]) -> None:
    """S4.34: TS_VISIBLE_DEVICES limits the GPUs of -G; --setenv changes the limit while jobs wait and run."""
    g = graphics("abc", TS_VISIBLE_DEVICES="1")
    running = g.hold("-G", "1", code=7)
    assert g.sees(running) == "1"
    waits, cpu = g.hold("-G", "1"), g.hold()
    g.waits(waits, "no-room")
    assert "needs 2 whole GPUs" in g.refused("-G", "2", "true")
    pid = int(g.s.ts("-p", str(running)))
    assert g.s.ts("--getenv", "TS_VISIBLE_DEVICES") == "1"
    assert g.s.ts("--setenv", "TS_VISIBLE_DEVICES=0-2") == ""
    assert g.s.ts("--getenv", "TS_VISIBLE_DEVICES") == "0-2"
    wide = g.hold("-G", "2")
    assert g.sees(waits) in ("0", "2")
    assert alive(pid) and g.s.states()[running] == "running" and g.sees(cpu) == "-1"
    g.waits(wide, "no-wide-room")
    g.release(running)
    assert g.s.run("-w", str(running)).returncode == 7
    assert "1" in g.sees(wide).split(",")
    g.s.ts("--unsetenv", "TS_VISIBLE_DEVICES")
    assert g.s.ts("--getenv", "TS_VISIBLE_DEVICES") == ""
    assert "needs 4 whole GPUs" in g.refused("-G", "4", "true")
    g.release(waits, wide, cpu)
    all_three = g.hold("-G", "3")
    assert g.sees(all_three) == "0,1,2"


def test_s4_34_ts_visible_devices_limits_declared_gpus(spooler: Callable[..., Spooler]) -> None:
    """S4.34: TS_VISIBLE_DEVICES also limits declared GPUs."""
    s = spooler(GPUJOB_SET_GPUS="2", TS_VISIBLE_DEVICES="1")
    sees = ("-G", "1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    for number, visible in enumerate(("1", "0")):
        s.ts("--setenv", f"TS_VISIBLE_DEVICES={visible}")
        assert "needs 2 whole GPUs" in s.run("-G", "2", "true").stderr
        assert s.add(*sees) == number and s.ended(number) == 0 and s.output(number) == f"{visible}\n"


def test_s4_7_the_very_first_list_has_a_column_of_gpus(graphics: Callable[..., Graphics]) -> None:
    """S4.7: The first call starts a server and waits until the server knows its GPUs.

    Therefore the first list already has the column GPUs.
    """
    g = graphics("ab")
    assert g.s.ts().splitlines()[0] == "ID   State      Output               E-Level  Time   GPUs  Command [run=0/1]"


@pytest.mark.parametrize("how", ["no driver", "a driver that fails"])
def test_s4_35_jobs_without_gpus_run_on_a_machine_without_gpus(graphics: Callable[..., Graphics], how: str) -> None:
    """S4.35 (bug 10): On a machine without usable GPUs, -G and -g are refused with the reason, and other jobs run."""
    g = graphics("" if how == "no driver" else "ab")
    if how != "no driver":
        g.driver.error("nvmlInitWithFlags", MISMATCH)
    assert "needs one whole GPU, but no GPU is managed" in g.refused("-G", "1", "true")
    assert "GPU 0 is not managed here (managed: none)" in g.refused("-g", "0", "true")
    job = g.hold()
    assert job == 0, "what was refused has no number"
    assert g.sees(job) == "-1"
    assert g.s.ts("-l").splitlines()[0] == "ID   State      Output               E-Level  Time   Command [run=1/1]"
    assert "GPU" not in g.s.ts("-i", "0") and "GPUs" not in g.s.jobs()[0]
    assert g.s.ts("-g").splitlines() == ["ID   GPU-IDs"]
    g.release(job)
    assert g.s.run("-w", "0").returncode == 0


@pytest.mark.parametrize(
    ("function", "code", "reason"), [("*", LOST, "gone"), ("nvmlDeviceGetMemoryInfo", UNKNOWN, "unhealthy")]
)
def test_s4_35_an_unreadable_gpu_blocks_only_jobs_that_need_it(
    graphics: Callable[..., Graphics], function: str, code: int, reason: str
) -> None:
    """S4.35 (bug 10): A GPU that cannot be read delays only the jobs that need it. Their reason says what is wrong."""
    g = graphics("ab")
    g.driver.error(function, code, "GPU-a")
    if function != "*":
        g.driver.error("nvmlDeviceGetMemoryInfo_v2", code, "GPU-a")
    assert g.sees(g.hold()) == "-1"
    one = g.hold("-G", "1")
    assert g.sees(one) == "1"
    both = g.hold("-G", "2")
    g.waits(both, "no-wide-room")
    g.release(one)
    g.waits(both, reason, "GPU 0")
    g.driver.clear_errors()
    assert g.sees(both) == "0,1"


def test_s4_36_a_wide_job_is_not_starved_by_a_stream_of_narrow_ones(graphics: Callable[..., Graphics]) -> None:
    """S4.36 (bug 9): A job that ten later jobs have overtaken gets the next GPUs that become free."""
    g = graphics("ab")
    first = g.hold("-G", "1")
    wide = g.hold("-G", "2")
    stream = [g.s.add("-G", "1", "true") for _ in range(14)]
    g.waits(stream[10], "reserved", f"reserved for job {wide}, which was overtaken too often")
    states = g.s.states()
    assert [job for job in stream if states[job] == "finished"] == stream[:10]
    g.release(first)
    assert g.sees(wide) == "0,1"
    assert {g.s.states()[job] for job in stream[10:]} == {"allocating"}
    g.release(wide)
    for job in stream:
        g.s.wait_state(job, "finished")


def test_s4_30_a_job_that_can_never_run_is_refused_with_the_reason(graphics: Callable[..., Graphics]) -> None:
    """S4.30 S4.7 (bugs 7, 11): A job that can never run, or an invalid value of -G or -g, is refused with a reason."""
    g = graphics("ab")
    for words, reason in (
        (("-G", "8"), "The job can never run: needs 8 whole GPUs of one server, but only 2 GPUs are managed"),
        (("-G", "3"), "The job can never run: needs 3 whole GPUs of one server, but only 2 GPUs are managed"),
        (("-g", "7"), "The job can never run: GPU 7 is not managed here (managed: 0,1)"),
        (("-g", "0,2"), "The job can never run: GPU 2 is not managed here (managed: 0,1)"),
        (("-g", "a"), "-g takes GPU ids such as 0,3, not 'a'"),
        (("-g", ""), "-g takes GPU ids such as 0,3, not ''"),
        (("-G", "x"), "-G takes a whole number of at least 0, not 'x'"),
        (("-G", "-1"), "-G takes a whole number of at least 0, not '-1'"),
    ):
        assert reason in g.refused(*words, "true")
    assert g.s.ts("-l").count("\n") == 0
    assert g.hold("-G", "2") == 0
    assert g.sees(0) == "0,1"


def test_s4_4_s4_23_the_list_and_the_details_show_gpus(graphics: Callable[..., Graphics]) -> None:
    """S4.4 S4.23 S4.24: The list and its other formats have a column of GPUs.

    -i prints the requested GPUs and the assigned GPUs.
    """
    g = graphics("ab")
    two = g.hold("-G", "2", "-L", "wide")
    g.sees(two)
    one, named, cpu = g.hold("-G", "1"), g.hold("-g", "1"), g.hold()
    assert g.sees(named) == "1"
    g.s.wait_state(cpu, "running")
    g.waits(one, "no-room")
    lines = g.s.ts("-l").splitlines()
    assert lines[0] == "ID   State      Output               E-Level  Time   GPUs  Command [run=3/1]"
    rows = {int(line.split()[0]): line for line in lines[1:]}
    assert re.fullmatch(rf"{two:<4} running    \S+ +2     \[wide\]sh -c .*", rows[two])
    assert re.fullmatch(rf"{one:<4} allocating \(file\) +1     sh -c .*", rows[one])
    assert re.fullmatch(rf"{named:<4} running    \S+ +1     sh -c .*", rows[named])
    assert re.fullmatch(rf"{cpu:<4} running    \S+ +0     sh -c .*", rows[cpu])
    column = lines[0].index("GPUs")
    assert [row[column] for row in (rows[two], rows[one], rows[named], rows[cpu])] == ["2", "1", "1", "0"]
    assert {job["ID"]: job["GPUs"] for job in g.s.jobs()} == {two: 2, one: 1, named: 1, cpu: 0}
    fields = {int(line.split("\t")[0]): line.split("\t") for line in g.s.ts("-M", "tab").splitlines()}
    assert {job: row[6] for job, row in fields.items()} == {two: "2", one: "1", named: "1", cpu: "0"}
    assert {len(row) for row in fields.values()} == {10}
    for job, required, ids in ((two, 2, "0,1"), (one, 1, "-1"), (named, 1, "1"), (cpu, 0, "-1")):
        told = g.s.ts("-i", str(job)).splitlines()
        assert f"GPUs required: {required}" in told and f"GPU IDs: {ids}" in told and "Slots required: 1" in told
    g.release(two)
    g.s.wait_state(one, "running")
    told = g.s.ts("-i", str(two)).splitlines()
    assert "GPU IDs: 0,1" in told and "Exit status: died with exit code 0" in told
    assert g.s.ts("-l").splitlines()[-1].split()[:2] == [str(two), "finished"]


def test_s4_34_a_visible_devices_value_without_gpus_is_ignored(graphics: Callable[..., Graphics]) -> None:
    """S4.34: A TS_VISIBLE_DEVICES that names no GPU limits nothing, and the server starts with it."""
    g = graphics("ab", TS_VISIBLE_DEVICES="GPU-a")
    job = g.hold("-G", "2")
    assert g.sees(job) == "0,1"
    for text in ("-", "3-1", "all", ""):
        g.s.ts("--setenv", f"TS_VISIBLE_DEVICES={text}")
        assert g.s.ts("--getenv", "TS_VISIBLE_DEVICES") == text
        g.s.pid()
        assert g.s.states()[job] == "running"
    g.release(job)
    assert g.sees(g.hold("-G", "2")) == "0,1"
    assert os.path.exists(g.s.server.state_file)
