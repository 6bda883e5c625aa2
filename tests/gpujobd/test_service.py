"""The scheduler of all users with real users: jobs run as their submitters, and survive what is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys

import pytest

from tests.gpujobd.machine import SOCKET, Machine
from tests.stories.harness import wait_for
from tests.stories.people import ROOT_ONLY

pytestmark = [ROOT_ONLY, pytest.mark.smoke]


def log_of(machine: Machine, number: int, who: str = "ada") -> str:
    return machine.gpujob(who, "logs", str(number)).out


def test_install_writes_unit_and_user_and_can_be_repeated(machine: Machine) -> None:
    """Issue 25, 1: `system install` can be repeated; the unit executes `gpujob system run`; systemd finds no mistake in it."""
    again = machine.install()
    assert "kept: /etc/gpujob/config.yaml" in again.out and "systemd-analyze verify:" not in again.out
    unit = machine.root("cat", "/etc/systemd/system/gpujobd.service").out
    assert re.search(r"^ExecStart=\S+python\S* -I -m scheduler system run$", unit, re.MULTILINE)
    assert machine.root("id", "-u", "gpujob").out.strip() != "0"
    status = machine.gpujob("ada", "system", "status")
    assert status.code == 0 and f"answers at {SOCKET}" in status.out
    refused = machine.gpujob("ada", "system", "install")
    assert refused.code == 3 and "sudo gpujob system install" in refused.err


def test_submit_uses_it_and_says_so(machine: Machine) -> None:
    """Issue 25, 1: without a scheduler of one's own, `submit` uses the scheduler of all users, and says so."""
    done = machine.gpujob("ada", "submit", "--", "true")
    assert done.code == 0 and f"using the scheduler of all users of this machine: {SOCKET}" in done.err
    asked = machine.sh(
        "ada", "mkdir -p own && cd own && touch gpu_scheduler_state.json && gpujob submit --system -- true"
    )
    assert asked.code == 0 and not asked.err, asked
    wrong = machine.gpujob("ada", "status", "--system", "--state-file", "/x")
    assert wrong.code == 2 and "two schedulers" in wrong.err
    gone = machine.gpujob("ada", "status", GPUJOB_SYSTEM_SOCKET="/tmp/no/socket")
    assert gone.code == 5 and "no scheduler of all users" in gone.err


def test_a_job_runs_as_its_submitter(machine: Machine) -> None:
    """Issue 25, 3: user, groups, umask, limits, folder and environment are those of the submitter; PAM has a session."""
    text = "mkdir -p w && cd w && umask 027 && ulimit -n 333 && MINE=1 gpujob submit -- sh -c '"
    text += "id -un; id -Gn; umask; ulimit -n; pwd; echo $MINE $GPUJOB_GPUS $CUDA_VISIBLE_DEVICES; touch made'"
    done = machine.sh("ada", text)
    job = machine.ended(int(done.out))
    gpu = str(job["gpus"][0])
    assert log_of(machine, job["id"]).split("\n")[:-1] == [
        "ada", "ada lab", "0027", "333", "/home/ada/w", f"1 {gpu} {gpu}"
    ]  # fmt: skip
    made = os.stat(f"/proc/{machine.holder.pid}/root/home/ada/w/made")
    assert (made.st_uid, made.st_mode & 0o777) == (machine.people["ada"].uid, 0o640)
    log = os.stat(f"/proc/{machine.holder.pid}/root{job['log']}")
    assert (log.st_uid, log.st_mode & 0o777) == (machine.people["ada"].uid, 0o600)
    assert machine.gpujob("bob", "logs", str(job["id"])).code == 1  # the file belongs to ada


