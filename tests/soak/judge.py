"""Compares the store after a soak with the ledger, the acknowledgements and the kills.

The comparison has no side effects.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.soak.history import History, Kill, Row, Wish

# A daemon that is killed sooner than this after the end of an adopted job may not have learned its exit code.
SLACK_S = 2.0
START_S = 5.0  # the longest time between the start of an attempt in the store and its first line in the ledger
ENDED = frozenset({"done", "failed", "cancelled", "skipped"})
PARTS = 1000
HANGUP = 1
UNPROVEN = "its supervisor was killed before it recorded the start"  # the attempt record names no process


def judge(history: History) -> list[str]:
    """Return a sentence for each error; return an empty list if there are no errors."""
    court = _Court(history)
    return [
        *court.each_wish(),
        *court.foreign_processes(),
        *court.each_job(),
        *court.starts(),
        *gpu_overload(history.ledger),
    ]


def lost_jobs(history: History) -> int:
    """Return the number of jobs with the outcome lost."""
    return sum(row.outcome == "lost" for row in history.rows)


class _Court:
    def __init__(self, history: History) -> None:
        self.history = history
        self.wishes = {wish.key: wish for wish in history.wishes}
        self.rows: dict[str, list[Row]] = defaultdict(list)
        self.others: list[Row] = []
        for row in history.rows:
            key = key_of(row.words)
            if key in self.wishes:
                self.rows[key].append(row)
            else:
                self.others.append(row)
        self.began: dict[str, list[list[str]]] = defaultdict(list)
        self.ended: dict[str, float] = {}
        for entry in history.ledger:
            if entry[0] == "start":
                self.began[entry[1]].append(entry)
            elif entry[0] == "end":
                self.ended[entry[1]] = float(entry[8])
        self.cancels = defaultdict(list)
        for cancel in history.cancels:
            self.cancels[cancel.id].append(cancel)
        self.died = {life.number: life.ended for life in history.lives}
        self.writers = [kill for kill in history.kills if kill.what != "daemon"]

    def each_wish(self) -> Iterator[str]:
        """Yield a sentence for each acknowledged request that led neither to a job nor to a refused line.

        Yield also a sentence for each request with several jobs, and for each job whose id differs from the id that
        `submit` printed.
        """
        refused = "\n".join(self.history.refused)
        for wish in self.history.wishes:
            rows = self.rows[wish.key]
            rejections = len(re.findall(rf"\b{wish.key}\b", refused))
            if len(rows) > 1:
                yield f"{wish.key}: {len(rows)} jobs: {[row.id for row in rows]}"
            if wish.acknowledged and not rows and not rejections:
                yield f"{wish.key}: acknowledged ({wish.way}), and neither a job nor a refused line"
            if wish.id and [row.id for row in rows] != [wish.id]:
                yield f"{wish.key}: submit said job {wish.id}, the store has {[row.id for row in rows]}"

    def foreign_processes(self) -> Iterator[str]:
        """Yield a sentence if the store has too many jobs that no writer requested.

        A line that a full disk has cut off may become such a job. Therefore the store may have as many such jobs as
        there are cut lines, but not more.
        """
        torn = sum(wish.torn for wish in self.history.wishes)
        if len(self.others) > torn:
            yield f"jobs that nobody wished: {[(row.id, row.words) for row in self.others]}; cut lines: {torn}"

    def starts(self) -> Iterator[str]:
        """Yield jobs that started twice, were not requested, or are not in the store."""
        counts = Counter(entry[1] for entry in self.history.ledger if entry[0] == "start")
        for key, count in counts.items():
            if count > 1:
                yield f"{key}: started {count} times: {self.began[key]}"
            if key not in self.wishes:
                yield f"{key}: ran, and nobody wished it"
            elif not self.rows[key]:
                yield f"{key}: ran, and the store does not know it"
            elif str(self.rows[key][0].id) != self.began[key][0][2]:
                yield f"{key}: ran as job {self.began[key][0][2]}, the store has {self.rows[key][0].id}"

    def each_job(self) -> Iterator[str]:
        """Yield jobs whose state in the store contradicts the ledger, the kills or the cancels."""
        for key, rows in self.rows.items():
            for row in rows:
                problem = self.problem(self.wishes[key], row)
                if problem:
                    told = (row.state, row.outcome, row.exit_code, row.signal)
                    yield (
                        f"{key}, job {row.id}: {problem}; the store: {told} {row.notes}; "
                        f"began {self.began[key]}, ended {self.ended.get(key)}, last try at {row.begun:.0f}"
                    )

    def problem(self, wish: Wish, row: Row) -> str:
        """Return the contradiction between the job's row and the other data, as text; empty if there is none."""
        began, ended = self.began[wish.key], self.ended.get(wish.key)
        if row.state not in ENDED:
            return "has not ended"
        if row.state == "skipped":
            return "was skipped, and depends on nothing"
        if row.state == "cancelled":
            return "" if self.cancels[row.id] else "cancelled, and nobody said so"
        told = (row.outcome, row.exit_code, row.signal)
        if (row.state == "done") != (told == ("exit", 0, None)):
            return "done is exit code 0, and nothing else is"
        if told == wish.ending and ended is not None:
            return ""  # also if a cancel came too late
        hit = self.hit(wish, row)
        if row.outcome == "lost":
            if UNPROVEN in row.notes and any(kill.what == "shim" and kill.job == row.id for kill in hit):
                return ""  # its shim was killed while it started the job: the pid is unknown
            known = all(self.died.get(kill.life, 0.0) > self.over(wish, kill) + SLACK_S for kill in hit)
            return "lost, though its end could be known" if known else ""
        if (row.outcome, row.signal) == ("signal", HANGUP) and any(kill.what == "shim" for kill in hit):
            return ""  # without its shim a job loses its terminal
        if not began:
            return "an ending, and it never began"
        if ended is None:
            return "an ending that the job did not write down"
        return f"a wrong ending, {wish.ending} is right"

    def hit(self, wish: Wish, row: Row) -> list[Kill]:
        """Return the kills of each supervisor or shim that may have been the parent of this job."""
        began, ended = self.began[wish.key], self.ended.get(wish.key, float("inf"))
        found = []
        for kill in self.writers:
            if began:
                entry, at = began[0], float(began[0][8])
                if kill.at > ended + SLACK_S:
                    continue
                if int(entry[5]) == kill.pid and kill.at >= at - SLACK_S:
                    found.append(kill)  # the job's parent at its first line
                elif kill.job == row.id or (int(entry[5]) in self.heirs(kill) and at - START_S <= kill.at <= at):
                    found.append(kill)  # the job's parent died between the fork and its first line
            elif kill.job == row.id or -START_S <= kill.at - row.begun <= START_S:
                found.append(kill)
        return found

    def heirs(self, kill: Kill) -> set[int]:
        """Return the pids that a job may have as its parent after its supervisor or shim was killed.

        These are the pid of the daemon that started the killed process, and PID 1.
        """
        return {1, *(life.pid for life in self.history.lives if life.number == kill.life)}

    def over(self, wish: Wish, kill: Kill) -> float:
        """Return a time (seconds since boot) at which the job had certainly ended.

        If the daemon ``kill.life`` was alive after this time, it could learn the exit code of the job. The outcome lost
        is then an error.
        """
        if wish.key in self.ended:
            return self.ended[wish.key]
        began = float(self.began[wish.key][0][8]) if self.began[wish.key] else kill.at
        return max(began, kill.at) + wish.seconds


