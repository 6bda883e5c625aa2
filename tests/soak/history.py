"""The data of a soak: requested jobs, the jobs' ledger, kills, cancels, and the store at the end."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WAYS = ("echo", "add", "submit")
SIGNALS = (9, 15, 11, 6, 10)
GARBLED = 97  # exit code of a job whose arguments did not arrive completely


def now() -> float:
    """Return the seconds since boot: the clock of the jobs' ledger."""
    with open("/proc/uptime", encoding="ascii") as stream:
        return float(stream.read().split()[0])


@dataclass
class Wish:
    """A requested job. ``key`` identifies the job and is one of the job's arguments.

    ``way``: how the job is requested (`WAYS`); ``seconds``: how long the job runs; ``code``, ``signal``: how the job
    ends; ``said``: ``ok`` or the error of the request.
    """

    key: str
    way: str
    seconds: float
    code: int | None
    signal: int | None
    kind: str  # plain, orphan, deaf, loud
    share: str
    priority: int
    acknowledged: bool = False
    id: int = 0  # as `submit` printed it
    torn: bool = False  # only a part of its line was written, because the disk was full
    said: str = ""

    @property
    def ending(self) -> tuple[str, int | None, int | None]:
        """The ending that the store must have: outcome, exit code and signal."""
        return ("exit", self.code, None) if self.signal is None else ("signal", None, self.signal)


@dataclass
class Life:
    """A daemon process. ``begun``, ``ready``, ``ended``: seconds since boot, as in the jobs' ledger."""

    number: int
    pid: int
    mode: str
    begun: float
    ended: float = float("inf")
    ready: float = float("inf")
    early: tuple[int, int] = (0, 0)  # number of descriptors and memory (KiB) shortly after its start
    late: tuple[int, int] = (0, 0)  # number of descriptors and memory (KiB) at its end


@dataclass
class Kill:
    """A SIGKILL that the soak sent.

    ``life``: if a daemon was killed, the number of this daemon. If a supervisor or a shim was killed, the number of the
    daemon that had started the killed process, or 0 if that daemon had already ended.
    """

    what: str  # daemon, supervisor, shim
    pid: int
    at: float
    life: int
    job: int = 0  # job of a killed shim


@dataclass
class Cancel:
    """A `gpujob cancel`. ``code``: its exit code; -1 before it has ended."""

    id: int
    at: float
    code: int


@dataclass
class Row:
    """A job in the store at the end."""

    id: int
    words: list[str]
    state: str
    outcome: str | None
    exit_code: int | None
    signal: int | None
    begun: float  # start of its last attempt, in whole seconds on the ledger's clock
    notes: str = ""


@dataclass
class History:
    """The data of one soak, which the judge reads. ``lives``: the daemons, one after the other."""

    seed: int = 0
    wishes: list[Wish] = field(default_factory=list)
    ledger: list[list[str]] = field(default_factory=list)  # a line: what key id attempt pid parent gpus share at
    lives: list[Life] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # texts of refused lines

    def save(self, path: Path) -> None:
        """Write the history to a file, which `load` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self), default=str))

    @staticmethod
    def load(path: Path) -> History:
        """Return the history that `save` has written to a file."""
        data: dict[str, Any] = json.loads(path.read_text())
        kinds = {"wishes": Wish, "lives": Life, "kills": Kill, "cancels": Cancel, "rows": Row}
        made = {name: [kinds[name](**one) for one in data[name]] for name in kinds}
        return History(seed=data["seed"], ledger=data["ledger"], refused=data["refused"], **made)


def wish(n: int, dice: random.Random) -> Wish:
    """Return the n-th requested job: ``n`` determines how it ends, ``dice`` determines its other properties."""
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
