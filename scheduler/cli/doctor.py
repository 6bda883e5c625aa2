"""The verb `doctor`: checks this machine and this scheduler, and prints problems with the commands that fix them."""

from __future__ import annotations

import os
import sys

from scheduler.client.client import SCHEMA
from scheduler.client.locate import is_socket, settings_for, state_file_for
from scheduler.core.config import defaults
from scheduler.core.errors import Mistakes, SchedulerError
from scheduler.doctor.finding import Finding, Mark, worst
from scheduler.intake.settings import Settings, without_config
from scheduler.system.forked_command import need_own_process
from scheduler.views import render, terminal

WIDTH = 14  # columns for the name of a check


def doctor(*, json: bool = False, state_file: str | None = None, config: str | None = None) -> int:
    """Print all findings, as text or JSON. Return 1 if at least one finding is bad, else 0.

    Raises SchedulerError if the state file or config that the user has named cannot be used, or if several schedulers
    run and the user has named none of them.
    """
    need_own_process()  # the checks examine the process that the user started
    from scheduler.core.errors import word
    from scheduler.doctor.checks import findings
    from scheduler.doctor.examination import Examination

    flags = {"state_file": state_file} if state_file else {}
    errors: list[SchedulerError] = []
    try:
        found = state_file_for(state_file, config)
        if is_socket(found):
            print("gpujob: for the scheduler of all users: gpujob system status", file=sys.stderr)
            found = os.path.join(os.getcwd(), defaults()["state_file"])
    except SchedulerError as error:
        named = state_file or os.environ.get("GPUJOB_STATE_FILE")
        if named or (config and not os.path.lexists(config)):
            raise
        errors, found = _each(error), ""
    settings: Settings | None = None
    try:
        settings = settings_for({"state_file": found} if found else flags, config)
    except SchedulerError as error:
        errors = _each(error)
    if not found and settings is not None:
        raise errors[0]  # several schedulers run: the user must name one
    found = found or os.path.join(os.getcwd(), defaults()["state_file"])
    settings = settings or without_config({"state_file": found})
    suffix = "" if found == os.path.join(os.getcwd(), defaults()["state_file"]) else f" --state-file {word(found)}"
    suffix += f" --config {word(os.path.abspath(config))}" if config else ""
    exam = Examination(found, settings.config, settings.config_file, errors, os.environ, suffix)
    all_found = findings(exam)
    if json:
        render.print_json(_json(found, all_found))
    else:
        print("\n".join(line for finding in all_found for line in _lines(finding)))
    return 1 if worst(all_found) is Mark.BAD else 0


def _each(error: SchedulerError) -> list[SchedulerError]:
    return list(error.errors) if isinstance(error, Mistakes) else [error]


def _json(state_file: str, findings: list[Finding]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "state_file": state_file,
        "worst": worst(findings).value,
        "findings": [
            {
                "check": finding.check,
                "mark": finding.mark.value,
                "seen": finding.seen,
                "wrong": finding.wrong or None,
                "mend": finding.mend or None,
            }
            for finding in findings
        ],
    }


def _lines(finding: Finding) -> list[str]:
    """Return the lines of a finding: the check, the problem, and the command that fixes it.

    The command is not folded to the terminal's width, so that it can be copied.
    """
    mark = finding.mark.value
    indent = 9 + WIDTH
    lines = terminal.folded(f"{mark:<8} {finding.check:<{WIDTH - 1}} {render.safe(finding.seen)}", indent, mark)
    if finding.wrong:
        lines += terminal.folded(f"{'':<8} {render.safe(finding.wrong)}", 9)
    if finding.mend:
        lines.append(f"{'':<8} fix: {render.safe(finding.mend)}")
    return lines
