"""Masking of passwords, tokens and keys in commands and texts.

A secret is recognized by the name of its option, variable or key, or by its own form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
# A text without any of these words holds no secret: it is returned unchanged. The text is searched in lower case, because
# a search with re.IGNORECASE takes nine times as long.
_HINT = re.compile(
    r"token|key|secret|passw|passphrase|credential|auth|pwd|bearer|://|--user|--proxy-user|hf_|sk-|gh[pousr]_|github_pat_"
    r"|glpat-|xox[abeoprs]-|akia|asia|aiza|eyj|npm_|pypi-|ya29\."
)


def _hints_at_secret(text: str) -> bool:
    return _HINT.search(text.casefold()) is not None


def is_secret(name: str, value: str = "") -> bool:
    """Return whether ``value`` is a secret. ``name``: the option, variable or key that has this value."""
    from scheduler.core import masking_patterns as shapes

    if not shapes.SECRET_NAME.search(name) or shapes.HARMLESS_NAME.search(name):
        return False
    return bool(shapes.ALWAYS.search(name)) or not shapes.HARMLESS_VALUE.fullmatch(value)


def without_secrets(text: str) -> str:
    """Return a text (a line, a shell command, a sentence) with each secret replaced by ``***``."""
    if not _hints_at_secret(text):
        return text
    from scheduler.core import masking_patterns as shapes  # slow to import: only for a text that may hold a secret

    text = shapes.PRIVATE_KEY.sub(rf"\1{HIDDEN}", text)
    for pattern in (shapes.QUOTED, shapes.HEADER, shapes.ASSIGNED, shapes.OPTION, shapes.BEARER):
        text = pattern.sub(_hidden, text)
    text = shapes.IN_URL.sub(rf"\g<before>:{HIDDEN}@", text)
    return shapes.LOOKS.sub(HIDDEN, shapes.USER.sub(rf"\g<before>{HIDDEN}", text))


def _hidden(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    bare = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
    if name.lower() != "bearer" and not is_secret(name, bare):
        return found[0]
    quote = value[0] if bare is not value else ""
    return f"{found[0][: found.start('value') - found.start()]}{quote}{HIDDEN}{quote}"


def words_without_secrets(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words of a command with each secret replaced by ``***``.

    A word after an option such as ``--token`` is a secret, too.
    """
    words = tuple(words)
    if not any(map(_hints_at_secret, words)):
        return words
    from scheduler.core import masking_patterns as shapes

    out: list[str] = []
    asks = ""  # the option before, if its value may be a secret
    for word in words:
        if asks and _is_value(word) and (asks in _USERS or is_secret(asks, word)):
            before = word.partition(":")[0] + ":" if asks in _USERS else ""
            out.append(f"{before}{HIDDEN}" if asks not in _USERS or ":" in word else word)
            asks = ""
            continue
        alone = shapes.ALONE.fullmatch(word) if "=" in word else None
        if alone and is_secret(alone["name"], alone["value"]):
            out.append(f"{alone['name']}={HIDDEN}")
        else:
            out.append(without_secrets(word))
        option = word.startswith("-") and "=" not in word
        asks = word if option and (word in _USERS or shapes.SECRET_NAME.fullmatch(word.lstrip("-"))) else ""
    return tuple(out)


def _is_value(word: str) -> bool:
    """Return whether a word after an option can be its value: no ``--option``, and no ``-x``. A password may begin with ``-``."""
    return not word.startswith("-") or (len(word) > 2 and not word.startswith("--"))


def masked(value: Any) -> Any:
    """Return a copy of a JSON value with the secrets in its strings (not in its keys) replaced by ``***``."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: masked(inner) for key, inner in value.items()}
    return [masked(inner) for inner in value] if isinstance(value, (list, tuple)) else value


_USERS = frozenset({"--user", "--proxy-user"})  # options with a value USER:PASSWORD
