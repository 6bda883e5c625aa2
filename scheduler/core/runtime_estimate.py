"""Estimates of run times, from the run times of similar jobs. Estimates only order the queue; they never end a job."""

from __future__ import annotations

import statistics
from collections import deque

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import JobSpec
from scheduler.core.model_table import model_in, words_of


def mode_of(arguments: tuple[str, ...]) -> str | None:
    """Return the value of the last ``--mode X`` or ``--mode=X`` before a bare ``--``, else None."""
    found = None
    words = iter(arguments)
    for word in words:
        if word == "--":
            break
        if word == "--mode":
            found = next(words, found)
        elif word.startswith("--mode="):
            found = word[7:]
    return found


class Estimates:
    """The last 3 run times of each group of similar jobs; the median of a group is the estimate.

    There are three kinds of groups: jobs with equal script, model and mode; jobs with equal script; jobs with equal
    need. The first of these groups that has a run time gives the estimate.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[str, ...], deque[float]] = {}

    @staticmethod
    def _keys(spec: JobSpec, need: ResourceRequest) -> tuple[tuple[str, ...], ...]:
        words = tuple(words_of(spec))
        # A command such as `python train.py`: the script says more than the interpreter.
        script = spec.script or next((word for word in words if word.endswith((".py", ".sh"))), " ".join(words[:1]))
        signature = ("signature", script, model_in(words) or "", mode_of(words) or "")
        return signature, ("script", script), ("class", str(need))

    def learn(self, spec: JobSpec, need: ResourceRequest, seconds: float) -> None:
        """Record that a job with this spec and need ran for ``seconds``."""
        for key in self._keys(spec, need):
            runs = self._runs.get(key)
            if runs is None:
                runs = self._runs[key] = deque(maxlen=3)
            runs.append(max(0.0, seconds))  # the clock may have been set back while it ran

    def of(self, spec: JobSpec, need: ResourceRequest) -> float | None:
        """Return the expected run time in seconds; None if it is unknown.

        This is the job's time limit. For a job without a time limit it is the median of similar jobs.
        """
        if spec.time_limit_s is not None:
            return spec.time_limit_s
        for key in self._keys(spec, need):
            runs = self._runs.get(key)
            if runs:
                return statistics.median(runs)
        return None
