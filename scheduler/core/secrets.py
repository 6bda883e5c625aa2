"""What of a command is never shown: passwords, tokens and keys, told by their names or by how they look."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
# Most texts hold none of these, and are given back as they are.
_HINT = re.compile(
    r"token|key|secret|passw|passphrase|credential|auth|pwd|bearer|://|--user|--proxy-user|hf_|sk-|gh[pousr]_|github_pat_"
    r"|glpat-|xox[abeoprs]-|AKIA|ASIA|AIza|eyJ|npm_|pypi-|ya29\.",
    re.IGNORECASE,
)
_WORDS = r"token|key|secret|passw|passphrase|credential|authorization|(?<![a-z])auth(?![a-z])|[-_]pwd"
_NAME = rf"[\w.-]{{0,80}}?(?:{_WORDS})[\w.-]{{0,80}}"
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE | re.ASCII)
# Names that only look like it: counts of tokens, special tokens of a vocabulary, keyframes.
_HARMLESS_NAME = re.compile(
    r"tokeni[sz]|(?:^|[-_.])(?:num|max|min|n|pad|eos|bos|unk|mask|sep|cls|image|stop|new)[-_]?(?:new[-_])?tokens?(?:$|[-_.])"
    r"|key(?:frame|point|board|word|note|stone)|(?:mon|tur|hoc|joc|don|whis)key",
    re.IGNORECASE,
)
_ALWAYS = re.compile(r"passw|pwd|passphrase|secret|credential|auth", re.IGNORECASE)
# What stands in such a place and is none: a size, a switch, a word of a message of ours.
_HARMLESS_VALUE = re.compile(
    r"[+-]?\d{1,6}(?:\.\d*)?(?:e[+-]?\d+)?|true|false|none|null|value|<[\w|/]*>|\*+", re.IGNORECASE
)
_VALUE = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^\s"'`;&|,)}\]]+)"""
_ASSIGNED = re.compile(rf"(?<![\w.-])(?P<name>{_NAME})(?P<between>=)(?P<value>{_VALUE})", re.IGNORECASE | re.ASCII)
# A whole word in quotes: blanks are part of its value.
_QUOTED = re.compile(
    rf"""(?<=["'])(?P<name>\+{{0,2}}{_NAME})(?P<between>=)(?P<value>[^"']+)""", re.IGNORECASE | re.ASCII
)
_OPTION = re.compile(
    rf"(?<!\S)(?P<name>--?{_NAME})(?P<between>[ \t]+)(?P<value>(?!-){_VALUE})", re.IGNORECASE | re.ASCII
)
# A header, or a key of JSON: with a colon, as sentences have it too, so only where the name cannot be a plain word.
_HEADER = re.compile(
    rf"""(?<![\w.-])(?P<name>(?<=["']){_NAME}|(?=[\w.]*[-_]|authorization){_NAME})(?P<between>["']?[ \t]*:[ \t]*)(?P<value>(?:(?:bearer|basic|token)[ \t]+)?{_VALUE})""",
    re.IGNORECASE | re.ASCII,
)
_BEARER = re.compile(r"\b(?P<name>bearer)(?P<between>[ \t]+)(?P<value>[\w.~+/-]{8,}=*)", re.IGNORECASE | re.ASCII)
_IN_URL = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@'\"]{0,200}):[^\s/@'\"]{1,200}@", re.IGNORECASE | re.ASCII
)
_USER = re.compile(r"(?<!\S)(?P<before>--(?:proxy-)?user[= \t][^\s:'\"]{1,80}:)[^\s'\"]+", re.ASCII)
_LOOKS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{10,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|npm_[A-Za-z0-9]{20,}"
    r"|pypi-[\w-]{20,}|ya29\.[\w-]{16,})",
    re.ASCII,
)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_ALONE = re.compile(r"(?P<name>[-+]{0,2}[\w.-]{1,200})=(?P<value>.+)", re.DOTALL | re.ASCII)


def is_secret(name: str, value: str = "") -> bool:
    """Whether what this option, variable or key is given is to be hidden."""
    if not _SECRET_NAME.search(name) or _HARMLESS_NAME.search(name):
        return False
    return bool(_ALWAYS.search(name)) or not _HARMLESS_VALUE.fullmatch(value)


def without_secrets(text: str) -> str:
    """A text (a line, a shell command, a sentence) with ``***`` where a secret stands."""
    if not _HINT.search(text):
        return text
    text = _PRIVATE_KEY.sub(rf"\1{HIDDEN}", text)
    for pattern in (_QUOTED, _HEADER, _ASSIGNED, _OPTION, _BEARER):
        text = pattern.sub(_hidden, text)
    text = _IN_URL.sub(rf"\g<before>:{HIDDEN}@", text)
    return _LOOKS.sub(HIDDEN, _USER.sub(rf"\g<before>{HIDDEN}", text))


def _hidden(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    bare = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
    if name.lower() != "bearer" and not is_secret(name, bare):
        return found[0]
    quote = value[0] if bare is not value else ""
    return f"{found[0][: found.start('value') - found.start()]}{quote}{HIDDEN}{quote}"


def words_without_secrets(words: Iterable[str]) -> tuple[str, ...]:
    """The words of a command likewise; a secret may be a word of its own after its option."""
    out: list[str] = []
    asks = ""  # the option before, if what follows it is to be hidden
    for word in words:
        if asks and not word.startswith("-") and (asks in _USERS or is_secret(asks, word)):
            before = word.partition(":")[0] + ":" if asks in _USERS else ""
            out.append(f"{before}{HIDDEN}" if asks not in _USERS or ":" in word else word)
            asks = ""
            continue
        alone = _ALONE.fullmatch(word) if "=" in word else None
        if alone and is_secret(alone["name"], alone["value"]):
            out.append(f"{alone['name']}={HIDDEN}")
        else:
            out.append(without_secrets(word))
        option = word.startswith("-") and "=" not in word
        asks = word if option and (word in _USERS or _SECRET_NAME.fullmatch(word.lstrip("-"))) else ""
    return tuple(out)


_USERS = frozenset({"--user", "--proxy-user"})
