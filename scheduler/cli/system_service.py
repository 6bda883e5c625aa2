"""The verb `system`: installs, shows and removes the service gpujobd, the scheduler of all users of a machine."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
import time
from pathlib import Path

from scheduler.cli.service import run_systemd
from scheduler.client.locate import client_of, is_socket
from scheduler.core.errors import Refused, SchedulerError
from scheduler.gpujobd.installation import check_installation
from scheduler.gpujobd.system_run import PAM_SERVICE, USER, SystemPaths, make_folders, service_user
from scheduler.intake.machine_settings import VARIABLE, machine_settings
from scheduler.views.render import counts_text, safe

MARK = "# Written by gpujob system install."
SERVICE = "gpujobd"
ANSWER_S = 20.0  # for the first answer of the scheduler
UNIT = Path(f"/etc/systemd/system/{SERVICE}.service")
PAM_FILE = Path(f"/etc/pam.d/{PAM_SERVICE}")
_UNIT = """\
{mark}
[Unit]
Description=gpujobd, one queue of GPU jobs for all users of this machine
After=network.target nss-user-lookup.target
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={python} -I -m scheduler system run
# Only the service is ended, never the jobs: they continue, and the next start finds them again.
KillMode=process
KillSignal=SIGTERM
TimeoutStopSec=20
Restart=always
RestartSec=2
# Not again after 3 (an installation that users can change, a folder of another user).
RestartPreventExitStatus=3
# The kernel ends a job that uses up the memory, not the whole service.
OOMPolicy=continue
TasksMax=infinity
LimitNOFILE=65536:524288
# A cgroup for each job, with its limits on memory and CPUs.
Delegate=yes
# Jobs stay in their cgroups while the service restarts. systemd can start it beside them only without controllers; its
# next start gives the limits back.
ExecStopPost=-{python} -I -c "from scheduler.gpujobd.cgroups import release; release()"

[Install]
WantedBy=multi-user.target
"""
_CONFIG = """\
# The scheduler of all users (gpujob system) and shared settings of this machine. A change counts within 30 s.
# All settings of config.example.yaml can be set here, and:
# admins: [ada, "@gpu-admins"]      # users, or groups after @, who may change all jobs and pause GPUs
# hide_commands: false              # true: users do not see the commands of other users
limits:                             # the most that a user or group may have at the same time
  "*": {waiting: 10000}             # each user without a limit of their own; also GPUs: {gpus: 4, waiting: 200}
