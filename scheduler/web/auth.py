"""What lets a program or a browser in: the token in its file, and the cookie that a browser gets in exchange for it."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time

from scheduler.core.errors import SchedulerError
from scheduler.store.paths import Places, name_of
from scheduler.system.atomic_files import swap_file
from scheduler.system.safe_open import plain

FEWEST = 32  # characters of a token
MOST_BYTES = 4096
COOKIE_S = 7 * 86400
MOST_REVOKED = 10_000
_TOKEN = re.compile(r"[\x21-\x7e]+", re.ASCII)
_COOKIE = re.compile(r"v1\.([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})", re.ASCII)


def token_of(places: Places) -> str:
    """The token of this scheduler's page, made (0600, whole or not at all) where there is none yet.

    Raises SchedulerError when the file is not one that only we can have written and read.
    """
    try:
        return _read(places.web_token)
    except FileNotFoundError:
        places.make()
    try:
        swap_file(places.web_token, secrets.token_urlsafe(FEWEST).encode() + b"\n", there=False, sync=True)
    except FileExistsError:
        return _read(places.web_token)  # somebody else made it this moment
    except OSError as error:
        raise SchedulerError(f"the token cannot be written: {error.strerror}", where=places.web_token) from None
    return _read(places.web_token)


def _read(path: str) -> str:
    """The token in this file. Raises FileNotFoundError, and SchedulerError when it is none to be trusted."""

    def refused(what: str) -> SchedulerError:
        return SchedulerError(what, where=path, do="remove it, and gpujob web makes a new one")

    try:
        fd = plain(path, os.O_RDONLY)
    except FileNotFoundError:
        raise
    except OSError:
        raise refused("the token's file is a link, or cannot be read as a plain file") from None
    try:
        status = os.fstat(fd)
        data = os.pread(fd, MOST_BYTES, 0)
    except OSError as error:
        raise SchedulerError(f"the token cannot be read: {error.strerror}", where=path) from None
    finally:
        os.close(fd)
    if status.st_uid != os.getuid():
        raise refused(f"the token's file belongs to user {name_of(status.st_uid)}")
    if status.st_mode & 0o7777 & ~stat.S_IRWXU:
        raise refused(f"others could read or write the token (mode {status.st_mode & 0o7777:o}, not 600)")
    text = data.decode("latin-1").strip()
    if len(text) < FEWEST or len(data) == MOST_BYTES or not _TOKEN.fullmatch(text):
        raise refused(f"the token is no word of {FEWEST} or more characters")
    return text


class Key:
    """Judges tokens and makes cookies, which hold over a restart of the page and for its port alone."""

    def __init__(self, token: str, port: int) -> None:
        self.cookie_name = f"gpujob_{port}"  # browsers send a cookie to all ports of a host
        self._revoked: dict[str, None] = {}  # cookies of those who have signed out; forgotten with this process
        self.renew(token)

    def renew(self, token: str) -> None:
        """This is the token from now on: whatever came of another one lets nobody in."""
        self._digest = hashlib.sha256(token.encode()).digest()
        self._signing = hmac.digest(token.encode(), self.cookie_name.encode(), "sha256")

    def is_token(self, said: bytes) -> bool:
        """Whether this is the token; takes as long whatever is wrong with it."""
        return hmac.compare_digest(hashlib.sha256(said).digest(), self._digest)

    def cookie(self, now: float | None = None) -> str:
        """A new cookie's value, which does not tell the token."""
        begun = f"v1.{int(time.time() if now is None else now) + COOKIE_S}.{secrets.token_hex(16)}"
        return f"{begun}.{self._sign(begun)}"

    def is_cookie(self, value: str, now: float | None = None) -> bool:
        """Whether it is a cookie of ours that has not run out."""
        found = _COOKIE.fullmatch(value)
        if found is None:
            return False
        ours = hmac.compare_digest(self._sign(value[: value.rindex(".")]), found[3])
        return ours and value not in self._revoked and int(found[1]) > (time.time() if now is None else now)

    def revoke(self, value: str) -> None:
        """Let this cookie, one of ours, be none any more as long as this process lives."""
        if self.is_cookie(value):
            self._revoked[value] = None
            if len(self._revoked) > MOST_REVOKED:
                del self._revoked[next(iter(self._revoked))]

    def _sign(self, text: str) -> str:
        return hmac.new(self._signing, text.encode(), hashlib.sha256).hexdigest()
