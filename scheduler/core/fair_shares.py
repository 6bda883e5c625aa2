"""Fair shares: how much each user has used, decayed over time, and who goes first.

The use of a user is in GPU seconds (a half GPU for 10 s: 5). It decays by half within the half-life, as in the
multifactor plugin of Slurm, so old use is forgotten. A user's *standing* is the use divided by the user's weight: users
with a lower standing go first. Each job also counts as if it had run for `CHARGE_S` already, so that equal users who
begin together take turns instead of one of them taking all GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

CHARGE_S = 600.0
HALF_LIFE_S = 86_400.0  # the default
LN2 = math.log(2.0)


def decayed(used: float, elapsed_s: float, half_life_s: float, rate: float = 0.0) -> float:
    """Return the use after ``elapsed_s`` seconds (below 0: none) during which ``rate`` GPUs were in use."""
    elapsed_s = max(0.0, elapsed_s)
    kept = math.exp(-LN2 * elapsed_s / half_life_s)
    return used * kept + rate * half_life_s / LN2 * (1.0 - kept)


@dataclass(slots=True)
class Standing:
    """A user's decayed use in GPU seconds, the GPUs in use now, and the weight."""

    used: float = 0.0
    rate: float = 0.0
    weight: float = 1.0

    @property
    def value(self) -> float:
        """Use for each unit of weight, with the charge for what runs now."""
        return (self.used + self.rate * CHARGE_S) / self.weight


def shares_used(standings: Mapping[str, Standing], user: str) -> tuple[float, float]:
    """Return how much of the total use is the user's, and how much it should be; both in shares of one user of weight 1.

    With equal weights the second number is 1.0, and the first number is 1.8 for a user who has used 1.8 times as much
    as a fair division would give.
    """
    total = sum(standing.used for standing in standings.values())
    weights = sum(standing.weight for standing in standings.values())
    mine = standings[user]
    used = mine.used / total * weights if total else 0.0
    return used, mine.weight
