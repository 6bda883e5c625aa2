"""Quoting of words for a shell, in the shorter of two correct spellings."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

_ACTS = frozenset('$`"\\!')  # special also between double quotes


def quoted(word: str) -> str:
    """Return a word quoted for a shell: unquoted where possible, else in single quotes.

    A word that holds a single quote is put in double quotes, unless it also holds characters special in double quotes.
    """
    single = shlex.quote(word)
    if "'" not in word or _ACTS.intersection(word):
        return single
    return f'"{word}"'


def joined(words: Iterable[str]) -> str:
    """Return words as a command line that can be pasted into a shell."""
    return " ".join(map(quoted, words))
