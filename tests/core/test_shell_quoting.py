"""Tests of shell quoting: if a user pastes a quoted command into a shell, the shell reads the original words."""

from __future__ import annotations

import shlex

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.shell_quoting import joined, quoted

WORDS = st.text(st.sampled_from("ab '\"$`\\!\n|*") | st.characters(exclude_categories=["Cs"]), max_size=12)


@given(st.lists(WORDS))
def test_quoted_words_are_read_back_unchanged_by_a_shell(words: list[str]) -> None:
    assert shlex.split(joined(words)) == words


@given(WORDS)
def test_no_quoted_word_is_longer_than_with_shlex(word: str) -> None:
    assert len(quoted(word)) <= len(shlex.quote(word))


def test_a_word_with_quotes_and_blanks_is_quoted_readably() -> None:
    assert quoted("echo 'a b'") == "\"echo 'a b'\""
    assert quoted("a b") == "'a b'" and quoted("it's $HOME") == shlex.quote("it's $HOME")
