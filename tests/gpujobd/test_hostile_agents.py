"""Agents that lie, hang or say too much. An agent is a process of its user, who can make it say anything."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import time
from dataclasses import replace
from typing import Any

import pytest

from scheduler.core.errors import FileTrouble
from scheduler.core.file_offsets import FileMark
from scheduler.core.job import JobState, Process
from scheduler.core.launch import Launch
from scheduler.core.observations import Ended, Gone, Lost, NeverRan, Started
from scheduler.gpujobd import agent_messages, agents, in_hand, users_runner
from scheduler.gpujobd.agent_channel import Closed
from scheduler.gpujobd.agent_files import MOST_LINES
from scheduler.gpujobd.user_files import RemoteFollower, WatchedFile
from scheduler.system.processes import seen
from tests.builders import a_job
from tests.gpujobd.agents_bench import OTHER, UID, Bench, bench
from tests.stories.harness import wait_for
from tests.stories.people import ROOT_ONLY

pytestmark = ROOT_ONLY
__all__ = ["bench"]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("missing", {"sentence": "no script"}),
        ("neverran", {"why": "no script", "lasting": True, "at": 1.0}),
        ("unclaimed", {}),
    ],
)
def test_an_attempt_that_has_begun_cannot_have_never_begun(bench: Bench, kind: str, more: dict[str, Any]) -> None:
    """Such a message would free the GPUs of a running job. The agent is replaced, and the next one adopts the job."""
    job, _, channel = bench.running()
    bench.say(channel, kind, job=7, attempt=1, **more)
    other = bench.is_replaced(channel)
    assert bench.hears(other, "adopt")["job"]["id"] == job.id
    assert not bench.facts


def test_the_end_of_a_live_process_keeps_the_process_as_a_leftover(bench: Bench) -> None:
    """The GPUs stay allocated while the process lives, and a job does not end before its start."""
    _, process, channel = bench.running()
    bench.say(channel, "ended", job=7, attempt=1, exit_code=0, signal=None, at=1.0)
    wait_for(bench.look, "the end")
    (end,) = bench.facts
    assert isinstance(end, Ended) and end.leftovers == (process,) and end.at > time.time() - 3600
    bench.facts.clear()
    bench.runner.watch_leftovers("7.1", 7, 1, end.leftovers)
    bench.say(channel, "gone", key="7.1")
    other = bench.is_replaced(channel)
    assert not bench.facts, "the process lives"
    bench.kill()
    bench.say(other, "gone", key="7.1")
    wait_for(bench.look, "the end of the leftover process")
    assert bench.facts == [Gone("7.1")]


def test_leftovers_of_other_users_and_of_root_do_not_count(bench: Bench) -> None:
    """A user cannot have processes of others counted as leftover processes, which a cancel would end."""
    _, process, channel = bench.running()
    others = [bench.process(OTHER), bench.process(0)]
    named = [{"pid": one.pid, "ticks": one.ticks} for one in (process, *others)]
    bench.say(channel, "ended", job=7, attempt=1, exit_code=0, signal=None, at=time.time(), leftovers=named)
    wait_for(bench.look, "the end")
    (end,) = bench.facts
    assert isinstance(end, Ended) and end.leftovers == (process,)


def test_an_agent_that_hangs_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped agent would keep its jobs from being cancelled. The next one gets the request to stop them, too."""
    monkeypatch.setattr(agents, "SILENT_S", 0.2)
    job, _, channel = bench.running()
    bench.runner.stop([(job, True)])
    assert bench.hears(channel, "ping")
    other = bench.agent()
    assert bench.hears(other, "stop")["jobs"][0][1] is True


def test_an_agent_that_answers_is_not_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "SILENT_S", 0.2)
    _, _, channel = bench.running()
    for _ in range(3):
        assert bench.hears(channel, "ping")
        channel.send({"say": "pong"})


