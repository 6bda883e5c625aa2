"""The attempts that the runner of all users has in hand, and the agent of each user."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from scheduler.core.backoff import Backoff
from scheduler.core.job import Job, JobState, Process
from scheduler.core.observations import Ended, Lost, Missing, NeverRan, Started, Unclaimed
from scheduler.daemon.parts import NEVER
from scheduler.gpujobd.agent_channel import Channel
from scheduler.gpujobd.user_files import RemoteFollower
from scheduler.system.processes import lives

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # between two starts of the agent of a user
Reported = Ended | NeverRan | Unclaimed | Lost | Missing  # why an attempt is no longer in hand


@dataclass(slots=True)
class InHand:
    """An attempt in hand. ``job``: as it was started or adopted; ``sent``: whether the present agent knows it."""

    job: Job
    ordinals: dict[int, int | str] | None = (
        None  # of an attempt to start; None: an agent had it before, so it is to be adopted
    )
    sent: bool = False
    sent_at: float = 0.0  # when it was sent to the present agent (monotonic seconds)
    first_sent_at: float = 0.0  # when it was sent to the first agent
    stop: bool | None = None  # a stop was requested; True: a hard one
    hard_due: float = NEVER  # when the launcher has to kill the main process (monotonic seconds)
    unanswered: int = 0  # agents that were ended because they did not say what became of the attempt
    begun: float = 0.0  # when its command started, in seconds since 1970
    started: Started | None = None  # what the agent said of the start


@dataclass(slots=True)
class Leftovers:
    """Leftover processes of an attempt that has ended."""

    job: int
    attempt: int
    processes: tuple[Process, ...]
    hard_due: float = NEVER  # when the launcher has to kill them (monotonic seconds)
    unanswered: int = 0  # agents that were ended because they did not say that the killed processes are gone


@dataclass(slots=True)
class UserState:
    """A user with attempts in hand, and the user's agent. ``channel``: None while there is no agent."""

    uid: int
    hands: dict[str, InHand] = field(default_factory=dict)
    leftovers: dict[str, Leftovers] = field(default_factory=dict)  # by attempt key
    missing: dict[int, float] = field(default_factory=dict)  # jobs that the agent says lack a file → since when
    appeared: dict[int, float] = field(
        default_factory=dict
    )  # jobs whose missing file has appeared → when they may start
    unclaimed: Counter[int] = field(default_factory=Counter)  # job → attempts in a row that the agent did not start
    stops: list[tuple[Job, bool]] = field(default_factory=list)  # for the next agent
    actions: list[tuple[Job, str]] = field(default_factory=list)  # for the next agent: job, on_finish or mail
    files: dict[str, RemoteFollower] = field(default_factory=dict)  # jobs files, by path
    acting: dict[tuple[int, str], Job] = field(default_factory=dict)  # actions that the agent has not confirmed
    warned: set[tuple[int, str]] = field(default_factory=set)  # those of them that have their warning
    channel: Channel | None = None
    ready: bool = False  # the agent has begun its work
    ready_due: float = 0.0  # when it must have begun (monotonic seconds)
    heard: float = 0.0  # when the agent last said something, or got its first task (monotonic seconds)
    pinged: float = 0.0  # when it was asked since then whether it lives; 0: it was not
    cannot: str = ""  # why the last agent could not begin
    asked: bool = False
    due: float = 0.0  # when to ask for an agent again (monotonic seconds)
    wait: Backoff = field(default_factory=lambda: Backoff(FIRST_WAIT_S, LONGEST_WAIT_S))
    idle_since: float | None = None
    refusal: str = ""  # why there is no agent
    refused_since: float = 0.0  # since when (monotonic seconds)
    trouble: str = ""
    look_due: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether the user needs an agent."""
        return bool(
            self.hands
            or self.leftovers
            or self.missing
            or self.appeared
            or self.stops
            or self.actions
            or self.acting
            or self.files
        )


def begun(hand: InHand, observation: Started) -> Started | None:
    """Note the start of an attempt. Return it with the process that is recorded; None if it was said before.

    Raises ValueError if no process of the user is known.
    """
    if hand.started is not None:
        return None
    if hand.job.process is not None:
        observation = replace(observation, process=hand.job.process)
    elif observation.process is None:
        raise ValueError("a start without a process of the user")
    hand.job.process, hand.started = observation.process, observation
    if hand.job.state is JobState.STARTING:
        hand.job.state = JobState.RUNNING  # a later agent has to adopt it as a job that runs
    hand.begun = max(hand.begun, observation.at)
    return observation


def checked_end(hand: InHand, observation: Reported) -> Reported:
    """Return the end of an attempt as far as it can be true: it does not end before its start or while its process lives."""
    if not isinstance(observation, (Ended, Lost)):
        return observation
    left = observation.leftovers
    if hand.job.process is not None and hand.job.process not in left and lives(hand.job.process):
        left = (hand.job.process, *left)
    return replace(observation, at=max(observation.at, hand.begun), leftovers=left)
