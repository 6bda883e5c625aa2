"""Quotes words for a shell: in single or in double quotes, whichever is easier to read."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

_ACTS = frozenset('$`"\\!')  # special also between double quotes


def quoted(word: str) -> str:
    """Return a word for a shell: without quotes if the word needs none, else in single quotes.

    A word with a single quote is put in double quotes, unless it also has characters with a meaning in double quotes.
    """
    single = shlex.quote(word)
    if "'" not in word or _ACTS.intersection(word):
        return single
    return f'"{word}"'


def joined(words: Iterable[str]) -> str:
    """Return words as a command line that can be pasted into a shell."""
    return " ".join(map(quoted, words))
