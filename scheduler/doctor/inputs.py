"""Checks of the files that people write: whether they can be read, and whether other users could write them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from functools import partial

from scheduler.core.errors import DENIED, LINK, NO_PLAIN_FILE, OWNER, UNSEEN, WRITERS, FileTrouble, SchedulerError, word
from scheduler.doctor.examination import Examination
from scheduler.doctor.finding import DoctorUser, Finding, Mark, good, status_of
from scheduler.intake.machine_settings import machine_settings
from scheduler.intake.settings import model_table
from scheduler.intake.tail import cannot_be_read, check_places, check_private, places_of

_LINE = re.compile(r"(/.*?):(\d+)(?::\d+)?$", re.DOTALL)


def judge(
    check: str,
    path: str,
    error: SchedulerError | None,
    who: DoctorUser,
    there: bool,
    *,
    device: bool = False,
    owner: int | None = None,
    again: str = "",
) -> Finding:
    """Return the finding on a config, jobs file, commands file or model table.

    ``error``: why the scheduler does not read the file, or None. ``there``: whether the file exists. ``device``:
    whether the path is a device, or a link that leads to no regular file. If so, no command that moves the file away is
    proposed. ``owner``: user id of the scheduler's owner, None if the owner runs `gpujob doctor`. ``again``: the
    command with which the owner repeats the check.
    """
    if error is None:
        return good(check, path if there else f"{path}, does not exist yet")
    exposed = error.exposure if isinstance(error, FileTrouble) else None
    if exposed is not None and owner is not None and exposed.code in (OWNER, LINK):
        if exposed.code == OWNER and exposed.owner == owner:
            return Finding(check, Mark.UNKNOWN, f"unknown: whether only its owner can write {path}", "", again)
        return Finding(check, Mark.BAD, error.where or path, exposed.said)
    line = _LINE.match(error.where)
    wrong, mend = error.what, ""
    if exposed is not None:
        wrong, mend = exposed.said, exposed.mend
        if exposed.code != WRITERS:
            chown = "chown -h" if exposed.code == LINK else "chown"
            mend = who.root(f"{chown} {word(who.name)} {word(exposed.place)}")
    elif line:
        wrong, mend = f"line {line[2]}: {wrong}", f'"${{EDITOR:-vi}}" +{line[2]} {word(line[1])}'
    elif error.code == DENIED:
        mend = f"chmod u+r {word(path)}"
    elif error.code == NO_PLAIN_FILE:
        mend = "" if device else f"mv {word(path)} {word(f'{path}.old')}"
    elif error.code == UNSEEN:
        mend = ""
    elif error.where == path:
        mend = f'"${{EDITOR:-vi}}" {word(path)}'
    if error.do:
        wrong = f"{wrong}; {error.do}"
    return Finding(check, Mark.BAD, error.where or path, wrong, mend)


def judged_file(exam: Examination, check: str, path: str, error: SchedulerError | None, there: bool) -> Finding:
    """Return the finding on a file that people write. ``error``, ``there``: see `judge`."""
    status = status_of(path)
    device = status is not None and (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode))
    if os.path.islink(path):
        device = not os.path.isfile(path)  # propose no command that moves somebody's link away
    return judge(
        check, path, error, exam.who, there, device=device, owner=exam.owner if exam.others else None,
        again=f"{exam.sudo}{exam.again}",
    )  # fmt: skip


def check_config(exam: Examination) -> list[Finding]:
    """Check that the settings can be read."""
    if not exam.errors:
        text = exam.config_file or "no config file: the defaults apply"
        found = [judged_file(exam, "config", text, None, True)]
        problem = machine_settings(os.environ).problem
        if problem:
            found.append(
                Finding("config", Mark.WARN, problem, "no user gets these settings", "correct the file, as root")
            )
        return found
    return [judged_file(exam, "config", exam.config_file or error.where, error, True) for error in exam.errors]


def check_inputs(exam: Examination) -> list[Finding]:
    """Check jobs file, commands file and model table."""
    trust, found = exam.config.trust_group, []
    for check, path in (("jobs file", exam.config.jobs_file), ("commands file", exam.config.commands_file)):
        if path:
            error, there = _trouble(partial(_check_lines, path, trust), path)
            if not there:  # other users may be able to create it first
                error = _trouble(partial(check_places, path, places_of(path), trust), os.path.dirname(path))[0]
            found.append(judged_file(exam, check, path, error, there))
    path = exam.config.llm_config
    if path and os.path.lexists(path):
        error, there = _trouble(partial(model_table, path, trust), path)
        found.append(judged_file(exam, "model table", path, error, there))
    return found


def _trouble(look: Callable[[], object], path: str) -> tuple[SchedulerError | None, bool]:
    """Return why a file that people write cannot be read (None: it can be read), and whether the file exists.

    For a missing file, return (None, False). ``look``: reads the file; raises OSError or SchedulerError.
    """
    try:
        os.stat(path)
    except FileNotFoundError:
        return None, False
    except OSError as error:
        return SchedulerError(f"cannot examine the file: {error.strerror}", where=path, code=UNSEEN), True
    try:
        look()
    except OSError as error:
        return cannot_be_read(error, path), True
    except SchedulerError as error:
        return error, True
    return None, True


def _check_lines(path: str, trust_group: bool) -> None:
    """Raise OSError or SchedulerError if the scheduler would not read lines from this file."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        what = "cannot read lines: not a regular file"
        raise SchedulerError(what, where=path, do="name another file", code=NO_PLAIN_FILE)
    check_private(path, status, trust_group)
    if not os.access(path, os.R_OK, effective_ids=True):
        raise SchedulerError("cannot read the file: Permission denied", where=path, code=DENIED)
