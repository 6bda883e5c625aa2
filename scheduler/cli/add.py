"""The verbs `add` (append a line to the jobs file) and `submit` (queue a command)."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scheduler.client.client import SchedulerClient
from scheduler.client.locate import client_of, settings_for, state_file_for
from scheduler.client.submission import Submission, model_table_for, spec_of, table_for, trusting
from scheduler.client.submit_context import limits_here, output_of_shell
from scheduler.core.allowed import parse_allowed
from scheduler.core.errors import Refused, SchedulerError, UsageError
from scheduler.core.job_options import LINE_KEYS, read_line_keys, read_options
from scheduler.core.model_table import need_of
from scheduler.core.placement_class import class_for, remedy
from scheduler.intake.jobs_file import LineContext, parse, write_line
from scheduler.intake.tail import check_owner, check_places, check_private, places_of
from scheduler.store.paths import check_not_for_another
from scheduler.system.atomic_files import append_line
from scheduler.system.forked_command import need_own_process
from scheduler.system.terminal_text import safe


def warn(text: str) -> None:
    """Print a warning on stderr."""
    print(safe(f"gpujob: {text}"), file=sys.stderr)


def add(
    script: str,
    *,
    conda: str = "",
    args: str = "",
    priority: str = "",
    gpus: str = "",
    pairs: tuple[str, ...] = (),
    output_file: str = "",
    state_file: str | None = None,
    config: str | None = None,
) -> int:
    """Append one line to the jobs file, print the line, and return the exit code 0.

    ``gpus``: ids of the allowed GPUs. ``pairs``: texts KEY=VALUE. ``output_file``: path of the jobs file. If it is
    empty, the scheduler's jobs file is used; if it is ``-``, the line is only printed.
    Raises UsageError, Refused or SchedulerError if the scheduler would refuse the line; nothing is written then. Raises
    SchedulerError if the jobs file cannot be written.
    """
    found = state_file_for(state_file, config)
    client = client_of(found)
    path = output_file or (_own_file(client) if client.shared else client.remembered("jobs_file"))
    if not path:  # no scheduler has run here: the settings name the file, so they must be readable
        path = settings_for({"state_file": found}, config).config.jobs_file or "jobs.txt"
    folder = os.getcwd() if path == "-" else os.path.dirname(os.path.abspath(path))
    if folder != os.getcwd():  # relative paths in a line are relative to the jobs file's folder
        if not script.startswith(("/", "~/")):
            script = os.path.abspath(script)
        if "/" in conda and not conda.startswith(("/", "~/")):
            conda = os.path.abspath(conda)
    level = read_options({"priority": priority}).get("priority", 0)
    on_cluster = client.on_cluster()
    try:
        allowed = parse_allowed(gpus, on_cluster)
    except UsageError as error:
        raise UsageError(
            f"{error.what}: in gpujob add, --gpus lists the allowed GPUs",
            do=f"{error.do}; to request a share of a GPU: --set gpus=0.5",
        ) from None
    if "," in script and not os.path.exists(script):
        raise UsageError(f"no such script: {script}", do=f"to append a whole line: echo '{script}' >> {path}")
    options, values = _as_options(pairs)
    line = write_line(script, priority=level, conda=conda, arguments=args, gpus=gpus, options=options)
    try:
        line.encode()
    except UnicodeEncodeError:
        raise UsageError("cannot write the line: it is not UTF-8", do="use names and arguments in UTF-8") from None
    managed = None if on_cluster else client.managed()
    parsed = parse(line, LineContext(folder, os.path.expanduser("~"), managed, on_cluster))
    if parsed is None:
        raise UsageError("cannot write the line: it would be empty or a comment", do="give another script name")
    meant = {"allowed": allowed, **values}
    if any(getattr(parsed.spec, name) != value for name, value in meant.items() if name != "cwd"):
        raise UsageError(
            f"cannot write this job as a line: {line} would be read as a different job",
            do="submit it: gpujob submit -- COMMAND",
        )
    need, _ = need_of(parsed.spec, client.learned_table(model_table_for(client, config, warn)), client.gpus())
    fleet = client.fleet()
    if fleet is not None:
        kind = class_for(need, parsed.spec.allowed, parsed.spec)
        never = fleet.can_ever_hold(kind)
        if never:
            raise Refused(never, do=remedy(kind))
    if path != "-":
        try:
            if os.path.exists(path):
                trusting(client, config, lambda trust: check_private(path, os.stat(path), trust))
            else:
                check_not_for_another(os.path.dirname(os.path.realpath(path)))
                trusting(client, config, lambda trust: check_places(path, places_of(path), trust))
            append_line(path, line, lambda status: check_owner(path, status))
        except OSError as error:
            raise SchedulerError(f"cannot write the jobs file: {error.strerror}", where=path) from None
    sys.stdout.flush()
    if sys.stdout.isatty():
        print(safe(line))
    else:
        sys.stdout.buffer.write(os.fsencode(line) + b"\n")  # the bytes as in the file, whatever stdout's encoding
    if not os.path.exists(parsed.spec.script):
        print(safe(f"gpujob: {parsed.spec.script} does not exist yet; the job waits until it exists"), file=sys.stderr)
    if path != "-" and not client.alive():
        print(
            "gpujob: no scheduler is running; the line is read when a scheduler starts (gpujob start)", file=sys.stderr
        )
    return 0


def _own_file(client: SchedulerClient) -> str:
    """Return the path of the first watched jobs file of the caller. Raises SchedulerError if there is none."""
    found = client.watched()
    if not found:
        raise SchedulerError("no jobs file of yours is read", do="have one read: gpujob watch")
    return found[0]


def _as_options(pairs: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the texts KEY=VALUE of ``--set`` in two forms.

    The first form is the text ``;key=value…`` for the end of a line of the jobs file. The second form is a dict: field
    of JobSpec → value. Raises UsageError or Refused for a wrong text.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"{pair!r} is not KEY=VALUE", where="--set", do=f"keys: {', '.join(LINE_KEYS)}")
        if re.search(r"[;\r\n\0]", pair):
            raise UsageError(
                f"{pair!r} contains a semicolon or a line break", where="--set", do="write one --set for each key"
            )
        try:
            values.update(read_line_keys([(key, text)], lambda key: f"{key}="))
        except SchedulerError as error:
            raise type(error)(error.what, where="--set", do=error.do.replace(";", "")) from None
    return "".join(f";{pair}" for pair in pairs), values


def submit(
    command: list[str],
    *,
    env: tuple[str, ...] = (),
    info_command: str = "",
    foreground: bool = False,
    wait: bool = False,
    dry_run: bool = False,
    state_file: str | None = None,
    config: str | None = None,
    **options: str | bool,
) -> int:
    """Queue a command with the current folder and environment, print the job's id, and return the exit code.

    ``wait`` and ``foreground`` wait for the end of the job. The exit code then tells how the job ended
    (`client/wait.py: code_of`). Without them, the exit code is 0. With ``wait``, Ctrl-C ends the wait with exit code
    130. With ``foreground``, Ctrl-C is passed on to a running job. If the job still waits, Ctrl-C cancels the job, with
    exit code 130.
    ``info_command``: shell text whose output becomes the job's ``info``. ``env``: texts NAME=VALUE. ``options``: values
    by option name (`core/job_options.py`). ``dry_run``: only print what would happen to the job. Raises UsageError, Refused, SchedulerError.
    """
    if not command:
        raise UsageError("the command is missing", do="write gpujob submit -- COMMAND…")
    if not command[0]:
        raise UsageError("the name of the program is empty", do="write gpujob submit -- COMMAND…")
    if wait or foreground:
        need_own_process()
    found = state_file_for(state_file, config)
    client = client_of(found)
    mask = os.umask(0)
    os.umask(mask)
    texts = {name: ("yes" if value else "") if isinstance(value, bool) else value for name, value in options.items()}
    if dry_run and (wait or foreground):
        raise UsageError(
            "--dry-run submits nothing that could be waited for", do="leave out --wait and -f, or --dry-run"
        )
    if info_command and not texts.get("info") and not dry_run:
        texts["info"] = output_of_shell(info_command)
    given = Submission(
        command=command, folder=os.getcwd(), environ=os.environ, options=texts, env=env, umask=mask, limits=limits_here()
    )  # fmt: skip
    spec, environment = spec_of(given)
    table = table_for(spec, client, config, warn)
    if dry_run:
        from scheduler.cli.plan import dry_run as show_dry_run

        return show_dry_run(client, spec, environment or os.environ, table)
    caller = None
    if foreground:
        from scheduler.client.foreground import stay
        from scheduler.client.foreground_caller import Caller

        caller = Caller(client.caller_folder(), output=bool(options.get("no_output")))
        spec = replace(spec, caller=caller.word)
        caller.hold_ctrl_c()
    try:
        job = client.submit(spec, environment, table)
    except BaseException:
        if caller is not None:
            caller.close()
        raise
    try:
        print(job.id, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise SchedulerError(f"cannot print the id of job {job.id}, which is queued: {error.strerror}") from None
    if caller is None and not client.shared and not client.alive():  # `stay` says it for a foreground job
        print("gpujob: no scheduler is running; the job waits until a scheduler starts (gpujob start)", file=sys.stderr)
    for note in job.notes:
        print(safe(f"gpujob: job {job.id}: {note}"), file=sys.stderr)
    if caller is not None:
        return stay(client, job.id, caller)
    if wait:
        from scheduler.client.wait import wait_for

        try:
            return wait_for(client, (job.id,), None, time.monotonic())
        except KeyboardInterrupt:
            print(
                f"gpujob: job {job.id} continues; to wait again: gpujob wait {job.id}; to end it: gpujob cancel {job.id}",
                file=sys.stderr,
            )
            return 130
    return 0