def test_only_the_launcher_is_root(machine: Machine) -> None:
    """Issue 25, 4: scheduler and front run as the service user, agents and supervisors as their users."""
    number = machine.submit("ada", "--", "sleep", "30")
    machine.in_state(number, "running")
    gpujob = int(machine.root("id", "-u", "gpujob").out)
    (scheduler,) = machine.children("service")
    assert os.stat(f"/proc/{scheduler}").st_uid == gpujob
    agents = {os.stat(f"/proc/{pid}").st_uid for pid in machine.children("agent")}
    assert machine.people["ada"].uid in agents <= {person.uid for person in machine.people.values()}
    assert os.stat(f"/proc/{machine.job(number)['pid']}").st_uid == machine.people["ada"].uid
    machine.gpujob("ada", "cancel", str(number))
    machine.ended(number)


def test_a_log_path_cannot_be_used_to_write_elsewhere(machine: Machine) -> None:
    """Issue 25, 3: log and folder are opened with the submitter's rights: a foreign path fails, and nothing is written."""
    machine.sh("bob", "mkdir -p private && chmod 700 private")
    number = machine.submit("ada", "--log-dir", "/home/bob/private", "--", "true")
    wait_for(lambda: machine.job(number)["reason_code"] == "backoff", "a failed start", 60)
    assert "log cannot be opened: Permission denied" in machine.job(number)["reason"]
    machine.gpujob("ada", "cancel", str(number))
    assert not machine.root("ls", "/home/bob/private").out


def test_a_missing_file_is_reported_and_looked_for_again(machine: Machine) -> None:
    """The agent looks for the script with the rights of its user, and the job starts when it exists.

    A line of a jobs file brings no umask: the job has the umask of a login.
    """
    machine.sh("ada", "gpujob watch && echo 0,later.py,,x >> gpujob/jobs.txt")
    wait_for(lambda: "no such file /home/ada/gpujob/later.py" in machine.gpujob("ada", "status").out, "the reason", 60)
    machine.sh("ada", "echo 'import os; print(oct(os.umask(0)))' > gpujob/later.py")
    (job,) = (
        job for job in machine.gpujob("ada", "jobs", "--json").json()["jobs"] if "later.py" in (job["script"] or "")
    )
    assert machine.ended(job["id"])["exit_code"] == 0
    assert log_of(machine, job["id"]) == "0o22\n"
    assert machine.gpujob("bob", "watch", "--list").out.startswith("no jobs file of yours")


def test_equal_lines_of_two_users_are_two_jobs(machine: Machine) -> None:
    """Issue 25, 5: each user has jobs files of their own; `on=` and the lines of others are not for them."""
    for who in ("ada", "bob"):
        machine.sh(
            who,
            "gpujob watch; echo 0,/bin/true,,same >> gpujob/jobs.txt; echo '0,/bin/true,,n,;on=0' >> gpujob/jobs.txt",
        )

    def both() -> bool:
        found = machine.gpujob("eve", "jobs", "--json").json()["jobs"]
        return sorted(job["user"] for job in found if job["arguments"] == ["same"]) == ["ada", "bob"]

    wait_for(both, "two jobs", 60)
    wait_for(lambda: "only an administrator" in machine.gpujob("bob", "status").out, "the refusal", 60)
    assert machine.gpujob("bob", "status").out.count("only an administrator") == 1  # the line of ada is not shown


def test_actions_at_the_end_run_as_the_submitter(machine: Machine) -> None:
    """`on_finish` runs as the submitter, with the submitter's environment."""
    machine.sh("ada", "printf '#!/bin/sh\\nid -un > ~/said; echo $2 >> ~/said' > told; chmod +x told")
    number = machine.submit("ada", "--on-finish", "/home/ada/told", "--", "sh", "-c", "exit 4")
    machine.ended(number)
    wait_for(lambda: machine.sh("ada", "cat said").out == "ada\n4\n", "the action", 60)
    number = machine.submit("ada", "--on-finish", "no-such-program", "--", "true")
    machine.ended(number)
    wait_for(lambda: "not found in PATH" in machine.gpujob("ada", "show", str(number)).out, "the warning", 60)


