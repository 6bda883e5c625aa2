"""Merges pauses set by commands with edits of the state file.

An edit does not undo a change that the user who made the edit had not read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

QUEUE = -1  # the whole queue, in place of a GPU index
MOST_REMEMBERED = 200  # changes by verbs


@dataclass(slots=True)
class Pauses:
    """The latest changes of pauses, each with a revision of the state file. Edits of this file are applied with them.

    An edit is applied as a three-way merge, based on the version of the file that the user had read. If a verb (such as
    `gpujob pause`) has changed a pause after that version, this change stays, unless the edit changes the same pause.
    If there are several edits of a pause, the last one counts.

    ``changes``: the changes by verbs, each as (first revision that shows the change, GPU or QUEUE, value before the
    change). ``edited``: GPU or QUEUE → first revision that shows the last edit of its pause.
    """

    revision: int = 0  # of the current version of the state file
    changes: list[tuple[int, int, bool]] = field(default_factory=list)  # by verbs
    edited: dict[int, int] = field(default_factory=dict)  # by edits

    def by_verb(self, what: int, before: bool) -> None:
        """Record a pause or resume by a verb. ``what``: GPU index or QUEUE; ``before``: whether ``what`` was paused."""
        self.changes.append((self.revision + 1, what, before))
        del self.changes[:-MOST_REMEMBERED]

    def by_edit(self, what: int) -> None:
        """Record that an edit changed ``what``: earlier changes of ``what`` by verbs no longer affect later edits."""
        self.changes = [change for change in self.changes if change[1] != what]
        self.edited[what] = self.revision + 1

    def is_changed(self, what: int, now: bool, wanted: bool, read: int | None) -> bool:
        """Return whether the user who saved the value ``wanted`` for ``what`` meant to change the pause.

        ``now``: the current value; ``read``: the revision that the user had read. If ``read`` is None (unknown), every
        difference from ``now`` counts as meant.
        """
        if read is not None and read <= self.revision:
            for revision, changed, before in self.changes:
                if changed == what and revision > read:
                    # After an edit of revision `read`, two contents of the file carry that number: without and with
                    # the edit. It is not known which of them the user had read, so the later verb counts.
                    edited_since = self.edited.get(what, read) > read
                    return wanted is not before and not edited_since
        return wanted is not now