def test_an_agent_without_tasks_has_time_to_answer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the first task after a pause, and from the question."""
    _, _, channel = bench.running()
    bench.kill()
    bench.say(channel, "ended", job=7, attempt=1, exit_code=None, signal=9, at=time.time())
    wait_for(bench.look, "the end")
    user = bench.runner._users[UID]
    wait_for(lambda: bench.look() and user.idle_since is not None, "an agent without tasks")
    monkeypatch.setattr(user, "heard", user.heard - 1000)
    bench.runner.start(
        a_job(8, state=JobState.STARTING, attempt=1, uid=UID), Launch("8.1", ("/bin/true",), {}, "/", "")
    )
    bench.look()
    assert user.channel is not None and not user.pinged


def test_a_deleted_attempt_record_does_not_keep_the_gpus(bench: Bench) -> None:
    """A user can delete the records of the agent. The job counts as lost when its process has ended."""
    _, _, channel = bench.running()
    bench.kill()
    channel.close()
    other = bench.agent()
    assert bench.hears(other, "adopt")["job"]["state"] == "running"
    bench.say(other, "unclaimed", job=7, attempt=1)
    wait_for(bench.look, "the end")
    (lost,) = bench.facts
    assert isinstance(lost, Lost) and "record of the attempt is gone" in lost.why


def test_texts_that_the_store_cannot_record_are_made_readable(bench: Bench) -> None:
    """A lone surrogate in a text would keep the scheduler from recording anything."""
    job = a_job(7, state=JobState.STARTING, attempt=1, uid=UID, user="x")
    bench.runner.start(job, Launch("7.1", ("/bin/sleep",), {}, "/", ""))
    channel = bench.agent()
    bench.hears(channel, "start")
    process = bench.process()
    value = {"job": 7, "attempt": 1, "process": {"pid": process.pid, "ticks": process.ticks}, "at": 1.0,
             "session": "\ud800", "argv": ["\udcff"]}  # fmt: skip
    channel.send({"say": "started", "value": value})
    wait_for(bench.look, "the start")
    (started,) = bench.facts
    assert isinstance(started, Started) and started.session == "\\ud800" and started.argv == ("\\udcff",)


def test_messages_about_attempts_of_others_cost_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each named process costs reads of /proc: they are made only for an attempt that the agent has."""
    _, _, channel = bench.running()
    monkeypatch.setattr(agent_messages, "own_processes", None)
    bench.say(
        channel, "ended", job=1, attempt=1, exit_code=0, signal=None, at=1.0, key="", leftovers=[{"pid": 1, "ticks": 1}]
    )
    channel.send({"say": "trouble", "text": "still heard"})
    wait_for(lambda: not bench.look() and bench.runner.trouble(), "the next message")


def test_after_an_outage_the_start_is_told_again(bench: Bench) -> None:
    """The scheduler could not record the start. Without it, the job could not be stopped."""
    job, process, _ = bench.running()
    (started,) = bench.runner.adopt(job)
    assert isinstance(started, Started) and started.process == process
    job.process = process
    assert bench.runner.adopt(job) == []


def test_another_process_cannot_take_the_place_of_a_live_one(bench: Bench) -> None:
    """Else the GPUs of the first one would be free at the end of the second one."""
    _, process, channel = bench.running()
    bench.say(channel, "started", job=7, attempt=1, process={"pid": 4_000_000, "ticks": 1}, at=time.time())
    bench.say(channel, "ended", job=7, attempt=1, exit_code=0, signal=None, at=time.time())
    wait_for(bench.look, "the end")
    (end,) = bench.facts
    assert isinstance(end, Ended) and end.leftovers == (process,)


def test_the_launcher_kills_what_an_agent_does_not_kill(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_runner, "HARD_S", 0.2)
    job, process, _ = bench.running()
    requests: list[dict[str, Any]] = []

    def asked() -> bool:
        bench.runner.stop([(job, True)])  # the scheduler repeats a hard stop
        bench.look()
        with contextlib.suppress(BlockingIOError):
            requests.append(json.loads(bench.launcher.recv(4096)))
        return bool(requests)

    wait_for(asked, "a request to the launcher")
    (request,) = requests
    assert (request["do"], request["uid"], request["number"]) == ("signal", UID, 9)
    assert (request["pid"], request["ticks"]) == (process.pid, process.ticks)


