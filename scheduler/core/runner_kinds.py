"""The kinds of runners and what each can do. Code outside a runner asks for a capability, never for a name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunnerKind:
    """The capabilities of a kind of runner.

    ``terminal``: each job has a terminal of its own, which is one stream, so stdout and stderr are one log and no log is
    packed. ``owns_gpus``: gpujob chooses the GPUs, and the jobs are processes of this machine; otherwise an engine such
    as Slurm chooses GPUs and machine. ``in_words``: how `status` describes the jobs of this runner; empty: not at all.
    """

    terminal: bool = False
    owns_gpus: bool = True
    in_words: str = ""

    @property
    def packs_logs(self) -> bool:
        """True if the log of a job can be compressed while the job writes it."""
        return self.owns_gpus and not self.terminal


# Name, as stored with each attempt → kind. The names of the engines are also the values of the setting `engine`.
RUNNERS = {
    "direct": RunnerKind(),
    "screen": RunnerKind(terminal=True, in_words="jobs in screen sessions"),
    "slurm": RunnerKind(owns_gpus=False, in_words="jobs on Slurm"),
    "ray": RunnerKind(owns_gpus=False, in_words="jobs on Ray"),
}


ENGINES = {name: kind for name, kind in RUNNERS.items() if not kind.owns_gpus}


def kind_of(runner: str) -> RunnerKind:
    """Return the kind of the runner with this name. A name that is not known has the capabilities of ``direct``."""
    return RUNNERS.get(runner, RUNNERS["direct"])
