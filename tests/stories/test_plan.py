"""Issue 26, 4: predictions and offers of a real scheduler: `plan`, `why`, `status` and `submit --dry-run`."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as xml

from tests.stories.harness import Scheduler, wait_for


def busy(scheduler) -> Scheduler:
    """Return a scheduler of two GPUs: jobs 1 and 2 run, job 3 (both GPUs) and job 4 (one GPU) wait. Run times are limits."""
    s = scheduler(gpus=2)
    s.hold("long")
    s.hold("longer")
    s.append(s.line("long", more=";gpus=1;time=1h"), s.line("longer", more=";gpus=1;time=3h"))
    s.start()
    s.wait_state(1, "running")
    s.wait_state(2, "running")
    s.append(s.line("wide", more=";gpus=2;time=1h"), s.line("one", more=";gpus=1;time=1h"))
    wait_for(lambda: s.states().get(4) == "pending" and s.job(4)["reason_code"] == "no-room", "two wait")
    return s


def test_the_plan_is_shown_as_text_as_json_and_as_a_picture(scheduler):
    s = busy(scheduler)
    lines = s.cli("plan").stdout.splitlines()
    assert lines[0].split()[:3] == ["JOB", "NAME", "GPU"] and lines[0].endswith("ENDS")
    rows = {line.split()[0]: line for line in lines[1:5]}
    assert set(rows) == {"1", "2", "3", "4"} and all("█" in line for line in rows.values())
    assert "expected to run" in lines[-1]
    plan = json.loads(s.cli("plan", "--json").stdout)
    found = {one["id"]: one for one in plan["jobs"]}
    assert found[1]["start"] is None and found[1]["gpus"] == s.job(1)["gpus"]
    assert found[1]["end"] < found[2]["end"] and found[1]["end"] <= found[4]["start"]
    assert found[3]["start"] >= found[2]["end"] and found[3]["gpus"] == [0, 1]
    assert found[3]["start_earliest"] <= found[3]["start"] <= found[3]["start_latest"]
    assert found[4]["source"] == "its time limit" and found[4]["run_s"] == 3600.0
    picture = xml.fromstring(s.cli("plan", "--svg").stdout)
    shapes = [one.get("class") for one in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert shapes.count("runs") == 2 and shapes.count("later") == 3, "the wide job has a box on each GPU"
    assert "--json and --svg" in s.cli("plan", "--json", "--svg", code=2).stderr


def test_status_shows_expected_times(scheduler):
    s = busy(scheduler)
    text = s.cli("status").stdout
    assert re.search(r"^RUNNING .* ENDS ", text, re.M) and re.search(r"^WAITING .* STARTS ", text, re.M)
    assert [one["id"] for one in s.status()["expected"]] == [1, 2, 3, 4]


def test_why_names_who_holds_the_gpus_and_its_offers_start_the_job(scheduler):
    s = busy(scheduler)
    told = s.cli("why", "4").stdout
    mine = s.job(1)["gpus"][0]
    assert re.search(rf"^  GPU {mine}: job 1 holds 1 until about \S", told, re.M)
    assert "  place in the queue: 2 of 2\n" in told and "  expected run time: 1 h 00 min (its time limit)\n" in told
    assert re.search(rf"^  expected start: about .* on GPU {mine}$", told, re.M)
    explained = json.loads(s.cli("why", "4", "--json").stdout)["jobs"][0]["explanation"]
    assert explained["place"] == 2 and {one["gpu"] for one in explained["holders"]} == {0, 1}
    offer = explained["offers"][0]
    assert (
        re.fullmatch(r"gpujob cancel [12]", offer["command"]) and f"    {offer['command']}   # {offer['cost']}" in told
    )
    s.cli(*shlex.split(offer["command"])[1:])
    s.wait_state(4, "running", "done")


def test_an_offer_of_several_commands_can_be_pasted(scheduler):
    s = scheduler(gpus=2)
    s.start()
    s.cli("pause", "0-1")
    s.append(s.line("a", more=";gpus=2"), s.line("b", more=";gpus=2"))
    wait_for(lambda: s.states().get(2) == "pending" and s.job(2)["reason_code"] != "new", "they wait")
    s.hold("b")
    offer = json.loads(s.cli("why", "2", "--json").stdout)["jobs"][0]["explanation"]["offers"][0]
    assert offer["command"] == "gpujob first 2 && gpujob resume 0,1"
    for command in offer["command"].split(" && "):
        s.cli(*shlex.split(command)[1:])
    s.wait_state(2, "running")
    s.release("b")
    s.wait_ended(2)


def test_a_dry_run_says_what_would_happen_and_submits_nothing(scheduler):
    s = scheduler(gpus=2)
    s.start()
    told = s.cli("submit", "--dry-run", "--gpus", "1", "--time", "2h", "--", "true").stdout.splitlines()
    assert told[0] == "the job would start now on GPU 0" and "  expected run time: 2 h 00 min (its time limit)" in told
    assert "no server has" in s.cli("submit", "--dry-run", "--gpus", "5000", "--", "true", code=3).stderr
    assert "but only 2 GPUs are managed" in s.cli("submit", "--dry-run", "--gpus", "3", "--", "true", code=3).stderr
    s.cli("pause", "0-1")
    told = s.cli("submit", "--dry-run", "--gpus", "1", "--", "true").stdout
    assert told.startswith("the job would wait (paused): its GPUs 0,1 are paused\n")
    assert "    gpujob resume 0   # " in told and "place in the queue: 1 of 1" in told and "gpujob first" not in told
    made = s.folder / "made"
    told = s.cli("submit", "--dry-run", "--info-command", f"touch {made}", "--", "no-such-program").stdout
    assert "program no-such-program not found in PATH" in told and not made.exists()
    assert "leave out --wait" in s.cli("submit", "--dry-run", "--wait", "--", "true", code=2).stderr
    assert s.states() == {}


def test_without_a_scheduler_nothing_is_predicted(scheduler):
    s = busy(scheduler)
    s.kill()
    found = s.cli("plan")
    assert "no scheduler is running, so nothing can be predicted" in found.stderr and "█" not in found.stdout
    assert "expected start" not in s.cli("why", "3").stdout and s.status()["expected"] == []
    assert "no scheduler is running" in s.cli("submit", "--dry-run", "--", "true").stdout


def test_what_only_the_scheduler_knows_counts_in_predictions_and_offers(scheduler):
    """A GPU that is kept free, and a reservation, keep a job waiting: no start is predicted, and no offer ignores them."""
    s = scheduler(gpus=2, keep_free=1)
    s.hold("a")
    s.append(s.line("a", more=";gpus=1;time=1h"))
    s.start()
    s.wait_state(1, "running")
    s.append(s.line("b", more=";gpus=1;time=1h"))
    wait_for(lambda: s.states().get(2) == "pending" and s.job(2)["reason_code"] == "keep-free", "it waits")
    found = {one["id"]: one for one in s.status()["expected"]}
    assert found[2]["start"] >= found[1]["end"]
    told = s.cli("why", "2").stdout
    assert "expected start: now" not in told and "--gpus" not in told and "    gpujob cancel 1   # " in told
    assert s.cli("submit", "--dry-run", "--gpus", "1", "--", "true").stdout.startswith("the job would wait (behind): ")


def test_a_reservation_of_the_scheduler_counts_in_predictions_and_offers(scheduler):
    s = scheduler(gpus=2, max_overtakes=1, backfill=False)
    s.hold("a")
    s.append(s.line("a", more=";gpus=1;time=1h"))
    s.start()
    s.wait_state(1, "running")
    s.append(s.line("wide", more=";gpus=2;time=1h"))
    wait_for(lambda: s.states().get(2) == "pending", "the wide job waits")
    s.append(s.line("b", more=";gpus=1;time=1h"), s.line("c", more=";gpus=1;time=1h"))
    wait_for(lambda: s.states().get(4) == "pending" and s.job(4)["reason_code"] == "reserved", "it waits", 60)
    found = {one["id"]: one for one in s.status()["expected"]}
    assert found[2]["start"] >= found[1]["end"] and found[4]["start"] >= found[2]["end"]
    commands = [
        one["command"] for one in json.loads(s.cli("why", "4", "--json").stdout)["jobs"][0]["explanation"]["offers"]
    ]
    assert commands[0] == "gpujob first 4" and not any(command.startswith("gpujob edit") for command in commands)


def test_no_offer_ignores_that_a_held_job_lacks_its_script(scheduler):
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a", more=";gpus=1"), "0,nothere.py,,;label=miss")
    s.start()
    s.wait_state(1, "running")
    wait_for(lambda: s.states().get(2) == "pending" and s.job(2)["reason_code"] == "missing", "it misses its script")
    s.cli("hold", "2")
    assert "it would start now" not in s.cli("why", "2").stdout


def test_no_offer_ignores_that_a_job_behind_another_lacks_a_file(scheduler):
    """The scheduler does not look for the files of a job that waits for another job."""
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a", more=";gpus=1"), "0,nothere.py,,;after=1")
    s.start()
    s.wait_state(1, "running")
    wait_for(lambda: s.states().get(2) == "pending" and s.job(2)["reason_code"] == "depends", "it waits for job 1")
    s.cli("submit", "--after", "1", "--cwd", str(s.folder / "nowhere"), "--", "true")
    for number in ("2", "3"):
        told = s.cli("why", number).stdout
        assert "depends" in told and "it would start now" not in told and "expected start: about" not in told


def test_no_offer_is_made_by_which_a_smaller_job_would_take_the_place(scheduler):
    """Jobs do not end at the same time: the first GPU that is free would go to the small job."""
    s = scheduler(gpus=2)
    s.hold("a")
    s.hold("b")
    s.append(s.line("a", more=";gpus=1"), s.line("b", more=";gpus=1"))
    s.start()
    s.wait_state(2, "running")
    s.wait_state(1, "running")
    s.append(s.line("wide", more=";gpus=2"), s.line("small", more=";gpus=1"))
    wait_for(lambda: s.states().get(4) == "pending" and s.job(4)["reason_code"] == "no-room", "they wait")
    offers = json.loads(s.cli("why", "3", "--json").stdout)["jobs"][0]["explanation"]["offers"]
    assert not any("gpujob cancel 1 2" in offer["command"] for offer in offers), offers
    s.cli("cancel", "4")
    offers = json.loads(s.cli("why", "3", "--json").stdout)["jobs"][0]["explanation"]["offers"]
    assert [offer["command"] for offer in offers][-1] == "gpujob cancel 1 2"


def test_a_job_for_slots_is_told_who_has_them_and_what_would_start_it(scheduler):
    s = scheduler(gpus=1, cpu_slots=1)
    s.hold("a")
    s.append(s.line("a", more=";gpus=0;time=1h"))
    s.start()
    s.wait_state(1, "running")
    s.append(s.line("b", more=";gpus=0"))
    wait_for(lambda: s.states().get(2) == "pending" and s.job(2)["reason_code"] == "no-room", "it waits")
    told = s.cli("why", "2").stdout
    assert re.search(r"^  job 1 holds 1 slot until about \S", told, re.M)
    (holder,) = json.loads(s.cli("why", "2", "--json").stdout)["jobs"][0]["explanation"]["holders"]
    assert (holder["gpu"], holder["jobs"], holder["share"]) == (None, [1], 1)
    s.cli("cancel", "1")
    s.wait_state(2, "done")


def test_a_start_that_is_not_known_has_a_reason(scheduler):
    s = scheduler(gpus=2)
    s.hold("a")
    s.append(s.line("a", more=";gpus=1"), s.line("a2", more=";gpus=1"))
    s.hold("a2")
    s.start()
    s.wait_state(1, "running")
    s.append(s.line("wide", more=";gpus=2"), s.line("small", more=";gpus=1"))
    wait_for(lambda: s.states().get(3) == "pending" and s.job(3)["reason_code"] == "no-wide-room", "it waits")
    explanation = json.loads(s.cli("why", "3", "--json").stdout)["jobs"][0]["explanation"]
    if explanation["expected"] is None or explanation["expected"]["start"] is None:
        assert re.fullmatch("it is not known how long job [12] runs", explanation["unknown"])
    assert "no command is known that would start it now" in s.cli("why", "3").stdout


def test_a_plan_without_a_scheduler_says_so_and_nothing_else(scheduler):
    s = scheduler(gpus=1)
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    s.kill()
    done = s.cli("plan")
    assert done.stdout == "" and "no scheduler is running, so nothing can be predicted" in done.stderr


def test_with_the_order_short_no_false_number_of_jobs_is_told(scheduler):
    """The store does not know the order of the queue then; a dry run computes it."""
    s = scheduler(gpus=1, order="short")
    s.hold("a")
    s.append(s.line("a"))
    s.start()
    s.wait_state(1, "running")
    s.append(s.line("long", more=";time=10h"), s.line("short", more=";time=1m"))
    wait_for(lambda: s.states().get(3) == "pending" and s.job(3)["reason_code"] == "no-room", "they wait")
    assert [s.job(number)["reason_code"] for number in (2, 3)] == ["no-room", "no-room"]
    assert "  place in the queue: 1 of 2\n" in s.cli("why", "3").stdout
    told = s.cli("submit", "--dry-run", "--time", "1h", "--gpus", "1", "--", "true").stdout
    assert told.startswith("the job would wait (behind): 1 job with the same request is before it, and waits too: ")


def test_a_dry_run_tells_doubts_and_what_can_be_changed(scheduler):
    s = scheduler(gpus=1)
    s.start()
    plain = s.folder / "no.sh"
    plain.write_text("exit 0\n")
    told = s.cli("submit", "--dry-run", "--", "./no.sh").stdout
    assert told.startswith("the job would start now on GPU 0, and fail immediately: ./no.sh is not executable\n")
    assert "/tmp is a folder" in s.cli("submit", "--dry-run", "--", "/tmp").stdout
    told = s.cli("submit", "--dry-run", "--hold", "--", "true").stdout
    assert "held until gpujob release" in told and not re.search(r"release \d", told)
    for words, do in (
        (["--gpus", "2"], "request less"),
        (["--gpus", "2", "--link", "nvlink"], "request less, or leave out link"),
        (["--gpus", "2", "--allowed", "0"], "request less, or allow other GPUs"),
        (["--gpus", "mig-1g.10gb"], "request another MIG instance, or a share of a GPU"),
    ):
        for more in ([], ["--dry-run"]):
            assert s.cli("submit", *more, *words, "--", "true", code=3).stderr.endswith(f"; {do}\n"), words
    assert (
        "too large; write at most 999999" in s.cli("submit", "--retries", "1000000000000", "--", "true", code=2).stderr
    )
