"""Facts about an attempt that are compared with those of the last good run of the same script (`core/run_differences.py`).

A good run ended with exit code 0. Values of variables are never kept: only a short salted hash of each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Code:
    """The script of a run, as it was at the start. ``commit``: of the git repository that has its folder; empty: none."""

    path: str
    size: int = 0  # bytes
    digest: str = ""  # of its first MiB; empty: it could not be read
    commit: str = ""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about an attempt that are known when it starts, and would be lost later.

    ``environment``, ``packages``: ids of sets in the store (`store/good_runs.py`): variable → hash of its value, and Python
    package → version. Empty: not known. ``variables``: the job's own variables, as (name, hash).
    """

    environment: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    packages: str = ""
    code: Code | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it is compared. ``words``: its arguments; ``gpus``: the name of each of its GPUs; ``driver``: of the GPUs.

    ``need``: its request for GPUs, in words; ``interpreter``: with its version, if known.
    """

    words: tuple[str, ...] = ()
    conda_env: str = ""
    interpreter: str = ""
    folder: str = ""
    need: str = ""
    gpus: tuple[str, ...] = ()
    driver: str = ""
    facts: RunFacts = RunFacts()


@dataclass(frozen=True, slots=True)
class GoodRun:
    """The last good run of a script. ``at``: its end, seconds since 1970."""

    job: int
    at: float
    run: Run