def test_a_script_runs_with_the_python_of_its_submitter(machine: Machine) -> None:
    """The PATH of the submission counts, such as that of a virtual environment."""
    machine.sh("ada", "mkdir -p bin; ln -sf /usr/bin/env bin/python; touch t.py")
    number = int(machine.sh("ada", "PATH=$HOME/bin:$PATH; export PATH; gpujob submit --launch torchrun t.py").out)
    machine.ended(number)
    assert machine.gpujob("ada", "show", "--json", str(number)).json()["command"][0] == "/home/ada/bin/python"


def test_there_is_no_token_without_a_page(machine: Machine) -> None:
    done = machine.gpujob("ada", "token")
    assert done.code == 3 and "has no web page" in done.err, done


def test_limits_and_turns(machine: Machine) -> None:
    """Issue 25, 6: limits on running GPUs and waiting jobs, of users and groups; a newcomer goes first."""
    machine.configure(
        "gpus: 4\ngpu_interval: 0\nadmins: [eve]\nlimits: {bob: {gpus: 1, waiting: 3}, '@lab': {gpus: 2}}\n"
    )
    machine.clear()
    wait_for(lambda: limited(machine), "the limits", 60)
    for who in ("ada", "bob"):
        machine.sh(who, "gpujob cancel $(gpujob jobs --state pending,running | awk -v me=$USER '$2 == me {print $1}')")


def limited(machine: Machine) -> bool:
    """Submit jobs of bob and ada until the limits hold; return whether they do."""
    for _ in range(4):
        machine.gpujob("bob", "submit", "--", "sleep", "300")
        machine.gpujob("ada", "submit", "--", "sleep", "300")
    jobs = machine.gpujob("eve", "jobs", "--json", "--state", "pending,running").json()["jobs"]
    running = [job["user"] for job in jobs if job["state"] == "running"]
    reasons = {job["user"]: job["reason"] or "" for job in jobs if job["reason_code"] == "limit"}
    over = machine.gpujob("bob", "submit", "--", "true")
    if (running.count("bob"), running.count("ada")) != (1, 2) or over.code != 3:
        for who in ("ada", "bob"):
            machine.sh(
                who, "gpujob cancel $(gpujob jobs --state pending,running | awk -v me=$USER '$2 == me {print $1}')"
            )
        return False
    assert "user bob has 1 of at most 1 GPUs" in reasons["bob"] and "group lab has 2 of at most 2" in reasons["ada"]
    assert "3 of at most 3 waiting jobs" in over.err
    return True


def test_a_job_with_limits_is_told_if_there_are_no_cgroups(machine: Machine) -> None:
    """Issue 25, 3: where cgroups are not delegated, it is said."""
    number = machine.submit("ada", "--gpus", "0", "--mem", "64G", "--cpus", "8", "--", "true")
    machine.ended(number)
    notes = machine.job(number)["notes"]
    assert notes == [
        "mem= and cpus= do not limit this job: the service has no cgroups here; it gets them from systemd (Delegate=yes)"
    ]


def test_a_job_above_the_limit_of_its_user_is_refused(machine: Machine) -> None:
    """It could never start."""
    machine.configure(machine.config + 'limits: {"*": {gpus: 1}, "@lab": {gpus: 3}}\n')
    done = wait_for(
        lambda: (done := machine.gpujob("bob", "submit", "--gpus", "2", "--", "true")).code and done, "the limit"
    )
    assert done.code == 3 and "the job needs 2 GPUs, and user bob may have 1 (limits); request less" in done.err
    machine.gpujob("bob", "queue", "pause")
    number = machine.submit("bob", "--", "true")
    edited = machine.gpujob("bob", "edit", str(number), "--gpus", "2")
    assert edited.code == 3 and "may have 1 (limits)" in edited.err, edited
    machine.gpujob("bob", "queue", "resume")
    machine.ended(number)


