"""Reconciles pauses set by verbs with edits of the state file: no edit undoes a change that its writer had not seen."""

from __future__ import annotations

from dataclasses import dataclass, field

QUEUE = -1  # the whole queue, in place of a GPU index
MOST_REMEMBERED = 200  # changes by verbs


@dataclass(slots=True)
class Pauses:
    """The latest pause changes by version of the state file, to compare an edit with what its writer had read.

    Of several edits the last one counts. A pause or resume by a verb after the writer read the file stays, unless the
    edit itself changes that GPU: a three-way merge, with the version that was read as its base.
    ``changes``: (first revision that shows the change, GPU or QUEUE, value before it); ``edited``: GPU or QUEUE → first
    revision that shows its last edit.
    """

    revision: int = 0  # of the current version of the state file
    changes: list[tuple[int, int, bool]] = field(default_factory=list)  # by verbs
    edited: dict[int, int] = field(default_factory=dict)  # by edits

    def by_verb(self, what: int, before: bool) -> None:
        """Record that a verb sets a pause. ``what``: a GPU's index or QUEUE; ``before``: whether it was paused."""
        self.changes.append((self.revision + 1, what, before))
        del self.changes[:-MOST_REMEMBERED]

    def by_edit(self, what: int) -> None:
        """Record that an edit changed ``what``: earlier changes of it by verbs no longer count against later edits."""
        self.changes = [change for change in self.changes if change[1] != what]
        self.edited[what] = self.revision + 1

    def is_changed(self, what: int, now: bool, wanted: bool, read: int | None) -> bool:
        """Return whether a user who saved ``wanted`` for ``what`` meant to change it. ``now``: its current value.

        ``read``: the revision that the user had read. None if unknown: then every difference from ``now`` is meant.
        """
        if read is not None and read <= self.revision:
            for revision, changed, before in self.changes:
                if changed == what and revision > read:
                    # After an edit of revision `read`, two contents of the file carry that number: without and with
                    # the edit. It is not known which of them the user had read, so the later verb counts.
                    edited_since = self.edited.get(what, read) > read
                    return wanted is not before and not edited_since
        return wanted is not now