def key_of(words: list[str]) -> str:
    """Return the key among a job's words; empty if the words did not arrive completely."""
    for word, check in zip(words, words[5:], strict=False):
        if re.fullmatch(r"k\d+", word) and check == f"{word}.ok":
            return word
    return ""


def gpu_overload(ledger: list[list[str]]) -> Iterator[str]:
    """Yield each GPU and time at which the jobs' shares exceed 1000 thousandths. The ledger is in order of time.

    A job holds its share from its first line to its last line, or to the last line of a process that outlives it. A
    killed or cancelled job writes no last line; its share counts only at its first line.
    """
    ends = Counter(entry[1] for entry in ledger if entry[0] in ("end", "gone"))
    open_: dict[str, int] = {}
    load: dict[str, dict[str, int]] = defaultdict(dict)
    for what, key, _, _, _, _, gpus, share, at in ledger:
        if gpus == "-":
            continue
        if what == "start":
            open_[key] = ends[key]
            for gpu in gpus.split(","):
                load[gpu][key] = round(float(share) * PARTS)
                if sum(load[gpu].values()) > PARTS:
                    yield f"GPU {gpu} at {at}: {load[gpu]}"
        else:
            open_[key] = open_.get(key, 0) - 1
        if open_.get(key, 0) <= 0:
            for gpu in gpus.split(","):
                load[gpu].pop(key, None)
