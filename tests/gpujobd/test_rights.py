"""Who may do what: the table of rights, and each of its cells with three real users."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.core.errors import Refused
from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import Job, JobSpec
from scheduler.core.rights import (
    ADMINISTRATOR,
    HIDDEN_COMMAND,
    OTHER,
    OWNER,
    RIGHTS,
    ROLES,
    Caller,
    check,
    check_job,
    may,
)
from scheduler.gpujobd.visible import as_seen_by
from tests.gpujobd.machine import CONFIG, Done, Machine
from tests.stories.people import ROOT_ONLY

ADA, BOB, EVE = Caller(1001, "ada"), Caller(1002, "bob"), Caller(1003, "eve", admin=True)
CALLERS = {OWNER: ADA, OTHER: BOB, ADMINISTRATOR: EVE}
SECRET = "--password=hunter22hunter22"


def a_job(**also: Any) -> Job:
    spec = JobSpec(
        source="submit", arguments=("train", SECRET), cwd="/home/ada", uid=1001, user="ada", env_file="/e", **also
    )
    return Job(id=7, spec=spec, need=ResourceRequest(1, 1000), argv=("/usr/bin/train", SECRET), log="/home/ada/log")


@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.parametrize("role", ROLES)
def test_a_caller_may_do_what_the_table_says(right: str, role: str) -> None:
    """`may` is the table; a caller without the right is refused, and told whose job it is."""
    allowed = role in RIGHTS[right].roles
    assert may(CALLERS[role], right, 1001) is allowed
    if allowed:
        check_job(CALLERS[role], right, a_job())
    else:
        with pytest.raises(Refused, match="job 7 belongs to user ada"):
            check_job(CALLERS[role], right, a_job())


def test_a_scheduler_of_one_user_refuses_nothing() -> None:
    """Without a caller, everything is allowed."""
    for right in RIGHTS:
        check_job(None, right, a_job())
        check(None, right, "do it")
    assert as_seen_by(None, hide_commands=True)(a_job()) == a_job()


@pytest.mark.parametrize("hide", [True, False])
def test_others_see_no_environment_and_no_secrets(hide: bool) -> None:
    """The owner sees the whole job. Others never see environment or secrets, and with `hide_commands` no command."""
    assert as_seen_by(ADA, hide)(a_job()) == a_job()
    for caller in (BOB, EVE):
        seen = as_seen_by(caller, hide)(a_job(variables=("A=1",), caller="1 2 /x", on_finish="x", mail_to="a@b"))
        spec = seen.spec
        assert not (spec.env_file or spec.variables or spec.caller or spec.on_finish or spec.mail_to)
        assert "hunter22" not in json.dumps([*spec.arguments, *seen.argv])
        hidden = hide and not caller.admin
        assert spec.arguments[0] == (HIDDEN_COMMAND if hidden else "train")
        assert bool(seen.log) is not hidden


# -- with real users --------------------------------------------------------------------------------------


def waiting_job(machine: Machine, **spec: Any) -> int:
    """Return a job of ada that waits."""
    machine.ask("pausequeue", on=True)
    return machine.job_of("ada", "sleep", "0.1", **spec)


def ended_job(machine: Machine) -> int:
    machine.ask("pausequeue", on=False)
    number = machine.job_of("ada", "true")
    machine.ended(number)
    return number


def tried(machine: Machine, right: str, who: str) -> Done:
    """Try to use a right as a user, on a new job of ada."""
    if right == "requeue":
        return machine.gpujob(who, "retry", str(ended_job(machine)))
    if right == "pause_own":
        done = machine.gpujob(who, "queue", "pause")
        machine.ask("pausequeue", by=who, on=False)
        return done
    if right in ("pause", "resume"):
        return machine.gpujob(who, right, "3")
    if right == "pausequeue":
        return machine.gpujob(who, "queue", "pause")
    if right == "reset":
        return machine.gpujob(who, "reset", "--yes")
    if right == "needs":
        return machine.gpujob(who, "needs", "--apply")
    if right == "by_name":
        return machine.gpujob(who, "submit", "--on", "0", "--", "true")
    job = str(waiting_job(machine))
    if right == "depend":
        return machine.gpujob(who, "submit", "--after", job, "--", "true")
    if right == "swap":
        return machine.gpujob(who, "swap", job, str(waiting_job(machine)))
    if right == "release":
        machine.ask("hold", jobs=[int(job)])
    if right == "edit":
        return machine.gpujob(who, "edit", job, "--priority", "5")
    if right.startswith("see"):
        return machine.gpujob(who, "show", job)
    return machine.gpujob(who, right, job)


@ROOT_ONLY
@pytest.mark.parametrize("right", [right for right in RIGHTS if not right.startswith("see_command")])
def test_real_users_may_do_what_the_table_says(machine: Machine, right: str) -> None:
    """Issue 25: each cell of the table of rights, with three real users; who may not is refused with exit code 3."""
    for role, who in ((OWNER, "ada"), (OTHER, "bob"), (ADMINISTRATOR, "eve")):
        done = tried(machine, right, who)
        allowed = role in RIGHTS[right].roles
        if right == "pausequeue":  # of the whole queue; the jobs of the user otherwise
            assert ("the queue is paused" in done.out) is allowed and not done.code, (who, done)
            continue
        assert done.code == (0 if allowed else 3), (who, done)
        if not allowed:
            assert "belongs to user ada" in done.err or "only an administrator may" in done.err, done


@ROOT_ONLY
@pytest.mark.parametrize("hide", [True, False])
def test_real_users_see_commands_as_the_table_says(machine: Machine, hide: bool) -> None:
    """Issue 25: the command of a job is hidden from other users if the configuration says so, in each verb that shows it."""
    machine.configure(f"{CONFIG}hide_commands: {str(hide).lower()}\n")
    job = str(waiting_job(machine, label="hushhush"))
    right = "see_command" if hide else "see_command_open"
    for role, who in ((OWNER, "ada"), (OTHER, "bob"), (ADMINISTRATOR, "eve")):
        for words in (["show", job], ["show", "--json", job], ["jobs"], ["status"], ["status", "--json"], ["report"]):
            said = machine.gpujob(who, *words).said
            assert ("hushhush" in said) is (role in RIGHTS[right].roles), (who, words, said)