def test_verbs_for_the_configuration_and_for_hidden_jobs(machine: Machine) -> None:
    machine.configure(machine.config + "hide_commands: true\n")
    check = ["env", "GPUJOB_MACHINE_CONFIG=", sys.executable, "-I", "-m", "scheduler", "config", "check"]
    checked = machine.root(*check, "/etc/gpujob/config.yaml")
    assert "no mistakes" in checked.out
    assert "/etc/gpujob/config.yaml: no mistakes" in machine.gpujob("ada", "config", "check").out
    for mistake in ("admins: eve", "gpus: four", 'limits: {"*": {gpu: 4}}'):
        machine.configure(mistake + "\n")
        for words in ((), ("/etc/gpujob/config.yaml",)):
            assert machine.root(*check, *words, check=False).code == 2, (mistake, words)
    machine.configure(machine.config + "hide_commands: true\n")
    number = machine.submit("ada", "--", "true")
    machine.ended(number)
    wait_for(lambda: "belongs to user ada" in machine.gpujob("bob", "logs", str(number)).err, "the hidden log")
    missing = machine.gpujob("bob", "show", "4711")
    assert missing.code == 6 and "/var/lib" not in missing.err, missing


def test_a_user_pauses_own_jobs(machine: Machine) -> None:
    """Issue 25, 5: `queue pause` of a user pauses the jobs of this user alone, also after a restart."""
    assert machine.gpujob("ada", "queue", "pause").out == "the jobs of user ada are paused; running jobs continue\n"
    mine, theirs = machine.submit("ada", "--", "true"), machine.submit("bob", "--", "true")
    machine.ended(theirs)
    machine.kill_scheduler()
    wait_for(lambda: machine.job(mine)["reason_code"] == "paused", "the reason", 60)
    assert "user ada has paused all jobs" in machine.job(mine)["reason"]
    machine.gpujob("ada", "queue", "resume")
    assert machine.ended(mine)["exit_code"] == 0


def test_predictions_and_offers_are_made_for_the_user_who_asks(machine: Machine) -> None:
    """Issue 26, 4: each user sees the plan; `why` offers only what this user may do; a dry run submits nothing."""
    long = machine.submit("ada", "--gpus", "4", "--time", "1h", "--", "sleep", "600")
    machine.in_state(long, "running")
    mine = machine.submit("bob", "--gpus", "1", "--time", "1h", "--", "true")
    wait_for(lambda: machine.job(mine)["reason_code"] == "no-room", "it waits", 60)
    plan = {one["id"]: one for one in machine.gpujob("bob", "plan", "--json").json()["jobs"]}
    assert plan[long]["end"] <= plan[mine]["start"] and plan[mine]["source"] == "its time limit"
    explained = machine.gpujob("bob", "why", str(mine), "--json").json()["jobs"][0]["explanation"]
    assert explained["place"] == 1 and explained["holders"][0]["jobs"] == [long]
    assert f"gpujob cancel {long}" not in [offer["command"] for offer in explained["offers"]]
    by_admin = machine.gpujob("eve", "why", str(mine), "--json").json()["jobs"][0]["explanation"]
    assert [offer["command"] for offer in by_admin["offers"]] == [f"gpujob cancel {long}"]
    before = len(machine.gpujob("bob", "jobs", "--json").json()["jobs"])
    told = machine.gpujob("bob", "submit", "--dry-run", "--gpus", "1", "--", "true").out
    assert "the job would wait (" in told
    assert len(machine.gpujob("bob", "jobs", "--json").json()["jobs"]) == before
    machine.gpujob("ada", "cancel", str(long))
    machine.ended(mine)


def test_reports_and_who_show_users(machine: Machine) -> None:
    """Issue 25, 6: `status`, `who` and `report --by user` show users."""
    number = machine.submit("bob", "--", "sleep", "60")
    machine.in_state(number, "running")
    assert re.search(rf"^{number} +bob +running", machine.gpujob("ada", "status").out, re.MULTILINE)
    assert re.search(r"^\d +bob \(you\) +1 ", machine.gpujob("bob", "who").out, re.MULTILINE)
    uses = {use["user"]: use for use in machine.gpujob("bob", "report", "--by", "user", "--json").json()["users"]}
    assert (
        uses["bob"]["own"]
        and uses["bob"]["booked"] == 1
        and not any(use["own"] for who, use in uses.items() if who != "bob")
    )
    machine.gpujob("bob", "cancel", str(number))
    machine.ended(number)


