"""What happened in a soak, as data: what was wished, what the jobs wrote, what was killed, what the store says at the end."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WAYS = ("echo", "add", "submit")
SIGNALS = (9, 15, 11, 6, 10)
GARBLED = 97  # exit code of a job whose words did not arrive whole


def now() -> float:
    """The clock that the jobs write into their ledger."""
    with open("/proc/uptime", encoding="ascii") as stream:
        return float(stream.read().split()[0])


@dataclass
class Wish:
    """One job that somebody wants; its key appears in its words, and in nobody else's."""

    key: str
    way: str
    seconds: float
    code: int | None
    signal: int | None
    kind: str  # plain, orphan, deaf, loud
    share: str
    priority: int
    acknowledged: bool = False
    id: int = 0  # as `submit` told it
    torn: bool = False  # only a part of its line went into the file: the disk was full
    said: str = ""

    @property
    def ending(self) -> tuple[str, int | None, int | None]:
        """Outcome, exit code and signal that the store has to tell."""
        return ("exit", self.code, None) if self.signal is None else ("signal", None, self.signal)


@dataclass
class Life:
    """One life of the daemon."""

    number: int
    pid: int
    mode: str
    begun: float
    ended: float = float("inf")
    ready: float = float("inf")
    early: tuple[int, int] = (0, 0)  # descriptors and memory (KiB) a moment after its start
    late: tuple[int, int] = (0, 0)  # the same before its end


@dataclass
class Kill:
    """A SIGKILL. ``life``: of the daemon that this is, or that started it; 0 if that one was dead already."""

    what: str  # daemon, supervisor, shim
    pid: int
    at: float
    life: int
    job: int = 0  # whose shim


@dataclass
class Cancel:
    """A `gpujob cancel` that ended with this code."""

    id: int
    at: float
    code: int


@dataclass
class Row:
    """A job in the store."""

    id: int
    words: list[str]
    state: str
    outcome: str | None
    exit_code: int | None
    signal: int | None
    begun: float  # when its last attempt was chosen, on the clock of the ledger, in whole seconds
    notes: str = ""


@dataclass
class History:
    """All of it."""

    seed: int = 0
    wishes: list[Wish] = field(default_factory=list)
    ledger: list[list[str]] = field(default_factory=list)  # what key id attempt pid parent gpus share at
    lives: list[Life] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # texts of refused lines

    def save(self, path: Path) -> None:
        """Keep it, so that the judge can be asked again."""
        path.write_text(json.dumps(dataclasses.asdict(self), default=str))

    @staticmethod
    def load(path: Path) -> History:
        """What was kept."""
        data: dict[str, Any] = json.loads(path.read_text())
        kinds = {"wishes": Wish, "lives": Life, "kills": Kill, "cancels": Cancel, "rows": Row}
        made = {name: [kinds[name](**one) for one in data[name]] for name in kinds}
        return History(seed=data["seed"], ledger=data["ledger"], refused=data["refused"], **made)


def wish(n: int, dice: random.Random) -> Wish:
    """The n-th job: how it ends follows from n, the rest from the dice."""
    roll = dice.randrange(100)
    kind = "loud" if roll < 1 else "orphan" if roll < 3 else "deaf" if roll < 5 else "plain"
    number = SIGNALS[n // 10 % len(SIGNALS)] if n % 10 == 7 else None
    return Wish(
        key=f"k{n}",
        way=dice.choice(WAYS),
        seconds=round(dice.uniform(0, 0.2), 3),
        code=None if number is not None else 0 if n % 3 == 0 else (n * 37 + 11) % 256,
        signal=number,
        kind=kind,
        share=dice.choice(("0", "0.25", "0.25", "0.5", "0.5", "1", "2")),
        priority=dice.choice((0, 0, 0, -1, 2)),
    )
