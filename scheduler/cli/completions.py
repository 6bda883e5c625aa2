"""Shell completion: the words offered after TAB, read from the store of the scheduler.

A completion never shows an error and never starts a scheduler.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import typer

from scheduler.client.client import SchedulerClient
from scheduler.client.locate import client_of, state_file_for
from scheduler.core.errors import SchedulerError
from scheduler.core.gpu import gpu_ids_text
from scheduler.core.job import ENDED, Job, JobState
from scheduler.core.job_options import LINE_KEYS
from scheduler.core.launch import CONDA_MODES, CUDA_MODES, LAUNCHERS
from scheduler.core.model_table import ModelTable, table_from
from scheduler.core.secrets import without_secrets
from scheduler.core.topology import LINK_WORDS

MOST = 50
CHOICES: dict[str, Sequence[str]] = {
    "cuda_ids": CUDA_MODES,
    "conda_mode": CONDA_MODES,
    "order": ("fifo", "short"),
    "watch": ("auto", "inotify", "poll"),
    "hold_on_errors": ("true", "false"),
    "on_trespass": ("flag", "kill"),
    "history": ("true", "false"),
    "trust_group": ("true", "false"),
}
# The shells' completion scripts evaluate the words they get (zsh twice): words with other characters are not offered.
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-+,/%@")

Found = Iterator[tuple[str, str]]
Completion = Callable[[typer.Context, str], list[tuple[str, str]]]


def _quietly(find: Callable[[SchedulerClient, str], Iterable[tuple[str, str]]]) -> Completion:
    """Return a completion. It offers the words that ``find`` yields for the scheduler named on the command line.

    The completion offers nothing if ``find`` fails. It leaves out words that contain characters outside `_PLAIN`.
    """

    def complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        said = [context.params for context in (ctx, ctx.find_root())]
        state_file, config = (
            next((os.path.expandvars(str(values[name])) for values in said if values.get(name)), None)
            for name in ("state_file", "config")
        )
        try:
            found = list(find(client_of(state_file_for(state_file, config)), incomplete))
        except (SchedulerError, OSError, ValueError):
            return []
        return [(word, _help(text)) for word, text in found if word.startswith(incomplete) and _PLAIN.issuperset(word)]

    return complete


def _help(text: str) -> str:
    return "".join(char if char in _PLAIN or char.isalnum() else " " for char in text)[:60].strip()


def _words(*words: str) -> Completion:
    def complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        return [(word, "") for word in words if word.startswith(incomplete)]

    return complete


# -- jobs -------------------------------------------------------------------------------------------------


def _summary(job: Job) -> str:
    return f"{job.state.value} {job.spec.shown_words()}"


def _jobs(states: Iterable[JobState]) -> Completion:
    states = frozenset(states)

    def find(client: SchedulerClient, incomplete: str) -> Found:
        jobs, labels = client.newest(states, incomplete, MOST)
        for job in jobs:
            yield str(job.id), _summary(job)
        for label, ids in labels.items():
            if label == without_secrets(label):
                yield label, f"job {gpu_ids_text(ids)}"

    return _quietly(find)


def _list_of(complete: Completion) -> Completion:
    """Return a completion for comma-separated lists. It completes the last item, and offers no item twice."""

    def whole(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        before, comma, last = incomplete.rpartition(",")
        there = before.split(",")
        return [(f"{before}{comma}{word}", text) for word, text in complete(ctx, last) if word not in there]

    return whole


@_quietly
def _ids(client: SchedulerClient, incomplete: str) -> Found:
    return ((str(job.id), _summary(job)) for job in client.newest(JobState, incomplete, MOST)[0])


any_job = _jobs(JobState)
live_job = _jobs(set(JobState) - ENDED)
pending_job = _jobs([JobState.PENDING])
ended_job = _jobs(ENDED)
held_job = _quietly(
    lambda client, incomplete: (
        (str(job.id), _summary(job)) for job in client.newest([JobState.PENDING], incomplete, 1000)[0] if job.held
    )
)
session_job = _quietly(lambda client, incomplete: ((str(job.id), _summary(job)) for job in client.sessions()))
job_list = _list_of(_ids)
state_list = _list_of(_words(*(state.value for state in JobState)))


# -- GPUs, environments, choices --------------------------------------------------------------------------


@_quietly
def _gpus(client: SchedulerClient, incomplete: str) -> Found:
    managed, paused = client.pauses()
    return ((str(gpu), "paused" if gpu in paused else "") for gpu in managed)


gpu_list = _list_of(_gpus)
paused_gpu = _quietly(lambda client, incomplete: ((str(gpu), "paused") for gpu in client.pauses()[1]))


@_quietly
def unpaused_gpu(client: SchedulerClient, incomplete: str) -> Found:
    """Offer the managed GPUs that are not paused."""
    managed, paused = client.pauses()
    return ((str(gpu), "") for gpu in managed if gpu not in paused)


@_quietly
def model(client: SchedulerClient, incomplete: str) -> Found:
    """Complete the name of a model that is in the model table or has run."""
    noted = client.remembered("model_table")
    table = table_from(json.loads(noted), "") if noted else ModelTable()
    names = (one.model for one in client.needs(table) if one.model == without_secrets(one.model))
    return ((name, "") for name in names if name.startswith(incomplete))


@_quietly
def need(client: SchedulerClient, incomplete: str) -> Found:
    """Offer common values for a job's GPU need: 0, 0.25, 0.5, and 1 up to the number of managed GPUs."""
    whole = len(client.pauses()[0]) or 1
    return ((word, "") for word in ("0", "0.25", "0.5", *map(str, range(1, whole + 1))))


def environment(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Offer the names of conda environments, found without running conda. Folders are completed by the shell."""
    from scheduler.environments.discovery import Prefixes, Remembered

    names = Prefixes(os.environ, Remembered()).names(os.environ)
    return [(name, "") for name in names if name.startswith(incomplete) and _PLAIN.issuperset(name)]


def setting(name: str) -> Completion | None:
    """Return the completion for the values of a setting; None: the shell completes file names."""
    if name == "gpu_ids":
        return gpu_list
    return _words(*CHOICES[name]) if name in CHOICES else None


cuda_mode = setting("cuda_ids")
launcher = _words(*LAUNCHERS)
link = _words(*LINK_WORDS)
line_key = _words(*(f"{key}=" for key in LINE_KEYS))
queue_word = _words("pause", "resume")


def verbs(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Offer all verbs with their short help texts, for `gpujob help`."""
    root = ctx.find_root()
    known = root.command.commands  # type: ignore[attr-defined]
    return [(name, known[name].get_short_help_str()) for name in known if name.startswith(incomplete)]
