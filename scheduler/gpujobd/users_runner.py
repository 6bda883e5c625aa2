"""The runner of the scheduler of all users: passes each attempt to the agent of its user.

See `core/protocols.py: Runner`. The agents run the attempts with the runners of a scheduler of one user, so this file
only keeps track of who has which attempt. An agent that ends is started again (`agents.py`) while its user has attempts
in hand, and adopts them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from scheduler.core.config import Config
from scheduler.core.job import Job, Process
from scheduler.core.launch import Launch
from scheduler.core.observations import Ended, Gone, Lost, Missing, NeverRan, Observation, Started, Unclaimed
from scheduler.daemon.completion_hooks import no_warning
from scheduler.daemon.parts import NEVER
from scheduler.environments.resolve import stored_environment
from scheduler.gpujobd.agent_messages import attempt_of, observation_of, of_user
from scheduler.gpujobd.agents import Agents
from scheduler.gpujobd.cgroups import JobCgroups
from scheduler.gpujobd.in_hand import InHand, Leftovers, Reported, UserState, begun, checked_end
from scheduler.gpujobd.launcher_link import LauncherLink
from scheduler.gpujobd.user_files import RemoteFollower
from scheduler.system.processes import lives, members
from scheduler.system.typed_json import plain, typed

IDLE_AGENT_S = 60.0  # an agent without attempts ends after this time
FOUND_S = 2.0  # from a report of a missing file to the next start, at least
MOST_UNCLAIMED = 3  # attempts in a row that an agent does not start; then the start counts as failed
MOST_UNANSWERED = 5  # agents that do not say what became of an attempt; then the attempt counts as lost …
UNANSWERED_S = 30.0  # … unless this time has not passed since the first of them got it
REFUSED_S = 30.0  # a user who gets no agent for this time is gone, and not only unknown for a moment
SETTLED_S = 10.0  # after this time, the scheduler has recorded what an agent said
LOST_DELAY_S = 5.0  # between two looks at the processes of a user who has no agent
HARD_S = 10.0  # after this time, the launcher also kills a process that the agent was to kill
START_S = 60.0  # besides the limit of an activation: an agent that has not started a job by then is replaced


class UsersRunner:
    """The runner. ``config``: returns the settings; ``mark``: in GPUJOB_STATE_FILE of all jobs: the path of the socket.

    ``found_again``: called with a waiting job that has now the file that it lacked; ``end``: called if the launcher ends;
    ``changed``: called with the key of a jobs file of which an agent has sent lines; ``owner``: job → id of its user.
    """

    def __init__(
        self,
        link: LauncherLink,
        config: Callable[[], Config],
        mark: str,
        found_again: Callable[[int], None],
        end: Callable[[], None],
        changed: Callable[[str], None],
        owner: Callable[[int], int | None],
        cgroups: JobCgroups | None = None,
    ) -> None:
        self.name = "screen" if config().screen else "direct"
        self.warn: Callable[[Job, str], None] = no_warning
        self._end, self._changed, self._owner, self._cgroups = end, changed, owner, cgroups
        self._config, self._mark, self._found_again = config, mark, found_again
        self._agents = Agents(link, self)
        self._users: dict[int, UserState] = {}
        self._facts: list[Observation] = []
        self._sent_config: Config | None = None

    # -- starting and adopting ----------------------------------------------------------------------------

    def start(self, job: Job, launch: Launch) -> None:
        """Pass an attempt to the agent of its user."""
        self._take(job, dict(launch.ordinals))

    def adopt(self, job: Job) -> list[Observation]:
        """Have the agent of the user find out what became of an attempt. `look` returns the observations later.

        If the attempt is in hand already, return its start: after a store outage, it may not be recorded.
        """
        self._take(job, None)
        if self._cgroups is not None and job.process is not None:
            self._cgroups.enter(job, job.process)  # its limits, which a stop of the service has lifted
        user = self._users.get(-1 if job.spec.uid is None else job.spec.uid)
        hand = user.hands.get(job.attempt_key) if user is not None else None
        return [hand.started] if hand is not None and hand.started is not None and job.process is None else []

    def _take(self, job: Job, ordinals: dict[int, int | str] | None) -> None:
        if job.spec.uid is None:
            self._facts.append(NeverRan(job.id, job.attempt, "it belongs to no user", True, time.time()))
            return
        user = self._users.setdefault(job.spec.uid, UserState(job.spec.uid))
        if job.attempt_key not in user.hands:
            user.hands[job.attempt_key] = InHand(replace(job), ordinals, begun=job.started_at or 0.0)
            user.missing.pop(job.id, None)
        self._pass_on(user)

    def flush(self) -> None:
        """Do nothing: each attempt is passed on at once."""

    def stop(self, jobs: Iterable[tuple[Job, bool]]) -> None:
        """Have the agents send signals to all processes of the attempts."""
        for job, hard in jobs:
            if hard and self._cgroups is not None:
                self._cgroups.kill(job.attempt_key)  # also what has left the session and the environment of the job
            if job.spec.uid is not None:
                user = self._users.setdefault(job.spec.uid, UserState(job.spec.uid))
                user.stops.append((replace(job), hard))
                hand = user.hands.get(job.attempt_key)
                if hand is not None:
                    hand.stop = hard
                    hand.hard_due = min(hand.hard_due, time.monotonic() + HARD_S) if hard else hand.hard_due
                left = user.leftovers.get(job.attempt_key)
                if left is not None and hard:
                    left.hard_due = min(left.hard_due, time.monotonic() + HARD_S)
                self._pass_on(user)

    def watch_leftovers(self, key: str, job: int, attempt: int, processes: Sequence[Process]) -> None:
        """Have the agent watch leftover processes of an attempt."""
        user = next((one for one in self._users.values() if key in one.hands or key in one.leftovers), None)
        if user is None:
            uid = self._owner(job)
            if uid is None:
                self._facts.append(Gone(key))
                return
            user = self._users.setdefault(uid, UserState(uid))
        user.leftovers[key] = Leftovers(job, attempt, tuple(processes))
        if user.ready:
            self._agents.send(user, _leftovers(key, user.leftovers[key]))
        else:
            self._pass_on(user)

    def _pass_on(self, user: UserState) -> None:
        """Send what the agent of a user does not know yet; ask for an agent if there is none."""
        if user.channel is None:
            self._agents.ask(user)
            return
        if not user.ready:
            return
        to_send = [hand for hand in user.hands.values() if not hand.sent]
        for hand in to_send:  # before the first is sent: an agent that has gone counts for all of them
            hand.sent, hand.sent_at = True, time.monotonic()
            hand.first_sent_at = hand.first_sent_at or hand.sent_at
        for hand in to_send:
            if user.channel is None:
                return
            if hand.ordinals is None:
                self._agents.send(user, {"do": "adopt", "job": plain(hand.job)})
                continue
            env_file = hand.job.spec.env_file
            environment = stored_environment(env_file) if env_file else None
            if env_file and environment is None:
                job, why = hand.job, "its environment cannot be read"
                del user.hands[job.attempt_key]
                self._facts.append(NeverRan(job.id, job.attempt, why, False, time.time()))
                continue
            hand.job.spec = replace(hand.job.spec, env_file="")
            ordinals, hand.ordinals = hand.ordinals, None  # the next agent adopts it, and does not start it again
            self._agents.send(
                user, {"do": "start", "job": plain(hand.job), "environment": environment, "ordinals": plain(ordinals)}
            )
        while user.actions and user.channel is not None:
            job, what = user.actions.pop(0)
            env_file, job.spec = job.spec.env_file, replace(job.spec, env_file="")
            environment = stored_environment(env_file) if env_file else None
            if env_file and environment is None:
                self.warn(job, f"{what} was not run: its environment cannot be read")
                continue
            user.acting[job.id, what] = job
            self._agents.send(user, {"do": "act", "job": plain(job), "what": what, "environment": environment})
        if user.stops and user.channel is not None:
            stops, user.stops = user.stops, []
            self._agents.send(user, {"do": "stop", "jobs": [[plain(job), hard] for job, hard in stops]})

    # -- agents -------------------------------------------------------------------------------------------

    def _agent_is_ready(self, user: UserState) -> None:
        """Send the agent all that it has to do. It has begun its work, so it may have carried out what it was sent."""
        user.ready, user.refusal, user.cannot = True, "", ""
        for hand in user.hands.values():
            hand.sent = False
            if hand.stop is not None and not any(job.id == hand.job.id for job, _ in user.stops):
                user.stops.append((hand.job, hand.stop))  # the agent before may not have carried it out
        self._pass_on(user)
        for key, left in user.leftovers.items():
            self._agents.send(user, _leftovers(key, left))
        for file in user.files.values():
            self._agents.send(user, file.begin())

    def settings(self) -> dict[str, Any]:
        """Return the message with which each agent begins."""
        config = replace(self._config(), state_file=self._mark, screen=self.name == "screen")
        return {"do": "settings", "config": plain(config), "cgroups": self._cgroups is not None}

    def activation_limit_s(self) -> float:
        """Return how long an agent may be silent while it activates an environment."""
        return self._config().activation_limit

    def refused(self, user: UserState, why: str) -> None:
        """Note why a user has no agent."""
        user.refused_since = user.refused_since if user.refusal else time.monotonic()
        user.refusal = why
        self._without_agent(user)

    def _without_agent(self, user: UserState) -> None:
        """Settle what can be settled for a user who gets no agent, for example because the user was deleted."""
        user.look_due = time.monotonic() + LOST_DELAY_S
        now = time.time()
        for job, hard in user.stops:
            if job.process is not None:
                self._agents.signal(user, job.process, signal.SIGKILL if hard else signal.SIGTERM)
            if hard and job.attempt_key in user.leftovers:
                user.leftovers[job.attempt_key].hard_due = time.monotonic()
        user.stops.clear()
        if time.monotonic() - user.refused_since < REFUSED_S:
            return
        for job, what in user.actions:
            self.warn(job, f"{what} was not run: {user.refusal}")
        user.actions.clear()
        why = f"no agent can run for user {user.uid}: {user.refusal}"
        for key, hand in list(user.hands.items()):
            job = hand.job
            if hand.ordinals is not None:
                self._facts.append(NeverRan(job.id, job.attempt, why, False, now))
            elif job.process is None or not lives(job.process):
                others = members(job.process.pid, user.uid) if job.process is not None else ()
                lost = Lost(job.id, job.attempt, f"it ended, and {why}", now, leftovers=others)
                self._facts.append(self._with_cgroup(key, lost))
            else:
                continue
            del user.hands[key]
        for key, left in list(user.leftovers.items()):
            self._kill_leftovers(user, key, left, time.monotonic())
            of_cgroup = self._cgroups.processes(key) if self._cgroups is not None else ()
            if not of_cgroup and not any(map(_may_live, left.processes)) and key in user.leftovers:
                del user.leftovers[key]
                self._facts.append(Gone(key))
        self._look_again(user)

    def _look_again(self, user: UserState) -> None:
        """Try the start of the jobs that lack a file again: there is no agent that looks for it."""
        for number in (*user.missing, *user.appeared):
            self._found_again(number)
        user.missing.clear()
        user.appeared.clear()

    def dropped(self, user: UserState, began: bool) -> None:
        """Note what the next agent of a user has to be told, and ask for it. ``began``: whether the last one began its work."""
        for (_, what), job in user.acting.items():
            self.warn(job, f"the agent of the user was killed at the end of the job: it is unknown whether {what} ran")
        user.acting.clear()
        user.warned.clear()
        if began:
            self._count_unanswered(user)
        else:
            self.refused(user, "it ends, or hangs, before it begins its work; see journalctl -u gpujobd")
        for number, since in user.missing.items():  # the next agent does not know them
            user.appeared[number] = since + FOUND_S
        user.missing.clear()
        if user.busy:
            self._agents.ask(user)

    # -- looking ------------------------------------------------------------------------------------------

    def look(self) -> list[Observation]:
        """Return all observations since the last call."""
        self._agents.look()
        self._use_settings()
        now = time.monotonic()
        if self._cgroups is not None:
            self._cgroups.step(now)
        for user in list(self._users.values()):
            self._look_at(user, now)
        found, self._facts = self._facts, []
        return found

    def launcher_ended(self) -> None:
        """End the scheduler: without the launcher, no agent starts."""
        self._end()

    def _use_settings(self) -> None:
        config = self._config()
        if config is not self._sent_config:
            self._sent_config = config
            self._agents.send_settings()

    def _look_at(self, user: UserState, now: float) -> None:
        if user.channel is None:
            if user.busy:
                if user.refusal and now >= user.look_due:
                    self._without_agent(user)
                self._agents.ask(user)
            elif not user.asked:
                del self._users[user.uid]
            return
        if user.busy:
            if user.idle_since is not None:  # it had nothing to say until now
                user.idle_since, user.heard = None, now
            if now >= user.due:
                user.wait.reset()
            self._agents.check_alive(user, now)
            self._check_hands(user, now)
            for number in [number for number, due in user.appeared.items() if now >= due]:
                del user.appeared[number]
                self._found_again(number)
        elif user.idle_since is None:
            user.idle_since = now
        elif now - user.idle_since >= IDLE_AGENT_S:
            self._agents.drop(user)

    def _check_hands(self, user: UserState, now: float) -> None:
        """Have the launcher kill what the agent has not killed; end an agent that does not say what became of an attempt."""
        for hand in list(user.hands.values()):
            late = now >= self._start_due(hand)
            if hand.job.process is not None and now >= hand.hard_due:
                hand.hard_due = now + HARD_S
                late = not lives(hand.job.process)
                self._agents.signal(user, hand.job.process, signal.SIGKILL)
            if late:
                self._agents.drop(user)
                return
        if any(self._kill_leftovers(user, key, left, now) for key, left in list(user.leftovers.items())):
            self._agents.drop(user)

    def _kill_leftovers(self, user: UserState, key: str, left: Leftovers, now: float) -> bool:
        """Have the launcher kill leftover processes that the agent has not killed. Return whether the agent is to be replaced.

        If several agents do not report that they are gone, the scheduler believes what it sees itself.
        """
        if now < left.hard_due:
            return False
        left.hard_due = now + HARD_S
        alive = [process for process in left.processes if _may_live(process)]
        for process in alive:
            self._agents.signal(user, process, signal.SIGKILL)
        begins = user.channel is not None and not user.ready
        if alive or begins or (self._cgroups is not None and self._cgroups.processes(key)):
            return False
        left.unanswered += 1
        if left.unanswered >= MOST_UNANSWERED:
            del user.leftovers[key]
            self._facts.append(Gone(key))
        return user.channel is not None

    def _count_unanswered(self, user: UserState) -> None:
        """Note that an agent has ended without saying what became of the attempts that have no live process."""
        for key, hand in list(user.hands.items()):
            sent, hand.sent = hand.sent, False
            if not sent or (hand.job.process is not None and _may_live(hand.job.process)):
                continue
            hand.unanswered += 1
            if hand.unanswered >= MOST_UNANSWERED and time.monotonic() >= hand.first_sent_at + UNANSWERED_S:
                del user.hands[key]
                why = f"{hand.unanswered} agents of the user have not said what became of it"
                end: Reported = Lost(hand.job.id, hand.job.attempt, why, time.time())
                if hand.ordinals is not None:  # no agent has read it
                    end = NeverRan(hand.job.id, hand.job.attempt, why, False, time.time())
                self._facts.append(self._with_cgroup(key, end))

    def _start_due(self, hand: InHand) -> float:
        """Return when the agent must have said what became of an attempt (monotonic seconds)."""
        late = hand.sent and hand.job.process is None
        return hand.sent_at + START_S + self.activation_limit_s() if late else NEVER

    def hear(self, user: UserState, message: Any) -> None:
        """Handle a message of an agent. Raises ValueError, RecursionError if it is not valid, OSError if /proc cannot be read."""
        about = attempt_of(message)
        if about is not None and about not in user.hands:
            return  # it is settled already, or another user's
        observation = observation_of(message, user.uid, time.time())
        if observation is None:
            self._hear_of_agent(user, message)
        elif isinstance(observation, Gone):
            self._hear_of_leftovers(user, observation)
        else:
            assert isinstance(observation, (Started, Ended, NeverRan, Unclaimed, Lost, Missing))
            hand = user.hands.get(f"{observation.job}.{observation.attempt}")
            if hand is not None:
                self._hear_of_attempt(user, hand, observation)

    def _hear_of_agent(self, user: UserState, message: Any) -> None:
        """Handle a message about the agent itself, a jobs file, a missing file or an action."""
        kind = message.get("say")
        if kind == "file":
            file = user.files.get(str(message.get("path")))
            if file is not None:
                file.hear(message)
                self._changed(file.path)
        elif kind == "trouble":
            user.trouble = str(message.get("text"))[:500]
        elif kind == "cannot":
            user.cannot = str(message.get("text"))[:500]
        elif kind == "ready" and not user.ready:
            self._agent_is_ready(user)
        elif kind in ("warning", "acted"):
            self._hear_of_action(user, kind, (typed(message.get("job"), int), str(message.get("what"))), message)
        elif kind == "found" and (since := user.missing.pop(typed(message.get("job"), int), None)) is not None:
            user.appeared[message["job"]] = since + FOUND_S

    def _hear_of_leftovers(self, user: UserState, observation: Gone) -> None:
        """Handle that leftover processes are said to be gone."""
        left = user.leftovers.get(observation.key)
        if left is None:
            return
        if any(map(lives, left.processes)):
            raise ValueError("a process that is said to be gone lives")
        hidden = self._cgroups.processes(observation.key) if self._cgroups is not None else ()
        if hidden:  # they have left the session and the environment of the job, where the agent looks
            left.processes = hidden
            self._agents.send(user, _leftovers(observation.key, left))
            return
        del user.leftovers[observation.key]
        self._facts.append(observation)

    def _hear_of_attempt(self, user: UserState, hand: InHand, observation: Started | Reported) -> None:
        """Handle what an agent says of an attempt in hand, as far as it can be true."""
        key = hand.job.attempt_key
        if isinstance(observation, (NeverRan, Unclaimed, Missing)) and hand.job.process is not None:
            if lives(hand.job.process):
                raise ValueError("an attempt that has begun is said to have never begun")
            why = "it has ended, and the record of the attempt is gone"  # its user can delete the record
            observation = Lost(observation.job, observation.attempt, why, time.time())
        if isinstance(observation, Started):
            started = begun(hand, observation)
            if started is None:
                return
            user.unclaimed.pop(observation.job, None)
            if self._cgroups is not None and started.process is not None:
                problem = self._cgroups.enter(hand.job, started.process)
                if problem:
                    self.warn(hand.job, problem)
            self._facts.append(started)
            return
        if isinstance(observation, Unclaimed):
            user.unclaimed[observation.job] += 1
            if user.unclaimed[observation.job] >= MOST_UNCLAIMED:
                why = f"the agent of the user has not started it {MOST_UNCLAIMED} times"
                observation = NeverRan(observation.job, observation.attempt, why, False, time.time())
        observation = self._with_cgroup(
            key, checked_end(hand, observation)
        )  # before it is settled: /proc may be unreadable
        del user.hands[key]
        if isinstance(observation, Missing):
            user.missing[observation.job] = time.monotonic()
        self._facts.append(observation)

    def _hear_of_action(self, user: UserState, kind: str, which: tuple[int, str], message: dict[str, Any]) -> None:
        job = user.acting.get(which)
        if job is not None and kind == "acted":
            del user.acting[which]
            user.warned.discard(which)
        elif job is not None and which not in user.warned:
            user.warned.add(which)
            self.warn(job, str(message.get("text"))[:500])

    def _with_cgroup(self, key: str, observation: Reported) -> Reported:
        """Return how an attempt ended, with what its cgroup says of it."""
        if self._cgroups is None or not isinstance(observation, (Ended, Lost)):
            return observation
        return self._cgroups.ended(key, observation)

    def forget_others(self, parked: Mapping[int, str]) -> None:
        """Have the agents stop looking for the files of jobs that do not wait for them. ``parked``: job → reason code."""
        now = time.monotonic()
        for user in self._users.values():
            for number in [
                n for n, since in user.missing.items() if now - since > SETTLED_S and parked.get(n) != "missing"
            ]:
                del user.missing[number]
                self._agents.send(user, {"do": "forget", "job": number})

    # -- jobs files (`user_files.FileAgents`) ---------------------------------------------------------------

    def follow_file(self, uid: int, path: str, follower: RemoteFollower) -> None:
        """Have the agent of a user read a file, also each later agent."""
        user = self._users.setdefault(uid, UserState(uid))
        user.files[path] = follower
        if user.ready:
            self._agents.send(user, follower.begin())
        elif user.channel is None:
            self._agents.ask(user)

    def forget_file(self, uid: int, path: str) -> None:
        """Have the agents of a user stop reading a file."""
        if uid in self._users:
            self._users[uid].files.pop(path, None)

    def send_about_file(self, uid: int, message: dict[str, Any]) -> None:
        """Send a message about a file to the agent of a user, if there is one."""
        if uid in self._users and self._users[uid].ready:
            self._agents.send(self._users[uid], message)

    # -- actions at the end of a job (`completion_hooks.Actions`) -------------------------------------------

    def run(self, job: Job, what: str) -> None:
        """Have the agent of the user run an action at the end of a job. ``what``: on_finish or mail."""
        if job.spec.uid is not None and (job.spec.on_finish if what == "on_finish" else job.spec.mail_to):
            user = self._users.setdefault(job.spec.uid, UserState(job.spec.uid))
            user.actions.append((replace(job), what))
            self._pass_on(user)

    def unsure(self) -> set[int]:
        """Return the jobs of which an agent has not yet confirmed all actions."""
        waiting = [job.id for user in self._users.values() for job, _ in user.actions]
        return {*waiting, *(job for user in self._users.values() for job, _ in user.acting)}

    def sessions(self) -> set[int]:
        """Return an empty set: the actions are processes of the agents."""
        return set()

    # -- the rest of the protocol -------------------------------------------------------------------------

    def leave_alone(self, sessions: Set[int]) -> None:
        """Do nothing: the helper processes of the scheduler are not children of an agent."""

    def descriptors(self) -> list[int]:
        """Return the epoll descriptor of all connections."""
        return [self._agents.descriptor()]

    def next_look(self) -> float | None:
        """Return when `look` must be called even if no descriptor is readable (monotonic seconds)."""
        due = [0.0] if self._facts else []
        if self._cgroups is not None and (again := self._cgroups.due()) is not None:
            due.append(again)
        for user in self._users.values():
            if user.channel is None and user.busy and not user.asked:
                due.append(min(user.due, user.look_due) if user.refusal else user.due)
            elif user.channel is not None and not user.busy:
                due.append((user.idle_since or time.monotonic()) + IDLE_AGENT_S)
            elif user.channel is not None:
                due += [self._agents.alive_due(user), *user.appeared.values()]
                due += [] if user.ready else [user.ready_due]
                due += [left.hard_due for left in user.leftovers.values()]
                for hand in user.hands.values():
                    due.append(self._start_due(hand) if hand.job.process is None else hand.hard_due)
        return min(due, default=None)

    def supervisors(self) -> list[Process]:
        """Return an empty list: each user has a supervisor."""
        return []

    def trouble(self) -> str:
        """Return why jobs of users cannot start: a line ``user ID: …`` for each user; empty if all jobs can start."""
        if self._agents.launcher_gone:
            return "the launcher of gpujobd has ended; start the service again: systemctl restart gpujobd"
        found = []
        for user in self._users.values():
            why = user.cannot and f"the agent cannot begin: {user.cannot}"
            why = why or (user.refusal and f"there is no agent: {user.refusal}") or user.trouble
            found += [f"{of_user(user.uid)}{' '.join(why.split())}"] if why else []
        return "\n".join(found)

    def close(self) -> None:
        """Close all connections. The agents end, and the attempts continue."""
        self._agents.close()


def _may_live(process: Process) -> bool:
    """Return whether a process lives, or cannot be looked at now, for example because no descriptor is free."""
    try:
        return lives(process)
    except OSError:
        return True


def _leftovers(key: str, left: Leftovers) -> dict[str, Any]:
    processes = plain(list(left.processes))
    return {"do": "leftovers", "key": key, "job": left.job, "attempt": left.attempt, "processes": processes}
