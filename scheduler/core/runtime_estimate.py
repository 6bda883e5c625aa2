"""Estimates of run times, from the run times of similar jobs, and how far such estimates were off.

Estimates order the queue, reserve GPUs and predict starts; they never end a job.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass

from scheduler.core.gpu import ResourceRequest
from scheduler.core.job import JobSpec
from scheduler.core.model_table import model_in, words_of

MEDIAN_OF = 3  # the last runs of a group of which the median is the estimate
MOST_ERRORS = 200  # the last estimates that are compared with what came true, for each basis
# Errors that are assumed before any estimate came true: a job takes a half to twice as long as expected.
ASSUMED = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 2.0)
LEAST_S = 1.0  # shorter run times count as this long when errors are computed
BASES = {
    "limit": "its time limit",
    "signature": "runs of the same script and model",
    "script": "runs of the same script",
    "class": "runs with the same request",
    "any": "runs of other jobs",
}


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


@dataclass(frozen=True, slots=True)
class RunKind:
    """The facts about a job that its expected run time depends on.

    ``groups``: the groups of similar jobs that it belongs to, the most similar first, each with a name of `BASES`.
    """

    groups: tuple[tuple[str, ...], ...]
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """An expected run time: seconds, what it is based on (a name of `BASES`), and the number of runs."""

    seconds: float
    basis: str
    runs: int = 0

    @property
    def source(self) -> str:
        """The source in words: "median of 3 runs of the same script", or "its time limit"."""
        if self.basis == "limit":
            return BASES["limit"]
        runs = BASES[self.basis]
        return f"median of {self.runs} {runs}" if self.runs > 1 else f"one run{runs.removeprefix('runs')}"


class Errors:
    """The last errors of estimates. An error is the factor by which a job ran longer than expected."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=MOST_ERRORS)
        self._sorted = sorted(ASSUMED)
        self._assumed = len(ASSUMED)  # entries of ``_sorted`` that are assumed; each known error replaces one

    def add(self, factor: float) -> None:
        """Record an error."""
        if len(self._last) == MOST_ERRORS:
            del self._sorted[bisect_right(self._sorted, self._last[0]) - 1]
        self._last.append(factor)
        if self._assumed:
            self._assumed -= 1
            self._sorted = sorted([*self._last, *ASSUMED[len(ASSUMED) - self._assumed :]])
        else:
            insort(self._sorted, factor)

    def quantile(self, part: float, above: float = 0.0) -> float | None:
        """Return the factor that the part ``part`` (0 to 1) of the known errors above ``above`` does not exceed.

        Return None if no known error is above ``above``.
        """
        first = bisect_right(self._sorted, above)
        left = len(self._sorted) - first
        return self._sorted[first + min(left - 1, int(part * left))] if left else None


class Estimates:
    """The last run times of each group of similar jobs; the median of the last `MEDIAN_OF` is the estimate.

    There are four kinds of groups: jobs with equal script, model and mode; jobs with equal script; jobs with equal need;
    all jobs. The first of these groups that has a run time gives the estimate. The last kind is used only where any
    estimate is better than none (`expected`).
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[str, ...], deque[float]] = {}
        self._errors: dict[str, Errors] = {}
        self._learns = True

    def kind_of(self, spec: JobSpec, need: ResourceRequest) -> RunKind:
        """Return the facts about a job that its expected run time depends on."""
        words = tuple(words_of(spec))
        # A command such as `python train.py`: the script says more than the interpreter.
        script = spec.script or next((word for word in words if word.endswith((".py", ".sh"))), " ".join(words[:1]))
        signature = ("signature", script, model_in(words) or "", mode_of(words) or "")
        return RunKind((signature, ("script", script), ("class", str(need)), ("any",)), spec.time_limit_s)

    def learn(self, spec: JobSpec, need: ResourceRequest, seconds: float) -> None:
        """Record that a job with this spec and need ran for ``seconds``, and how far its estimate was off."""
        if not self._learns:
            return
        kind = self.kind_of(spec, need)
        seconds = max(0.0, seconds)  # the clock may have been set back while it ran
        before = self.expected(spec, need)
        if before is not None:
            factor = max(LEAST_S, seconds) / max(LEAST_S, before.seconds)
            self._errors.setdefault(before.basis, Errors()).add(factor)
        for group in kind.groups:
            runs = self._runs.get(group)
            if runs is None:
                runs = self._runs[group] = deque(maxlen=MEDIAN_OF)
            runs.append(seconds)

    def of(self, spec: JobSpec, need: ResourceRequest) -> float | None:
        """Return the expected run time in seconds; None if it is unknown.

        This is the job's time limit. For a job without a time limit it is the median of similar jobs.
        """
        expected = self.expected(spec, need)
        return None if expected is None or expected.basis == "any" else expected.seconds

    def expected(self, spec: JobSpec, need: ResourceRequest) -> Expected | None:
        """Return the expected run time with its basis; None if nothing has run yet and there is no time limit."""
        return self.expected_of(self.kind_of(spec, need))

    def expected_of(self, kind: RunKind) -> Expected | None:
        """Return the expected run time of jobs of a kind, as `expected` does."""
        if kind.limit_s is not None:
            return Expected(kind.limit_s, "limit")
        for group in kind.groups:
            runs = self._runs.get(group)
            if runs:
                return Expected(statistics.median(runs), group[0], len(runs))
        return None

    def run_s(self, expected: Expected, part: float, ran_s: float = 0.0) -> float:
        """Return the run time in seconds that a job does not exceed with the probability ``part`` (0 to 1).

        ``ran_s``: how long it has run already. The errors of earlier estimates of the same basis tell how far this one may
        be off. For a job that outlives all of them, the chance to outlive t more seconds is ran / (ran + t), as if nothing else were known
        (Gott, "Implications of the Copernican principle for our future prospects", 1993): half of such jobs take twice as long as they have run.
        """
        usual = max(LEAST_S, expected.seconds)
        errors = self._errors.get(expected.basis) or Errors()
        factor = errors.quantile(part, ran_s / usual)
        if expected.basis == "limit":
            return max(ran_s, min(usual, usual * (factor or 1.0)))  # it ends at its limit at the latest
        return ran_s / (1.0 - part) if factor is None else usual * factor

    def frozen(self) -> Estimates:
        """Return these estimates for a simulation: `learn` does nothing."""
        made = type(self).__new__(type(self))
        vars(made).update(vars(self), _learns=False)
        return made


def sure_part(jobs: int, together: float) -> float:
    """Return the probability for each of several jobs, so that all of them end in time with probability ``together``."""
    return math.pow(together, 1.0 / max(1, jobs))
