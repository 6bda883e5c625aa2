"""What happened, as one plain sentence a record, for the main log and the terminal."""

from __future__ import annotations

import logging
import logging.handlers
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import Event, Job

_UNSAFE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Said:
    """One sentence, and the job it is about, for whoever shows it."""

    text: str
    level: int = logging.INFO
    kind: str = ""
    job: int = 0
    name: str = ""
    log: str = ""


Listener = Callable[[Said], None]


def harmless(text: str) -> str:
    """``text`` with control and direction-changing characters made visible, so that it cannot play the terminal."""
    return _UNSAFE.sub(
        lambda found: f"\\x{ord(found.group()):02x}" if ord(found.group()) < 256 else f"\\u{ord(found.group()):04x}",
        text,
    )


def sentence(event: Event, job: Job) -> tuple[str, int]:
    """An event as a sentence, and its log level."""
    name = f"job {job.id} ({harmless(job.spec.shown_name)})"
    detail = event.detail
    gpus = f"GPU {gpu_ids_text(detail['gpus'])}" if detail.get("gpus") else "no GPU"
    attempt = f", attempt {detail['attempt']}" if detail.get("attempt", 1) != 1 else ""
    if event.kind == "started":
        return f"{name} runs on {gpus}, pid {detail['pid']}{attempt}", logging.INFO
    if event.kind == "done":
        return f"{name} done: exit code 0{attempt}", logging.INFO
    if event.kind == "failed":
        hint = f"; hint: {job.failure.hint}" if job.failure else ""
        note = (
            f" ({harmless(job.notes[-1])})"
            if job.notes and detail.get("outcome") in ("could_not_start", "lost")
            else ""
        )
        return f"{name} failed: {ending(detail)}{note}{attempt}{hint}", logging.WARNING
    if event.kind == "cancelled":
        return f"{name} cancelled", logging.INFO
    if event.kind == "skipped":
        return f"{name} skipped: {detail.get('why')}", logging.WARNING
    if event.kind == "fell":
        return (
            f"{name}: {harmless(str(detail.get('why')))}; tried again in {detail.get('wait', 0):.0f} s",
            logging.WARNING,
        )
    if event.kind == "leftovers":
        return f"{name} left processes {detail.get('pids')} behind: {gpus} stays taken until they end", logging.WARNING
    if event.kind == "missing":
        return f"{name} waits: {harmless(str(detail.get('why')))}", logging.WARNING
    if event.kind == "accepted":
        notes = f" ({'; '.join(map(harmless, job.notes))})" if job.notes else ""
        return f"{name} accepted from {detail.get('from')}{notes}", logging.INFO
    if event.kind == "stopping":
        why = "its time limit is over" if detail.get("why") == "time_limit" else "asked to"
        return f"{name} is being ended: {why}", logging.INFO
    if event.kind == "unclaimed":
        return f"{name}: its start was cut off before it began; it waits again", logging.WARNING
    return f"{name}: {event.kind}", logging.INFO


def ending(detail: dict[str, object]) -> str:
    """How an attempt ended, in words."""
    outcome = detail.get("outcome")
    how = (
        f"exit code {detail.get('exit_code')}"
        if detail.get("exit_code") is not None
        else f"signal {detail.get('signal')}"
    )
    if outcome == "time_limit":
        return f"its time limit was over ({how})"
    if outcome == "could_not_start":
        return "it could not be started"
    if outcome == "lost":
        return "lost, its ending is not known"
    return how


def open_log(path: str) -> logging.Logger:
    """The main log: one record a line, 10 MB × 5, private. Raises OSError."""
    logger = logging.getLogger(f"gpujob.{path}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    handler = logging.handlers.RotatingFileHandler(
        path, maxBytes=10 << 20, backupCount=5, encoding="utf-8", errors="backslashreplace"
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    return logger
