"""Pauses and resumes come from commands and from edits of the state file. This module merges them.

Example: a user opens the state file, a command pauses GPU 1, and the user then saves another change. GPU 1 stays
paused, although the saved file shows it as not paused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

QUEUE = -1  # the whole queue, in place of a GPU index
MOST_REMEMBERED = 200  # changes by verbs


@dataclass(slots=True)
class Pauses:
    """The latest changes of pauses, and the rules for an edit of the state file.

    Suppose a verb (such as `gpujob pause`) changed a pause after the user had read the file. The saved value of this
    pause is then compared with the value that the user had read. If they are equal, the change by the verb stays. If
    they differ, the saved value counts. If there are several edits of a pause, the last edit counts.

    ``changes``: the changes by verbs, each as (first revision of the file that shows the change, GPU or QUEUE, value
    before the change). ``edited``: GPU or QUEUE → first revision that shows the last edit of this pause.
    """

    revision: int = 0  # of the current version of the state file
    changes: list[tuple[int, int, bool]] = field(default_factory=list)  # by verbs
    edited: dict[int, int] = field(default_factory=dict)  # by edits

    def by_verb(self, what: int, before: bool) -> None:
        """Record a pause or resume by a verb. ``what``: GPU index or QUEUE; ``before``: whether ``what`` was paused."""
        self.changes.append((self.revision + 1, what, before))
        del self.changes[:-MOST_REMEMBERED]

    def by_edit(self, what: int) -> None:
        """Record that an edit changed the pause of ``what``, and forget the earlier changes of this pause by verbs."""
        self.changes = [change for change in self.changes if change[1] != what]
        self.edited[what] = self.revision + 1

    def is_changed(self, what: int, now: bool, wanted: bool, read: int | None) -> bool:
        """Return whether a user intends to change the pause of ``what``.

        ``wanted``: the value that the user saved; ``now``: the current value; ``read``: the revision of the file that
        the user had read. If ``read`` is None (unknown), the result is True whenever ``wanted`` differs from ``now``.
        """
        if read is not None and read <= self.revision:
            for revision, changed, before in self.changes:
                if changed == what and revision > read:
                    # After an edit of revision `read`, two contents of the file carry that number: without and with
                    # the edit. It is not known which of them the user had read, so the later verb counts.
                    edited_since = self.edited.get(what, read) > read
                    return wanted is not before and not edited_since
        return wanted is not now
