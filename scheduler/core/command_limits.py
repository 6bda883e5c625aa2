"""The kernel's limits on the length of a command and of its words."""

from __future__ import annotations

from collections.abc import Collection

from scheduler.core.errors import UsageError

LONGEST_WORD = 128 * 1024 - 1  # bytes: MAX_ARG_STRLEN of Linux without the final NUL
LONGEST_COMMAND = 1 << 20  # bytes, with the final NULs; the kernel accepts 2 MiB with the usual stack limit of 8 MiB


def _bytes(word: str) -> bytes:
    return word.encode("utf-8", "surrogateescape")  # as Python decoded the command line


def check_nodes(words: Collection[str]) -> None:
    """Raise UsageError if a word holds a NUL byte, or if the words are too long for the kernel (E2BIG)."""
    total = 0
    for word in words:
        total += len(word if word.isascii() else _bytes(word)) + 1
        if len(word) * 4 > LONGEST_WORD and len(_bytes(word)) > LONGEST_WORD:
            raise UsageError(
                f"an argument of {len(word)} characters is too long",
                do=f"the kernel accepts at most {LONGEST_WORD} bytes per argument",
            )
        if "\0" in word:
            raise UsageError("an argument contains a NUL byte", do="remove it")
    if total > LONGEST_COMMAND:
        raise UsageError("the arguments together are too long", do=f"write at most {LONGEST_COMMAND} bytes in all")
