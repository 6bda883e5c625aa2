"""The state file: painted from the store, and read again as a wish when a person edited it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.decide import World
from scheduler.core.gpu import WHOLE, ids_of
from scheduler.core.job import JobState
from scheduler.core.requests import Pause, PauseQueue, Request, Resume
from scheduler.intake.files import read_plain
from scheduler.store.safely import replace_file

LARGEST = 1 << 20
HALF_SAVED_S = 1.0


def picture(world: World, counts: dict[str, int], now: float) -> dict[str, Any]:
    """The document of docs/formats.md, section "state file"."""
    fleet = world.fleet
    on_gpu: dict[int, list[int]] = {}
    for job in world.live.values():
        for gpu in job.gpus:
            on_gpu.setdefault(gpu, []).append(job.id)
    gpus = []
    for index in sorted(fleet.gpus):
        allocated = (WHOLE - fleet.free[index]) / WHOLE
        paused = bool(fleet.paused_mask >> index & 1)
        card = fleet.telemetry.cards.get(index)
        told = card.state if card is not None else ""
        reason = card.reason if card is not None else ""
        state = "PAUSED" if paused else told or ("BUSY" if allocated else "AVAILABLE")
        gpus.append(
            {
                "index": index,
                "uuid": fleet.gpus[index].uuid,
                "state": state,
                "allocated": allocated,
                "jobs": sorted(on_gpu.get(index, [])),
                "reason": (reason or None) if fleet.manages(index) else "no longer managed; its jobs go on",
            }
        )
    return {
        "gpu_status": [gpu["allocated"] for gpu in gpus],
        "paused_gpus": list(ids_of(fleet.paused_mask)),
        "paused": world.queue_paused,
        "gpus": gpus,
        "jobs": counts,
        "running": [
            {
                "id": job.id,
                "gpus": list(job.gpus),
                "pid": job.process.pid if job.process else None,
                "session": job.session_name,
                "log": job.log,
            }
            for job in sorted(world.live.values(), key=lambda job: job.id)
            if job.state is not JobState.STARTING
        ],
        "updated_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
    }


@dataclass(slots=True)
class StateFile:
    """Paints the file and notices edits: whatever it holds that we did not paint is somebody's wish."""

    path: str
    painted: bytes = b""
    shown_gpus: tuple[int, ...] = ()
    shown_paused: bool = False
    broken_since: float | None = None
    said: list[str] = field(default_factory=list)
    trouble: str = ""
    numbers: dict[str, int] = field(default_factory=dict)  # UUID → number of the GPUs today

    def edits(self, managed: Iterable[int], now: float) -> list[Request]:
        """What a person changed since the last paint. A file that stays unreadable for 1 s is set aside."""
        try:
            data = read_plain(self.path, LARGEST)
        except FileNotFoundError:
            if not self.painted:
                return []
            self.painted = b""
            gone: list[Request] = [Resume(self.shown_gpus)] if self.shown_gpus else []
            if self.shown_paused:
                gone.append(PauseQueue(False))
            self.said.append("the state file was deleted: pauses are reset")
            return gone
        except OSError as error:
            text = f"{self.path} cannot be read: {error.strerror}"
            if text != self.trouble:
                self.trouble = text
                self.said.append(text)
            return []
        self.trouble = ""
        if data == self.painted:
            self.broken_since = None
            return []
        try:
            document = json.loads(data)
            gpus, paused = _wishes(document)
            gpus = self._today(document, gpus)
        except (ValueError, RecursionError) as error:
            return self._broken(str(error), now)
        self.broken_since = None
        self.painted = data  # taken in; painted over at the next paint
        known = set(managed)
        unknown = sorted(set(gpus) - known)
        if unknown:
            self.said.append(f"the state file pauses GPU {', '.join(map(str, unknown))}, which is not managed here")
        wanted, shown = set(gpus) & known, set(self.shown_gpus)
        wishes: list[Request] = []
        if wanted - shown:
            wishes.append(Pause(tuple(sorted(wanted - shown))))
        if shown - wanted:
            wishes.append(Resume(tuple(sorted(shown - wanted))))
        if paused != self.shown_paused:
            wishes.append(PauseQueue(paused))
        return wishes

    def _today(self, document: dict[str, Any], gpus: list[int]) -> list[int]:
        """Today's numbers: the file names the cards that had its numbers when it was painted."""
        cards = document.get("gpus")
        then: dict[int, object] = {}
        for card in cards if isinstance(cards, list) else ():
            if isinstance(card, dict) and isinstance(card.get("index"), int):
                then[card["index"]] = card.get("uuid")
        return [self.numbers.get(str(then.get(gpu)), gpu) for gpu in gpus]

    def _broken(self, why: str, now: float) -> list[Request]:
        if self.broken_since is None:
            self.broken_since = now
        if now - self.broken_since >= HALF_SAVED_S:
            aside = f"{self.path}.bad-{time.strftime('%Y%m%d-%H%M%S')}"
            try:
                os.rename(self.path, aside)
            except OSError as error:
                self.said.append(f"{self.path}: not a state file ({why}), and cannot be set aside: {error.strerror}")
                self.broken_since = now
                return []
            self.said.append(f"{self.path}: not a state file ({why}); set aside as {aside}, pauses stay in force")
            self.broken_since, self.painted = None, b""
        return []

    def paint(self, document: dict[str, Any]) -> None:
        """Replace the file by a whole new one. Raises OSError."""
        if self.broken_since is not None:
            return  # somebody may be half through saving it
        data = (json.dumps(document, indent=1) + "\n").encode()
        if os.path.islink(self.path):
            raise OSError(40, "is a link, which is not written through", self.path)
        replace_file(self.path, data, sync=False)
        self.painted = data
        self.shown_gpus = tuple(document["paused_gpus"])
        self.shown_paused = bool(document["paused"])


def _wishes(document: Any) -> tuple[list[int], bool]:
    if not isinstance(document, dict):
        raise ValueError("it must be an object")
    gpus, paused = document.get("paused_gpus", []), document.get("paused", False)
    if not isinstance(gpus, list) or not all(isinstance(gpu, int) and not isinstance(gpu, bool) for gpu in gpus):
        raise ValueError("paused_gpus must be a list of whole numbers")
    if not isinstance(paused, bool):
        raise ValueError("paused must be true or false")
    return gpus, paused
