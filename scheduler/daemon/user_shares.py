"""Fair shares and limits of the users of one queue: settings, groups, and past use after a start (`core/users.py`)."""

from __future__ import annotations

import json
import sqlite3

from scheduler.core.config import Config
from scheduler.core.observations import Now
from scheduler.core.scheduler_state import SchedulerState
from scheduler.core.users import HALF_LIVES, Users
from scheduler.daemon.context import Context
from scheduler.intake.machine_settings import MachineFile, MachineSettings
from scheduler.store import jobs as rows

LOOK_S = 5.0  # between two looks at the configuration
PAUSED = "paused_users"  # key in `meta`: users who have paused all their jobs
GROUPS = "user_groups"  # key in `meta`: the groups of each user who has submitted a job


class UserShares:
    """Keeps the users of a state up to date. `attach` is called in each pass."""

    def __init__(self, context: Context) -> None:
        self._context, self._machine = context, MachineFile(context.environ)
        self._users: Users | None = None
        self._look_due = 0.0
        self._groups = ""
        self._problem = ""

    def attach(self, state: SchedulerState, connection: sqlite3.Connection, now: Now) -> None:
        """Give the state its users, with the present settings. Raises sqlite3.Error."""
        if self._users is None:
            self._users = Users()
            self._read_settings(self._users)
            runs = rows.runs_by_user(connection, now.wall - HALF_LIVES * self._users.half_life_s)
            self._users.add_past(runs, now.wall)
            self._users.paused = set(json.loads(rows.meta(connection, PAUSED) or "[]"))
        users = self._users
        if now.mono >= self._look_due:
            self._look_due = now.mono + LOOK_S
            self._read_settings(users)
        groups = rows.meta(connection, GROUPS)  # in each pass: the first jobs of a user have the limits of its groups
        if groups != self._groups:
            self._groups, users.limits.groups = groups, json.loads(groups)
        state.users = users

    def save_paused(self, connection: sqlite3.Connection) -> None:
        """Store which users have paused their jobs. Raises sqlite3.Error."""
        if self._users is not None:
            rows.set_meta(connection, PAUSED, json.dumps(sorted(self._users.paused)))

    def is_full(self, user: str, more: int) -> bool:
        """Return whether a limit forbids further waiting jobs of a user who has ``more`` that are not recorded yet.

        Raises sqlite3.Error.
        """
        if self._users is None or not self._users.limits.by_name:
            return False
        waiting = rows.waiting_by_user(self._context.db.connection)
        return bool(self._users.limits.over_waiting(user, {**waiting, user: waiting.get(user, 0) + more}))

    def _read_settings(self, users: Users) -> None:
        machine = self._machine.settings()
        if (
            machine.problem and self._look_due
        ):  # at the start, a mistake ends the scheduler; later the old settings stay
            if machine.problem != self._problem:
                self._context.say(machine.problem, 30, kind="config")
            self._problem = machine.problem
            return
        self._problem = ""
        apply(users, machine, self._context.config)


def users_of(connection: sqlite3.Connection, machine: MachineSettings, config: Config, wall: float) -> Users:
    """Return the users as a scheduler has them after a start: settings, groups, pauses, and past use. Raises sqlite3.Error.

    ``wall``: now, in seconds since 1970.
    """
    users = Users()
    apply(users, machine, config)
    users.add_past(rows.runs_by_user(connection, wall - HALF_LIVES * users.half_life_s), wall)
    users.paused = set(json.loads(rows.meta(connection, PAUSED) or "[]"))
    users.limits.groups = json.loads(rows.meta(connection, GROUPS) or "{}")
    return users


def apply(users: Users, machine: MachineSettings, config: Config) -> None:
    """Apply the configuration to the users."""
    users.half_life_s = machine.fair_half_life or config.fair_half_life
    users.weights, users.limits.by_name, users.across = machine.weights, machine.limits, machine.priorities_across_users
