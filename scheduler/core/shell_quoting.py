"""Words as a shell takes them, in the shorter of two correct spellings."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

_ACTS = frozenset('$`"\\!')  # these do something between double quotes, too


def quoted(word: str) -> str:
    """A word for a shell: bare where it can be, else in single quotes; one that holds these in double ones, where nothing
    in it would act there.
    """
    single = shlex.quote(word)
    if "'" not in word or _ACTS.intersection(word):
        return single
    return f'"{word}"'


def joined(words: Iterable[str]) -> str:
    """A command that can be pasted."""
    return " ".join(map(quoted, words))
