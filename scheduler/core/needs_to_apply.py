"""Which suggested needs are written into the model table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.core.errors import NotFound, did_you_mean
from scheduler.core.gpu import ResourceRequest
from scheduler.core.learned_needs import Advice
from scheduler.core.secrets import without_secrets


@dataclass(frozen=True, slots=True)
class NeedChange:
    """A need to write into the model table. ``before``: as it is written there; empty: the table lacks the model."""

    model: str
    before: str
    after: str


def chosen(rows: Iterable[Advice], models: Sequence[str]) -> list[Advice]:
    """Return the rows of the named models, in the order of the rows; all if none is named. Raises NotFound."""
    found = list(rows)
    known = {row.model for row in found}
    for name in models:
        if name not in known:
            shown = without_secrets(name)
            near = did_you_mean(name, (one for one in known if one == without_secrets(one)))
            raise NotFound(f"there is no model {shown[:80]!r}{near}", do="see gpujob needs")
    return [row for row in found if row.model in models] if models else found


def changes_of(rows: Iterable[Advice], models: Sequence[str]) -> tuple[list[NeedChange], list[str]]:
    """Return the needs to write, and for each named model that does not change a sentence that says why.

    ``models``: the named models; none: all. A need that is only guessed from the name is written only if its model is
    named. A name with a secret is not written into a table that lacks it. Raises NotFound for an unknown model.
    """
    changes: list[NeedChange] = []
    kept: list[str] = []
    for row in chosen(rows, models):
        found, name = row.suggestion, without_secrets(row.model)
        if found is None:
            kept.append(
                f"{name}: nothing is suggested, because no memory use of it was measured, or no GPU size is known"
            )
        elif not row.table and name != row.model:
            kept.append(f"{name}: not written, because its name seems to contain a secret")
        elif row.table and ResourceRequest.parse(row.table) == found.need:
            kept.append(f"{name}: the model table has {row.table} already")
        elif models or found.basis == "seen":
            changes.append(NeedChange(row.model, row.table, str(found.need)))
    return changes, kept if models else []
