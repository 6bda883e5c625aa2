"""Finds the script, environment, interpreter and program of a job. Results are cached for one pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from scheduler.core.job import Job
from scheduler.core.launch import Found
from scheduler.core.observations import Arrived, Now
from scheduler.daemon.context import Context
from scheduler.environments import activate
from scheduler.environments.resolve import Environments, Missing

MISSING_AGAIN_S = 2.0  # between two rounds of looking for missing files
MISSING_A_ROUND = 200  # jobs


class ProgramLookup:
    """Finds the programs of jobs. Looks again for missing files of waiting jobs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        launcher = (sys.executable, "-I", "-S", activate.__file__)
        self._environments = Environments(context.environ, context.config.python, launcher)
        self._environments.on_nodes = context.config.engine != "local"
        self._found: dict[tuple[str, ...], Found | Missing] = {}  # found in this pass
        self._missing_from = 0  # the last job of the previous round
        self._missing_due = 0.0
        self.use_settings()

    @property
    def home(self) -> str:
        """The home folder that `~` in a jobs file stands for."""
        return self._environments.home

    def use_settings(self) -> None:
        """Apply the current settings for environments (`conda_mode`, `activation_limit`)."""
        config = self._context.config
        self._environments.mode, self._environments.limit_s = config.conda_mode, config.activation_limit

    def found_for(self, job: Job) -> Found | Missing:
        """Return the script, environment and interpreter that a job would use, or what is missing."""
        spec = job.spec
        key = (spec.script, spec.conda_env, spec.cwd, spec.env_file, "" if spec.is_script else spec.arguments[0])
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._environments.find(job)
        return found

    def missing(self, job: Job) -> str:
        """Return what a job lacks, as a sentence; empty if it lacks nothing."""
        found = self.found_for(job)
        return found.sentence if isinstance(found, Missing) else ""

    def forget(self) -> None:
        """Clear the cached results at the end of a pass, so that the next pass looks at the disk again."""
        self._found.clear()

    def look_again(self, parked: Mapping[int, str], fetch: Callable[[int], Job | None], now: Now) -> list[Arrived]:
        """Return the jobs that lacked a script, a folder or an environment, and now lack nothing.

        ``parked``: the waiting jobs outside the queue, as job id → reason code. A search looks at ``MISSING_A_ROUND``
        jobs at most. The result is empty until the next search is due, ``MISSING_AGAIN_S`` seconds after the previous
        search.
        """
        self._found.clear()
        if now.mono < self._missing_due:
            return []
        self._missing_due = now.mono + MISSING_AGAIN_S
        missing = sorted(job_id for job_id, code in parked.items() if code == "missing")
        # Only some jobs in each round: ten thousand lines with a wrong folder must not keep a core busy.
        later = [job_id for job_id in missing if job_id > self._missing_from]
        chosen = (later or missing)[:MISSING_A_ROUND]
        self._missing_from = chosen[-1] if chosen else 0
        jobs = [job for job in map(fetch, chosen) if job is not None]
        return [Arrived(job) for job in jobs if not self.missing(job)]

    def due(self, parked: Mapping[int, str]) -> float:
        """Return the monotonic time of the next search for missing files; infinite if no job lacks a file."""
        return self._missing_due if "missing" in parked.values() else float("inf")


class UserProgramLookup:
    """In place of `ProgramLookup` in a scheduler of several users, which looks at no file of a user.

    The agent of a user looks at the files when a job is about to start, and reports a missing file. `found_again` tells
    that nothing is missing any more.
    """

    def __init__(self) -> None:
        self.home = "/"
        self.parked: Callable[[Mapping[int, str]], None] = lambda parked: None  # told which jobs wait for what
        self._again: set[int] = set()

    def use_settings(self) -> None:
        """Do nothing: the agents get the settings."""

    def found_for(self, job: Job) -> Found:
        """Return the program by the name that the job gives."""
        spec = job.spec
        if not spec.is_script:
            return Found(spec.arguments[0])
        return Found("python") if spec.script.endswith(".py") else Found(spec.script, runs_by_itself=True)

    def missing(self, job: Job) -> str:
        """Return an empty text: only the agent of the user knows whether a file is missing."""
        return ""

    def forget(self) -> None:
        """Do nothing: there is no cache."""

    def found_again(self, job: int) -> None:
        """Note that a waiting job has now the file that it lacked."""
        self._again.add(job)

    def look_again(self, parked: Mapping[int, str], fetch: Callable[[int], Job | None], now: Now) -> list[Arrived]:
        """Return the jobs that lacked a file, and now lack nothing."""
        self.parked(parked)
        again, self._again = sorted(self._again), set()
        jobs = [fetch(job) for job in again if parked.get(job) == "missing"]
        return [Arrived(job) for job in jobs if job is not None]

    def due(self, parked: Mapping[int, str]) -> float:
        """Return when to look again: at once after `found_again`, else never."""
        return 0.0 if self._again else float("inf")