def test_an_agent_that_does_not_start_a_job_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_runner, "START_S", 0.2)
    bench.runner.start(
        a_job(7, state=JobState.STARTING, attempt=1, uid=UID), Launch("7.1", ("/bin/true",), {}, "/", "")
    )
    assert bench.hears(bench.agent(), "start")
    assert bench.hears(bench.agent(), "adopt")


def test_a_start_that_no_agent_reports_counts_as_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPUs must not stay allocated for ever: without a known process, it cannot be stopped."""
    monkeypatch.setattr(users_runner, "START_S", 0.02)
    monkeypatch.setattr(users_runner, "UNANSWERED_S", 0.05)
    bench.runner.start(
        a_job(7, state=JobState.STARTING, attempt=1, uid=UID), Launch("7.1", ("/bin/true",), {}, "/", "")
    )
    for _ in range(users_runner.MOST_UNANSWERED):
        bench.agent()
    wait_for(bench.look, "the end")
    (lost,) = bench.facts
    assert isinstance(lost, Lost) and "have not said" in lost.why


def test_a_start_whose_agents_end_counts_as_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user can kill the agent, again and again; also after a start whose process has ended."""
    monkeypatch.setattr(users_runner, "UNANSWERED_S", 0.3)
    _, _, channel = bench.running()
    bench.runner.start(
        a_job(8, state=JobState.STARTING, attempt=1, uid=UID), Launch("8.1", ("/bin/true",), {}, "/", "")
    )
    bench.kill()
    begun = time.monotonic()
    bench.hears(channel, "start")
    channel.close()
    bench.agents_end(2)
    assert {fact.job for fact in bench.facts if isinstance(fact, Lost)} == {7, 8}
    assert time.monotonic() - begun >= 0.3


