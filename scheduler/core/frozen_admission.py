"""The readings of one moment, for simulations and predictions: nothing is read or judged again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scheduler.core.admission import Admission
from scheduler.core.observations import Now, Readings
from scheduler.core.tenants import overcommit, promised, use_beyond

BRIEF = "releasing"  # this verdict ends by itself within seconds: a simulation does not count it


class FrozenAdmission(Admission):
    """An admission whose verdicts are final. It changes no `GpuAdmission` of the original.

    What jobs and foreign processes use stays as it was read; what a job uses is free when the job has ended.
    """

    @classmethod
    def of_now(cls, admission: Admission) -> FrozenAdmission:
        """Return the readings of an admission as they are now."""
        cards = {gpu: replace(card) if card.overcommit else card for gpu, card in admission.cards.items()}
        made = cls(cards, replace(admission.thresholds), faults=admission.faults)
        brief = sum(1 << gpu for gpu, card in admission.cards.items() if card.verdict.code == BRIEF)
        made.blocked_mask = admission.blocked_mask & ~brief
        made.lasting_mask, made.sick_mask = admission.lasting_mask, admission.sick_mask
        made.whole_blocked_mask, made.tight_mask = admission.whole_blocked_mask, admission.tight_mask
        return made

    @property
    def frozen(self) -> bool:
        """True: there is nothing to judge."""
        return True

    def judge(self, now: Now) -> None:
        """Do nothing."""

    def take(self, readings: Readings, now: Now) -> None:
        """Do nothing."""

    def fresh(self, gpus: Iterable[int], now: Now) -> bool:
        """Return True: a GPU is not read before a job is placed there."""
        return True

    def left(self, gpus: Iterable[int], now: Now) -> bool:
        """Return False: a GPU is not read after a job has left it. What the job used beyond its share is free then."""
        for gpu in gpus:
            card = self.cards.get(gpu)
            if card is not None and card.overcommit:
                capacity = float(card.capacity_mib)
                more = card.foreign_mib + use_beyond(self.tenants(gpu), card.own, capacity)
                card.overcommit_mib = int(more)
                card.overcommit = overcommit(more, capacity, self.thresholds.tolerance)
        return False

    def accept(self, gpus: Iterable[int], now: Now) -> None:
        """Do nothing."""

    def free_mib(self, index: int) -> int:
        """Return the MiB of a GPU that are left beside its foreign processes and what its jobs use or have booked."""
        card = self.cards[index]
        if card.reading is None or not card.reading.memory_total_mib:
            return 0
        total = card.reading.memory_total_mib
        jobs = sum(max(promised(one, total), card.own.get(one.key, 0.0)) for one in self.tenants(index))
        return max(0, int(card.capacity_mib - card.foreign_mib - card.accepted_mib - jobs))