#  ada: {gpus: 8}
#  "@students": {gpus: 6}          # all members together
# weights: {ada: 2}                 # ada gets twice the share of others
# priorities_across_users: false    # true: priorities count among the jobs of all users
keep_finished: 100000 90d           # ended jobs that are kept: so many, and for so long
"""
_PAM_DEBIAN = """\
{mark}
auth     required  pam_permit.so
@include common-account
session  optional  pam_env.so
session  required  pam_limits.so
@include common-session-noninteractive
"""
_PAM_OTHERS = """\
{mark}
auth     required  pam_permit.so
account  include   system-auth
session  optional  pam_env.so
session  required  pam_limits.so
"""


def install() -> int:
    """Create the service user, the configuration and the unit, and start the service. Return the exit code.

    Raises Refused if this is not root, or if users could change the program.
    """
    _need_root("install")
    check_installation()
    _create_user()
    paths = SystemPaths()
    make_folders(paths, service_user())
    _write_if_missing(Path(paths.config), _CONFIG, 0o644)
    _write_pam()
    unit = _UNIT.format(mark=MARK, python=sys.executable)
    changed = not UNIT.exists() or UNIT.read_text(errors="replace") != unit
    _write(UNIT, unit, 0o644)
    told = run_systemd(["systemd-analyze", "verify", str(UNIT)])
    for line in told[1].splitlines() if told is not None else ():
        if UNIT.name in line:
            print(f"systemd-analyze verify: {safe(line)}")
    if not os.path.isdir("/run/systemd/system"):
        print("systemd does not run here: start the scheduler with: gpujob system run")
        return 0
    active = run_systemd(["systemctl", "is-active", "--quiet", SERVICE])
    was_active = active is not None and not active[0]
    for words in (["systemctl", "daemon-reload"], ["systemctl", "enable", "--now", SERVICE]):
        done = run_systemd(words)
        if done is None or done[0]:
            raise SchedulerError(f"{' '.join(words)} failed: {safe(done[1].strip()) if done else 'no answer'}")
    if changed and was_active:
        print(f"the unit has changed; use the new program: systemctl restart {SERVICE} (jobs continue)")
        return 0
    return _wait_for_answer(paths)


def _wait_for_answer(paths: SystemPaths) -> int:
    """Wait until the scheduler answers. Return the exit code: 0 if it answers, else 1."""
    from scheduler.client.system_client import SystemClient

    until = time.monotonic() + ANSWER_S
    while True:
        try:
            SystemClient(paths.socket).overview(0)
        except SchedulerError as error:
            said = str(error)
        else:
            print(f"the service {SERVICE} runs; users submit jobs with: gpujob submit -- COMMAND")
            return 0
        if time.monotonic() >= until:
            with contextlib.suppress(OSError):
                said = Path(paths.problem).read_text(encoding="utf-8")
            print(
                f"gpujob: the scheduler does not begin: {safe(said)}; its log: journalctl -u {SERVICE}", file=sys.stderr
            )
            return 1
        time.sleep(0.2)


def status() -> int:
    """Print whether the service is installed and answers. Return the exit code: 0 if it answers, else 1."""
    paths = SystemPaths()
    print(f"unit: {UNIT}" if UNIT.exists() else "unit: not installed (sudo gpujob system install)")
    told = run_systemd(["systemctl", "is-active", SERVICE])
    runs = told is not None and told[1].strip() and os.path.isdir("/run/systemd/system")
    print(f"systemd: {safe(told[1].strip().splitlines()[-1]) if told and runs else 'does not run here'}")
    problem = machine_settings({VARIABLE: os.environ.get(VARIABLE, "")}).problem
    print(f"configuration: {safe(problem) if problem else paths.config}")
    path = os.environ.get("GPUJOB_SYSTEM_SOCKET") or paths.socket
    try:
        problem = Path(paths.problem).read_text(encoding="utf-8") if path == paths.socket else ""
    except OSError:
        problem = ""
    if problem or not is_socket(path):
        print(
            f"scheduler: does not run ({safe(problem) or f'no socket {safe(path)}'}); its log: journalctl -u {SERVICE}"
        )
        return 1
    try:
        view = client_of(path).overview(0)
    except SchedulerError as error:
        print(f"scheduler: {safe(str(error))}")
        return 1
    print(f"scheduler: answers at {safe(path)}; jobs: {counts_text(view.counts)}")
    return 0


def uninstall() -> int:
    """Stop the service, and remove the unit. State, configuration and user stay. Return the exit code.

    Raises Refused if this is not root, or if the unit was not written by gpujob.
    """
    _need_root("uninstall")
    if not UNIT.exists():
        print(f"not installed: {UNIT}")
        return 1
    if MARK not in UNIT.read_text(errors="replace"):
        raise Refused(f"{UNIT} was not written by gpujob", do="remove it yourself")
    stopped = run_systemd(["systemctl", "disable", "--now", SERVICE])
    if os.path.isdir("/run/systemd/system") and (stopped is None or stopped[0]):
        raise SchedulerError(
            f"the service cannot be stopped: {safe(stopped[1].strip()) if stopped else 'no answer of systemctl'}",
            do=f"systemctl disable --now {SERVICE}, and repeat this command",
        )
    UNIT.unlink()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SystemPaths().socket)
    run_systemd(["systemctl", "daemon-reload"])
    if PAM_FILE.exists() and MARK in PAM_FILE.read_text(errors="replace"):
        PAM_FILE.unlink()
    paths = SystemPaths()
    print(f"removed: {UNIT}; running jobs continue, but nobody records how they end")
    print(f"kept: {paths.state} (jobs, their history, records of the users), {paths.config}, user {USER}")
    return 0


def _need_root(action: str) -> None:
    if os.geteuid() != 0:
        raise Refused("only root can set up the scheduler of all users", do=f"sudo gpujob system {action}")


def _create_user() -> None:
    """Create the user of the scheduler if it does not exist. Raises SchedulerError."""
    try:
        pwd.getpwnam(USER)
    except KeyError:
        words = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", SystemPaths().state]
        done = run_systemd([*words, "--shell", "/usr/sbin/nologin", USER])
        if done is None or done[0]:
            text = safe(done[1].strip()) if done else "there is no useradd"
            raise SchedulerError(f"cannot create the user {USER}: {text}", do="create it yourself") from None
        print(f"user {USER} was created")


def _write_pam() -> None:
    if os.path.exists("/etc/pam.d/common-account"):
        text = _PAM_DEBIAN
    elif os.path.exists("/etc/pam.d/system-auth"):
        text = _PAM_OTHERS
    else:
        print(
            f"there is no PAM configuration that gpujob knows: jobs get no PAM session; to have one, write {PAM_FILE}"
        )
        return
    _write_if_missing(PAM_FILE, text.format(mark=MARK), 0o644)


def _write_if_missing(path: Path, text: str, mode: int) -> None:
    if path.exists():
        print(f"kept: {path}")
    else:
        _write(path, text, mode)


def _write(path: Path, text: str, mode: int) -> None:
    if path.exists() and path == UNIT and MARK not in path.read_text(errors="replace"):
        raise Refused(f"{path} was not written by gpujob", do="remove it yourself")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    print(f"written: {path}")
