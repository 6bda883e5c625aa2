"""Patterns of passwords, tokens and keys, and of harmless texts that resemble them.

`secrets.py` imports this module only when a text may hold a secret, because compiling the patterns takes time. The
patterns are tried only on texts that match `secrets._HINT`: add the beginning of each new pattern to `_HINT`.
"""

from __future__ import annotations

import re

WORDS = r"token|key|secret|passw|passphrase|credential|authorization|(?<![a-z])auth(?![a-z])|[-_]pwd"
NAME = rf"[\w.-]{{0,80}}?(?:{WORDS})[\w.-]{{0,80}}"
SECRET_NAME = re.compile(NAME, re.IGNORECASE | re.ASCII)
# Names that match SECRET_NAME and are harmless: counts of tokens, special tokens of a vocabulary, keyframes.
HARMLESS_NAME = re.compile(
    r"tokeni[sz]|(?:^|[-_.])(?:num|max|min|n|pad|eos|bos|unk|mask|sep|cls|image|stop|new)[-_]?(?:new[-_])?tokens?(?:$|[-_.])"
    r"|key(?:frame|point|board|word|note|stone)|(?:mon|tur|hoc|joc|don|whis)key",
    re.IGNORECASE,
)
# Names whose values are secrets, whatever the values look like.
ALWAYS = re.compile(r"passw|pwd|passphrase|secret|credential|auth", re.IGNORECASE)
# Values that are no secrets, unless the name matches ALWAYS: numbers, switches, placeholders, masked values.
HARMLESS_VALUE = re.compile(
    r"[+-]?\d{1,6}(?:\.\d*)?(?:e[+-]?\d+)?|true|false|none|null|value|<[\w|/]*>|\*+", re.IGNORECASE
)
VALUE = r"""(?:\\"[^"\\]*\\"|"(?:[^"\\]|\\.)*"|'[^']*'|[^\s"'`;&|,)}\]]+)"""
ASSIGNED = re.compile(rf"(?<![\w.-])(?P<name>{NAME})(?P<between>=)(?P<value>{VALUE})", re.IGNORECASE | re.ASCII)
# NAME=VALUE within quotes: the value may contain blanks.
QUOTED = re.compile(
    rf"""(?<=["'])(?P<name>\+{{0,2}}{NAME})(?P<between>=)(?P<value>\\"[^"\\]*\\"|[^"']+)""", re.IGNORECASE | re.ASCII
)
OPTION = re.compile(
    rf"(?<!\S)(?P<name>--?{NAME})(?P<between>[ \t]+)(?P<value>(?!--|-\S?(?!\S)){VALUE})", re.IGNORECASE | re.ASCII
)
# An HTTP header or a JSON key. Sentences have colons too: an unquoted name must contain - or _, or be "authorization".
HEADER = re.compile(
    rf"""(?<![\w.-])(?P<name>(?<=["']){NAME}|(?=[\w.]*[-_]|authorization){NAME})(?P<between>["']?[ \t]*:[ \t]*)(?P<value>(?:(?:bearer|basic|token)[ \t]+)?{VALUE})""",
    re.IGNORECASE | re.ASCII,
)
BEARER = re.compile(r"\b(?P<name>bearer)(?P<between>[ \t]+)(?P<value>[\w.~+/-]{8,}=*)", re.IGNORECASE | re.ASCII)
IN_URL = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@'\"]{0,200}):[^\s/@'\"]{1,200}@", re.IGNORECASE | re.ASCII
)
USER = re.compile(r"(?<!\S)(?P<before>--(?:proxy-)?user[= \t][^\s:'\"]{1,80}:)[^\s'\"]+", re.ASCII)
# Secrets of known services, recognized by their form.
LOOKS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{10,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|npm_[A-Za-z0-9]{20,}"
    r"|pypi-[\w-]{20,}|ya29\.[\w-]{16,})",
    re.ASCII,
)
PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# A whole word of a command: NAME=VALUE.
ALONE = re.compile(r"(?P<name>[-+]{0,2}[\w.-]{1,200})=(?P<value>.+)", re.DOTALL | re.ASCII)