@pytest.mark.parametrize("what", ["scheduler", "launcher", "agents", "everything"])
def test_kill_9_loses_no_job_and_no_exit_code(machine: Machine, what: str) -> None:
    """Issue 25, 7: jobs continue while scheduler, launcher or agents are killed, and their exit codes are true."""
    machine.gpujob("eve", "queue", "resume")
    wait = "while [ ! -e ~/enough ]; do sleep 0.1; done; exit"
    jobs = {
        machine.submit(who, "--", "sh", "-c", f"{wait} {code}"): code
        for who, code in (("ada", 3), ("bob", 7), ("ada", 9))
    }
    waiting = machine.submit("bob", "--gpus", "4", "--", "sh", "-c", "exit 5")
    for number in jobs:
        machine.in_state(number, "running")
    if what in ("agents", "everything"):
        machine.kill_agents()
    if what in ("scheduler", "everything"):
        machine.kill_scheduler()
    if what in ("launcher", "everything"):
        machine.kill_launcher()
        machine.start()
    assert {machine.job(number)["state"] for number in jobs} == {"running"}
    for who in ("ada", "bob"):
        machine.sh(who, "touch enough")
    for number, code in (*jobs.items(), (waiting, 5)):
        assert machine.ended(number)["exit_code"] == code
    for who in ("ada", "bob"):
        machine.sh(who, "rm enough")


def test_sigterm_ends_the_service_and_no_job(machine: Machine) -> None:
    """A stop of the service (as by systemctl) ends launcher, scheduler and agents; the jobs continue and are adopted."""
    number = machine.submit("ada", "--", "sh", "-c", "while [ ! -e ~/stopped ]; do sleep 0.1; done; exit 6")
    machine.in_state(number, "running")
    assert machine.launcher is not None
    machine.launcher.send_signal(signal.SIGTERM)
    assert machine.launcher.wait(60) == 0
    machine.start()
    machine.sh("ada", "touch stopped")
    assert machine.ended(number)["exit_code"] == 6


def test_status_says_why_the_scheduler_cannot_begin(machine: Machine) -> None:
    """Without GPUs and without declared GPUs, the service cannot begin: the administrator is told what to do."""
    machine.kill_launcher()
    machine.configure("admins: [eve]\n")
    machine.start(answers=False)
    status = [sys.executable, "-I", "-m", "scheduler", "system", "status"]
    wait_for(lambda: "no GPU can be seen" in machine.root(*status, check=False).out, "the reason")
    told = machine.root(*status, check=False)
    assert told.code == 1 and "declare GPUs in /etc/gpujob/config.yaml, such as gpus: 4" in told.out
    machine.configure(machine.config)
    machine.answers()
    assert "no GPU can be seen" not in machine.root(*status).out


def test_a_reboot_loses_no_waiting_job_and_says_what_was_lost(machine: Machine) -> None:
    """Issue 25: after a reboot no process lives. The running job is lost, and waiting jobs of all users run."""
    running = [machine.submit(who, "--", "sleep", "300") for who in ("ada", "bob")]
    for number in running:
        machine.in_state(number, "running")
    waiting = machine.submit("bob", "--gpus", "4", "--", "true")
    boot = "/proc/sys/kernel/random/boot_id"
    machine.power_off()
    machine.root("sh", "-c", f"echo 01234567-89ab-cdef-0123-456789abcdef > /run/boot && mount --bind /run/boot {boot}")
    try:
        machine.start()
        for number in running:
            lost = machine.ended(number)
            assert lost["outcome"] == "lost" and "the machine was rebooted" in json.dumps(lost), lost
        assert machine.ended(waiting)["exit_code"] == 0
    finally:
        machine.power_off()
        machine.root("umount", boot)
        machine.start()
