"""The queue of waiting jobs: one heap for each placement class.

The cost of a pass grows with the number of classes and the number of started jobs, not with the number of waiting jobs.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from scheduler.core.placement_class import PlacementClass
from scheduler.core.runtime_estimate import RunKind

Key = tuple[float, float]
SHORT_BETA = 5.0  # a job expected to run an hour queues as if submitted five hours later
LONGEST_ESTIMATE_S = 48 * 3600.0
MOST_PASSES = 1000  # starts remembered for each class; a sensible `max_overtakes` is far below


@dataclass(frozen=True, slots=True)
class Order:
    """The order of waiting jobs.

    ``rule``: ``fifo``, or ``short`` (jobs with a short expected run time first). ``aging_h``: hours of
    waiting that count as much as one level of priority; 0: the waiting time does not count.
    """

    rule: str = "fifo"
    aging_h: float = 0.0

    def key(self, priority: int, order: int, submitted_at: float, estimate_s: float | None) -> Key:
        """Return the sort key of a job. Jobs with smaller keys start first. The key stays the same while the job waits.

        ``order``: place among jobs with the same priority; below 0: before all other jobs. ``estimate_s``: expected run
        time in seconds, None if unknown.
        """
        if order < 0:
            return (-math.inf, order)
        estimate = min(estimate_s or 0.0, LONGEST_ESTIMATE_S) if self.rule == "short" else 0.0
        if self.aging_h:
            return (submitted_at + self.aging_h * 3600.0 * priority + SHORT_BETA * estimate, order)
        if self.rule == "short":
            return (priority, submitted_at + SHORT_BETA * estimate)
        return (priority, order)


@dataclass(slots=True)
class Promise:
    """A promise to a waiting job that it starts by a time, for which GPUs are reserved (`core/backfill.py`).

    ``until``: monotonic seconds; ``length_s``: from the promise to ``until``; ``missed``: earlier promises that were not kept.
    """

    until: float
    length_s: float
    missed: int = 0


class ExpectedStart(NamedTuple):
    """When a job of a class can start, as expected (infinite: unknown). ``again``: when to compute it again.

    Times are monotonic seconds. `core/backfill.py` computes and uses it.
    """

    at: float
    again: float


@dataclass(slots=True)
class _Line:
    """The waiting jobs of one class."""

    kind: PlacementClass
    heap: list[tuple[float, float, int]] = field(default_factory=list)  # may hold entries of dropped jobs
    size: int = 0
    # Of each start that overtook this class: its moment, and the key of the started job.
    passes: deque[tuple[int, Key]] = field(default_factory=lambda: deque(maxlen=MOST_PASSES))
    overtaken: dict[int, int] = field(default_factory=dict)  # job → how often, if `Queue.overtaken` was called for it


class _Place(NamedTuple):
    """The place of a waiting job. ``pushed``: counts pushes and overtaking starts, to tell which came first."""

    line: _Line
    key: Key
    pushed: int
    since: float  # monotonic seconds


class Queue:
    """The jobs that may start as soon as there is room. Parked jobs (back-off, dependency, missing file) are not in it.

    Costs: push and pop O(log jobs), a pass O(classes · log classes + started · log jobs).
    """

    def __init__(self) -> None:
        self._lines: dict[PlacementClass, _Line] = {}
        self._where: dict[int, _Place] = {}
        self.promises: dict[int, Promise] = {}
        self.run_kinds: dict[int, RunKind] = {}  # of the jobs for which `core/backfill.py` has asked
        self.expected_starts: dict[PlacementClass, ExpectedStart] = {}
        self._moment = 0  # counts pushes and overtaking starts, to tell which came first

    def copy(self, most: int | None = None) -> Queue:
        """Return a copy, which changes apart from the original.

        ``most``: the copy has only the first jobs of each class, this many; None: all.
        """
        made = Queue()
        made.expected_starts = self.expected_starts.copy()
        if most is not None and len(self) > most:
            for kind in self._lines:
                for job in self.first_of(kind, most):
                    made.push(job, kind, self.key_of(job), self.since(job))
                    if job in self.promises:
                        made.promises[job] = replace(self.promises[job])
            return made
        lines = {
            kind: _Line(kind, line.heap.copy(), line.size, line.passes.copy(), line.overtaken.copy())
            for kind, line in self._lines.items()
        }
        made._lines = lines
        made._where = {job: place._replace(line=lines[place.line.kind]) for job, place in self._where.items()}
        made.promises = {job: replace(promise) for job, promise in self.promises.items()}
        made.run_kinds = self.run_kinds.copy()
        made._moment = self._moment
        return made

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, job: int) -> bool:
        return job in self._where

    def push(self, job: int, kind: PlacementClass, key: Key, since: float = 0.0) -> None:
        """Add a waiting job. A job that is already in the queue moves to its new place.

        ``since``: when it began to wait for room (monotonic seconds).
        """
        self.drop(job)
        line = self._lines.get(kind)
        if line is None:
            line = self._lines[kind] = _Line(kind)
        heapq.heappush(line.heap, (*key, job))
        line.size += 1
        self._moment += 1
        self._where[job] = _Place(line, key, self._moment, since)

    def drop(self, job: int) -> bool:
        """Remove a job. Return whether it was in the queue."""
        place = self._where.pop(job, None)
        if place is None:
            return False
        self.promises.pop(job, None)
        self.run_kinds.pop(job, None)
        line = place.line
        line.size -= 1
        line.overtaken.pop(job, None)
        if line.size == 0:
            del self._lines[line.kind]
            self.expected_starts.pop(line.kind, None)
        elif len(line.heap) > 64 and line.size * 2 < len(line.heap):
            line.heap = [entry for entry in line.heap if self._is_current(line, entry)]
            heapq.heapify(line.heap)
        return True

    def place_of(self, job: int) -> int:
        """Return the place of a waiting job among the jobs of its user, from 1. Cost: O(jobs). Raises KeyError."""
        mine, user = (self.key_of(job), job), self._where[job].line.kind.user
        return 1 + sum(
            (place.key, other) < mine for other, place in self._where.items() if place.line.kind.user == user
        )

    def key_of(self, job: int) -> Key:
        """Return the sort key of a waiting job. Raises KeyError if the job is not in the queue."""
        return self._where[job].key

    def since(self, job: int) -> float:
        """Return since when a job waits for room (monotonic seconds). Raises KeyError if the job is not in the queue."""
        return self._where[job].since

    def overtake(self, job: int, by: Key) -> None:
        """Record that another job overtook ``job``: the other job got GPUs or slots that ``job`` waits for.

        ``by``: the sort key of the other job. In the class of ``job``, all jobs with a smaller sort key than ``by``
        count as overtaken.
        """
        line = self._where[job].line
        self._moment += 1
        line.passes.append((self._moment, by))
        for other in line.overtaken:
            line.overtaken[other] += self._where[other].key < by

    def overtaken(self, job: int) -> int:
        """Return how often a job was overtaken since it was queued. Raises KeyError if the job is not in the queue."""
        line, key, pushed, _ = self._where[job]
        if job not in line.overtaken:
            line.overtaken[job] = sum(at > pushed and by > key for at, by in line.passes)
        return line.overtaken[job]

    def set_overtaken(self, job: int, times: int) -> None:
        """Set how often a job was overtaken, as another process tells. Raises KeyError if the job is not in the queue."""
        self._where[job].line.overtaken[job] = times

    def _is_current(self, line: _Line, entry: tuple[float, float, int]) -> bool:
        place = self._where.get(entry[2])
        return place is not None and place.line is line and place.key == entry[:2]

    def _head(self, line: _Line) -> tuple[float, float, int] | None:
        heap = line.heap
        while heap:
            if self._is_current(line, heap[0]):
                return heap[0]
            heapq.heappop(heap)
        return None

    def in_order(
        self, rank: Callable[[str], float] | None = None, *, across: bool = False
    ) -> Generator[tuple[int, PlacementClass], bool, None]:
        """Yield waiting jobs with their classes, in the order of their sort keys.

        ``rank``: user → sort key of the user; the jobs of users with a lower key come first. It is asked again after each
        job. ``across``: the first part of the sort keys of the jobs (the priority) comes before the key of the user.
        If the caller starts the yielded job, the caller removes the job with ``drop`` and answers with ``send(True)``.
        After any other answer, no further job of the same class is yielded: if one job does not fit, no other job of
        its class fits.
        """
        users: dict[str, list[tuple[tuple[float, float, int], int, _Line]]] = {}
        for line in list(self._lines.values()):
            head = self._head(line)
            if head is not None:
                users.setdefault(line.kind.user if rank else "", []).append((head, id(line), line))
        for heads in users.values():
            heapq.heapify(heads)

        def turn(user: str) -> tuple[float, float, str]:
            first = users[user][0][0][0] if across else 0.0
            # A job that was put first (-inf) is first only among the jobs of its user.
            return (first if math.isfinite(first) else 0.0, rank(user) if rank else 0.0, user)

        while users:
            user = min(users, key=turn) if len(users) > 1 else next(iter(users))
            heads = users[user]
            head, _, line = heads[0]
            taken = yield head[2], line.kind
            following = self._head(line) if taken and line.size else None
            if following is None or following == head:
                heapq.heappop(heads)
                if not heads:
                    del users[user]
            else:
                heapq.heapreplace(heads, (following, id(line), line))

    def first_of(self, kind: PlacementClass, most: int) -> Iterator[int]:
        """Yield the first ``most`` jobs of a class, in the order of their sort keys. Cost: O(most · log most).

        The heap is walked from its root, because a sorted copy of a million jobs would take too long. The caller may drop the
        job that was yielded last only after the iteration has ended.
        """
        line = self._lines.get(kind)
        if line is None or self._head(line) is None:
            return
        heap = line.heap
        ahead: list[tuple[tuple[float, float, int], int]] = [(heap[0], 0)]
        while ahead and most:
            entry, at = heapq.heappop(ahead)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heapq.heappush(ahead, (heap[child], child))
            if self._is_current(line, entry):
                most -= 1
                yield entry[2]

    def forget_unknown_starts(self) -> None:
        """Forget that the starts of some classes could not be expected, because another run time is known now."""
        known = self.expected_starts
        for kind in [kind for kind, start in known.items() if start.at == math.inf]:
            del known[kind]

    def sizes(self) -> dict[PlacementClass, int]:
        """Return the number of waiting jobs of each class."""
        return {line.kind: line.size for line in self._lines.values()}

    def classes(self) -> list[PlacementClass]:
        """Return the classes that have waiting jobs."""
        return list(self._lines)