def test_agents_that_end_before_they_begin_count_as_a_refusal(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """PAM may refuse the session of a user (an expired account): the start fails, and `status` says so."""
    monkeypatch.setattr(users_runner, "REFUSED_S", 0.3)
    monkeypatch.setattr(users_runner, "LOST_DELAY_S", 0.05)
    bench.runner.start(
        a_job(7, state=JobState.STARTING, attempt=1, uid=UID), Launch("7.1", ("/bin/true",), {}, "/", "")
    )
    bench.agent(ready=False).close()
    wait_for(lambda: bench.look() or "before it begins its work" in bench.runner.trouble(), "the trouble")
    bench.agents_end(1, ready=False)
    (fact,) = bench.facts
    assert isinstance(fact, NeverRan) and not fact.lasting, "it was never sent to an agent"


def test_an_agent_that_never_begins_is_replaced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it answers: until it begins, a job that it was to start cannot be cancelled."""
    for module, name, seconds in (
        (agents, "BEGIN_S", 0.05), (agents, "SILENT_S", 0.02), (users_runner, "REFUSED_S", 0.3), (users_runner, "LOST_DELAY_S", 0.05),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    bench.runner.start(
        a_job(7, state=JobState.STARTING, attempt=1, uid=UID), Launch("7.1", ("/bin/true",), {}, "/", "")
    )

    def ended() -> bool:
        for channel in bench.unread:
            with contextlib.suppress(Closed):
                channel.send({"say": "pong"})
        with contextlib.suppress(BlockingIOError):
            bench.answered(json.loads(bench.launcher.recv(4096)), ready=False)
        return bench.look()

    wait_for(ended, "the end of the attempt")
    (fact,) = bench.facts
    assert isinstance(fact, NeverRan)


def test_agents_that_begin_and_end_at_once_count_also_with_a_jobs_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users_runner, "UNANSWERED_S", 0.1)
    file = WatchedFile(UID, "x", "/home/x/jobs.txt", "/home/x")
    bench.runner.follow_file(UID, file.path, RemoteFollower(file, None, print, lambda: False, lambda: 0))
    bench.runner.start(
        a_job(7, state=JobState.STARTING, attempt=1, uid=UID), Launch("7.1", ("/bin/true",), {}, "/", "")
    )

    def ended() -> bool:
        with contextlib.suppress(BlockingIOError):
            bench.answered(json.loads(bench.launcher.recv(4096)), ready=True).close()
        return bench.look()

    wait_for(ended, "the end of the attempt")
    (fact,) = bench.facts
    assert isinstance(fact, (NeverRan, Lost)) and fact.job == 7


def test_leftovers_that_are_gone_do_not_keep_the_gpus_if_the_agent_says_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a hard stop, the scheduler believes what it sees itself."""
    monkeypatch.setattr(users_runner, "HARD_S", 0.02)
    job, _ = bench.leftovers()
    bench.runner.stop([(job, True)])
    assert bench.asked()["do"] == "signal"
    bench.kill()

    def gone() -> bool:
        with contextlib.suppress(BlockingIOError):
            request = json.loads(bench.launcher.recv(4096))
            if request["do"] == "agent":
                bench.answered(request, ready=True)
        return bench.look()

    wait_for(gone, "the end of the leftovers")
    assert bench.facts == [Gone("7.1")]


def test_processes_that_a_lost_job_has_left_keep_the_gpus(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an agent, the scheduler finds them by the session of the job."""
    monkeypatch.setattr(users_runner, "REFUSED_S", 0.1)
    monkeypatch.setattr(users_runner, "LOST_DELAY_S", 0.05)
    leader = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; read x"], user=UID, start_new_session=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert leader.stdout is not None and leader.stdin is not None
    left = int(leader.stdout.readline())
    found = seen(leader.pid)
    assert found is not None
    job = a_job(7, state=JobState.RUNNING, attempt=1, uid=UID, process=Process(found.pid, found.ticks))
    bench.runner.adopt(job)
    leader.kill()
    leader.wait()
    leader.stdin.close()
    leader.stdout.close()

    def ended() -> bool:
        with contextlib.suppress(BlockingIOError):
            request = json.loads(bench.launcher.recv(4096))
            bench.launcher.send(json.dumps({"id": request["id"], "error": "there is no user"}).encode())
        return bench.look()

    try:
        wait_for(ended, "the end")
        (lost,) = bench.facts
        assert isinstance(lost, Lost) and [process.pid for process in lost.leftovers] == [left]
    finally:
        os.kill(left, 9)


def test_a_job_without_its_stored_environment_does_not_start(bench: Bench) -> None:
    """It would run with other variables, and give wrong results."""
    bench.runner.start(
        a_job(7, state=JobState.STARTING, attempt=1, uid=UID, env_file="/nowhere/env"),
        Launch("7.1", ("/bin/true",), {}, "/", ""),
    )
    bench.agent()
    wait_for(bench.look, "the end of the attempt")
    (fact,) = bench.facts
    assert isinstance(fact, NeverRan) and "environment cannot be read" in fact.why


def test_the_launcher_kills_leftovers_that_an_agent_does_not_kill(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent may say that a job has ended whose process lives, and then ignore the request to kill it."""
    monkeypatch.setattr(users_runner, "HARD_S", 0.05)
    job, process = bench.leftovers()
    bench.runner.stop([(job, True)])
    request = bench.asked()
    assert (request["do"], request["pid"], request["number"]) == ("signal", process.pid, 9)


def test_a_start_whose_process_is_known_does_not_depend_on_what_the_agent_says(bench: Bench) -> None:
    """The process of `sudo -u other` belongs to another user: the agent that adopts it must not be replaced for ever."""
    process = bench.process(OTHER)
    job = a_job(7, state=JobState.RUNNING, attempt=1, uid=UID, process=process)
    bench.runner.adopt(job)
    channel = bench.agent()
    told = {"pid": process.pid, "ticks": process.ticks}
    bench.say(channel, "started", job=7, attempt=1, process=told, at=time.time())
    wait_for(bench.look, "the start")
    (started,) = bench.facts
    assert isinstance(started, Started) and started.process == process


def test_a_start_without_a_process_is_refused_and_a_second_one_is_ignored(bench: Bench) -> None:
    """Each start is recorded: an agent that repeats it could fill the store."""
    bench.runner.start(
        a_job(7, state=JobState.STARTING, attempt=1, uid=UID), Launch("7.1", ("/bin/true",), {}, "/", "")
    )
    channel = bench.agent()
    bench.say(channel, "started", job=7, attempt=1, process=None, at=1.0)
    other = bench.is_replaced(channel)
    process = bench.process()
    for pid in (process.pid, 4_000_000, 4_000_001):
        bench.say(other, "started", job=7, attempt=1, process={"pid": pid, "ticks": process.ticks}, at=time.time())
    other.send({"say": "trouble", "text": "last"})
    wait_for(lambda: [bench.look(), bench.runner.trouble()][1], "the last message")
    (started,) = bench.facts
    assert isinstance(started, Started) and started.process == process


def test_jobs_that_an_agent_does_not_start_wait_longer_each_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the scheduler would start them again and again, as fast as it can."""
    monkeypatch.setattr(users_runner, "FOUND_S", 0.3)
    channel = None
    for attempt in (1, 2, 3):
        job = a_job(7, state=JobState.STARTING, attempt=attempt, uid=UID)
        bench.runner.start(job, Launch(job.attempt_key, ("/bin/true",), {}, "/", ""))
        channel = channel or bench.agent()
        bench.say(channel, "unclaimed", job=7, attempt=attempt)
        wait_for(bench.look, "the end of the attempt")
        last = bench.facts.pop()
    assert isinstance(last, NeverRan) and not last.lasting
    assert channel is not None
    job = a_job(8, state=JobState.STARTING, attempt=1, uid=UID)
    bench.runner.start(job, Launch("8.1", ("/bin/true",), {}, "/", ""))
    begun = time.monotonic()
    bench.say(channel, "missing", job=8, attempt=1, sentence="no script")
    channel.send({"say": "found", "job": 8})
    wait_for(lambda: [bench.look(), bench.again == [8]][1], "the next start")
    assert time.monotonic() - begun >= 0.3


def test_an_end_that_cannot_be_checked_now_is_not_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a free descriptor, the process cannot be looked at: the next agent reports the end again."""
    _, _, channel = bench.running()
    bench.kill()

    def short(process: Process) -> bool:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(in_hand, "lives", short)
        bench.say(channel, "ended", job=7, attempt=1, exit_code=None, signal=9, at=time.time())
        other = bench.is_replaced(channel)
    assert bench.hears(other, "adopt")["job"]["id"] == 7 and not bench.facts


def test_a_short_refusal_of_the_launcher_loses_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name service that does not answer for a moment must not turn a true exit code into a lost one."""
    monkeypatch.setattr(users_runner, "REFUSED_S", 0.5)
    monkeypatch.setattr(users_runner, "LOST_DELAY_S", 0.05)
    _, _, channel = bench.running()
    bench.kill()
    channel.close()
    begun = time.monotonic()

    def refused() -> bool:
        with contextlib.suppress(BlockingIOError):
            request = json.loads(bench.launcher.recv(4096))
            bench.launcher.send(json.dumps({"id": request["id"], "error": "there is no user"}).encode())
        return bench.look()

    wait_for(refused, "the end")
    (lost,) = bench.facts
    assert isinstance(lost, Lost) and time.monotonic() - begun >= 0.5


def test_an_action_has_one_warning(bench: Bench) -> None:
    job, _, channel = bench.running()
    job.spec = replace(job.spec, on_finish="notify")
    bench.runner.run(job, "on_finish")
    bench.runner.run(job, "mail")
    assert bench.runner.unsure() == {7}
    for text in ("not found", "not found again"):
        channel.send({"say": "warning", "job": 7, "what": "on_finish", "text": text})
    channel.send({"say": "acted", "job": 7, "what": "on_finish"})
    wait_for(lambda: not bench.look() and not bench.runner.unsure(), "the confirmation; there is no mail")
    assert bench.warnings == [(7, "not found")]


def test_a_file_without_jobs_is_read_no_more(bench: Bench) -> None:
    """Each refused line is recorded with a text: a large file without jobs would fill the disk."""
    file = WatchedFile(UID, "x", "/home/x/jobs.txt", "/home/x")
    refused = [999]
    follower = RemoteFollower(file, None, lambda message: None, lambda: False, lambda: refused[0])
    mark = {name: getattr(FileMark("p"), name) for name in FileMark.__slots__}
    follower.hear({"batch": {"mark": mark, "lines": [{"number": 1, "text": "y", "problem": ""}]}})
    assert follower.look(0.0) is not None
    refused[0] = 1000
    with pytest.raises(FileTrouble, match="1000 lines that are no jobs"):
        follower.look(0.0)
    follower.hear({"batch": {"mark": mark, "lines": [], "restart": True}})
    assert follower.look(0.0) is not None, "the file was replaced"


def test_actions_that_were_not_sent_are_sent_to_the_next_agent(bench: Bench) -> None:
    job, _, channel = bench.running(on_finish="notify", mail_to="x")
    channel.close()
    bench.runner.run(job, "on_finish")
    bench.runner.run(job, "mail")
    other = bench.agent()
    assert bench.hears(other, "act")["what"] == "mail"
    assert [text for _, text in bench.warnings if "on_finish" in text], "it may have been sent"
    other.send({"say": "acted", "job": 7, "what": "mail"})
    wait_for(lambda: not bench.look() and not bench.runner.unsure(), "the confirmation")


def test_actions_that_an_agent_does_not_confirm_are_reported(bench: Bench) -> None:
    job, _, channel = bench.running(on_finish="notify", mail_to="x")
    bench.runner.run(job, "on_finish")
    bench.runner.run(job, "mail")
    assert bench.hears(channel, "act")["what"] == "on_finish" and bench.runner.unsure() == {7}
    channel.send({"say": "acted", "job": 7, "what": "on_finish"})
    wait_for(lambda: not bench.look() and len(bench.runner._users[UID].acting) == 1, "the confirmation")
    channel.close()
    bench.agent()
    assert [number for number, _ in bench.warnings] == [7] and "whether mail ran" in bench.warnings[0][1]
    assert not bench.runner.unsure()


def test_why_an_agent_cannot_begin_is_shown_until_one_can(bench: Bench) -> None:
    _, _, channel = bench.running()
    channel.send({"say": "cannot", "text": "the folder\nis full"})
    channel.close()
    other = bench.agent(ready=False)
    assert bench.runner.trouble() == f"user {UID}: the agent cannot begin: the folder is full"
    other.send({"say": "ready"})
    wait_for(lambda: not bench.look() and not bench.runner.trouble(), "the end of the trouble")


def test_an_agent_may_send_only_batches_of_lines_of_usual_size(bench: Bench) -> None:
    file = WatchedFile(UID, "x", "/home/x/jobs.txt", "/home/x")
    follower = RemoteFollower(file, None, lambda message: None, lambda: False, lambda: 0)
    mark = {name: getattr(FileMark("p"), name) for name in FileMark.__slots__}
    lines = [{"number": n, "text": "a.py,torch,,0", "problem": ""} for n in range(MOST_LINES + 1)]
    with pytest.raises(ValueError, match="too many lines"):
        follower.hear({"batch": {"mark": mark, "lines": lines}})


@pytest.mark.parametrize(
    "data",
    [
        b"?x",
        b".{",
        b".[]",
        b'.{"say": "nothing"}',
        b'.{"say": "pong", "x": [' + b"[]," * 19_000 + b"[]]}",
        b'.{"say": "ended", "value": 5}',
        b"+" * 60_000,
        b'.{"say": "pong", "x": ' + b"[" * 12_000 + b"]" * 12_000 + b"}",  # deeper than Python 3.13 can read
    ],
)
def test_garbage_of_an_agent_ends_only_its_connection(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(agents, "MOST_PARTS", 15_000)
    _, _, channel = bench.running()

    def sent() -> bool:
        bench.look()
        try:
            for _ in range(100 if data[:1] == b"+" else 1):
                channel._socket.send(data)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return data[:1] != b"+"

    wait_for(sent, "the end of the connection")
    bench.is_replaced(channel)
    assert not bench.facts and not bench.ended
