"""`ts [options] command…`: queues a job with the current folder and environment."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from scheduler.client.client import QueueFull, SchedulerClient
from scheduler.client.submit_context import limits_here, output_of_shell
from scheduler.core.errors import Refused, SchedulerError
from scheduler.core.gpu import parse_gpu_ids
from scheduler.core.job import Job, JobSpec
from scheduler.core.model_table import ModelTable
from scheduler.system.forked_command import need_own_process
from scheduler.system.waiting import wait_until
from scheduler.ts.server import READY_S
from scheduler.ts.spooler import ERROR, FULL, RequestError, give_up_stdout, number_of, user_name
from scheduler.ts.words import Mistake

if TYPE_CHECKING:
    from scheduler.client.foreground_caller import Caller
    from scheduler.ts.spooler import Spooler
    from scheduler.ts.words import Typed

ROOM_S = 0.1
MOST_LABEL = 200
ENDED = "The server was ended (-K) before the job was in its queue."


def queue(spooler: Spooler, typed: Typed) -> int:
    """Queue the command and return the exit code of `ts`. Raises Mistake, RequestError, SchedulerError.

    The exit code is 0 if the job is queued, 2 if the queue is full and -B is given, and 255 if the job's id cannot be
    printed. With -f, `ts` waits for the job and returns the job's exit code.
    """
    options = typed.options
    if "f" in options or spooler.environ.get("TS_ENV"):
        need_own_process()  # before TS_ENV is run: its commands must not run twice, also if the queue is full
    spec = _spec(spooler, typed)
    client = spooler.client
    if spec.on or spec.gpus != "0" or spec.slots > 1:  # only a started daemon knows whether the job can ever run
        spooler.server.ready()
        _until_noted(client)
    caller: Caller | None = None
    if "f" in options:
        from scheduler.client.foreground_caller import Caller

        client.places.make()
        caller = Caller(client.places.state_dir, output="n" in options)
        spec = replace(spec, caller=caller.word)
    try:
        job = _submit(spooler, client, spec, caller, wait="B" not in options)
        if job is None:
            return FULL
        if caller is None:
            return 0 if "n" in options or _tell(job) else ERROR
        return _stay(spooler, client, job, unseen="n" in options)
    finally:
        if caller is not None:
            caller.close()


def _tell(job: Job) -> bool:
    """Print the job's id. If that fails, print the reason on stderr and return False; the job stays queued."""
    try:
        print(job.id, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"Job {job.id} is queued, but its number cannot be printed: {error.strerror}", file=sys.stderr)
        give_up_stdout()
        return False
    return True


def _submit(
    spooler: Spooler, client: SchedulerClient, spec: JobSpec, caller: Caller | None, *, wait: bool
) -> Job | None:
    """Queue the job and return it; None if the queue is full and ``wait`` is False. Raises RequestError.

    If the job has a ``caller`` (option -f), Ctrl-C is blocked from the submission until `_stay` handles it.
    """
    most = spooler.server.most_jobs()
    while True:
        if caller is not None:
            caller.hold_ctrl_c()
        try:
            job = client.submit(spec, spooler.environ, ModelTable(), forgiving=True, most=most)
        except QueueFull as error:
            if not wait:
                print(f"Error, queue full: {error.what}", file=sys.stderr)
                return None
            if caller is not None:
                caller.let_ctrl_c()
            need_own_process()
            time.sleep(ROOM_S)
            if not spooler.server.go_on():
                raise RequestError(ENDED) from None
            continue
        except Refused as error:
            raise RequestError(f"The job can never run: {error.what}") from None
        if spooler.server.was_ended():
            raise RequestError(ENDED)
        return job


def _spec(spooler: Spooler, typed: Typed) -> JobSpec:
    options, environ = typed.options, spooler.environ
    if not typed.command or not typed.command[0]:
        raise RequestError("The command is empty.")
    if "m" in options and "n" in options:
        raise Mistake("For e-mail, you should store the output.")
    mask = os.umask(0)
    os.umask(mask)
    gpus, on = _gpus(options)
    after, after_ok = _ids(options.get("D")), _ids(options.get("W"))
    if "d" in options:
        last = spooler.client.last_id()
        after = (*after, last) if last >= 0 else after
    label = "".join(char for char in options.get("L", "") if char.isprintable())[:MOST_LABEL]
    name = options.get("O", "ts-out")
    if "O" in options:
        from scheduler.core.log_names import check_log_name

        check_log_name(name)
    return JobSpec(
        source="ts",
        arguments=tuple(typed.command),
        cwd=_here(),
        umask=mask,
        limits=limits_here(),
        variables=("PYTHONUNBUFFERED=1",),
        gpus="" if on else gpus,
        on=on,
        allowed=on or None,
        slots=_count(options.get("N", "1"), "-N") if gpus == "0" and not on else 1,
        label=label,
        after=tuple(dict.fromkeys(after)),
        after_ok=tuple(dict.fromkeys(after_ok)),
        output="none" if "n" in options else "log",
        log_dir=spooler.log_folder(),
        log_name=name,
        stderr_apart="E" in options and "n" not in options,
        gzip="z" in options and "n" not in options,
        on_finish=environ.get("TS_ONFINISH", ""),
        mail_to=(environ.get("TS_MAILTO") or user_name()) if "m" in options else "",
        info=output_of_shell(environ["TS_ENV"]) if environ.get("TS_ENV") else "",
    )


def _here() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise RequestError(f"The current folder cannot be used: {error.strerror}.") from None


def _gpus(options: dict[str, str]) -> tuple[str, tuple[int, ...]]:
    """Return the number of GPUs as text (option -G) and the ids of named GPUs (option -g). Raises RequestError.

    If -g is given, the text is empty. Otherwise there are no ids.
    """
    if "g" in options:
        try:
            named = parse_gpu_ids(options["g"])
        except SchedulerError:
            named = None
        if named is None:
            raise RequestError(f"-g takes GPU ids such as 0,3, not {options['g']!r}.")
        return "", named
    count = _count(options.get("G", "0"), "-G", least=0)
    return str(count), ()


def _count(text: str, option: str, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) >= least):
        raise RequestError(f"{option} takes a whole number of at least {least}, not {text!r}.")
    return int(text)


def _ids(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    return tuple(number_of(piece) for piece in text.split(",") if piece.strip())


def _until_noted(client: SchedulerClient) -> None:
    """Wait, at most `READY_S` seconds, until a daemon that was just started has recorded its settings and GPUs."""
    wait_until(lambda: bool(client.remembered("settings")), READY_S)


def _stay(spooler: Spooler, client: SchedulerClient, job: Job, *, unseen: bool) -> int:
    """Wait for the end of a job with -f, pass Ctrl-C on to the job, and return its exit code.

    ``unseen``: -n was given, so the job's id is not printed, and the job is removed from the list at its end.
    """
    from scheduler.client.foreground import Interrupts

    with Interrupts(client, job.id) as interrupts:
        if not unseen:
            _tell(job)
        code = spooler.wait(job.id)
    if unseen or interrupts.cancelled():
        with contextlib.suppress(OSError):
            client.forget([job.id])
    return code
