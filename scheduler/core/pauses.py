"""Pauses wished for by verbs and by edits of the state file, reconciled: nobody's save undoes what it had not seen."""

from __future__ import annotations

from dataclasses import dataclass, field

QUEUE = -1  # stands for the whole queue where else a GPU's index stands
MOST_REMEMBERED = 200


@dataclass(slots=True)
class Pauses:
    """What verbs changed since which picture, so that an edit is measured against what its writer had read.

    Among edits the last saved file holds. A verb's pause or resume that came after the writer read the file stays,
    unless the edit itself changes that GPU: a three-way merge, with the picture that was read as its base.
    """

    revision: int = 0  # of the picture that stands in the state file
    changes: list[tuple[int, int, bool]] = field(default_factory=list)  # first revision to show it, what, value before
    edited: dict[int, int] = field(default_factory=dict)  # what an edit changed last → first revision to show it

    def by_verb(self, what: int, before: bool) -> None:
        """A verb has changed ``what`` (a GPU's index or QUEUE): pictures up to now do not show it."""
        self.changes.append((self.revision + 1, what, before))
        del self.changes[:-MOST_REMEMBERED]

    def by_edit(self, what: int) -> None:
        """An edit has changed ``what``: from now on whoever saves the file has the last word on it."""
        self.changes = [change for change in self.changes if change[1] != what]
        self.edited[what] = self.revision + 1

    def is_changed(self, what: int, now: bool, wanted: bool, read: int | None) -> bool:
        """Whether the writer of a save, which says ``wanted`` for ``what``, meant to change it.

        ``read``: the revision that the writer had read. None, when that is not known: then every difference from the present
        value (``now``) is meant.
        """
        if read is not None and read <= self.revision:
            for revision, changed, before in self.changes:
                if changed == what and revision > read:
                    # An edit after revision `read` left two values under that number, the one before the edit and the
                    # edit's own. It is not known which of them the writer read, so the later verb holds.
                    edited_since = self.edited.get(what, read) > read
                    return wanted is not before and not edited_since
        return wanted is not now
