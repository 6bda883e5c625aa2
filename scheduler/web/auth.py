"""Authentication: the token file, and the cookies that browsers get in exchange for the token."""

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

FEWEST = 32  # least number of characters of a token
MOST_BYTES = 4096
COOKIE_S = 7 * 86400
MOST_REVOKED = 10_000
_TOKEN = re.compile(r"[\x21-\x7e]+", re.ASCII)
_COOKIE = re.compile(r"v1\.([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})", re.ASCII)


def token_of(places: Places) -> str:
    """Return the token of this scheduler's web page; if its file is missing, create it (mode 0600, atomically).

    Raises SchedulerError if the file cannot be read or written, holds no valid token, or is accessible to other users.
    """
    try:
        return _read(places.web_token)
    except FileNotFoundError:
        places.make()
    try:
        swap_file(places.web_token, secrets.token_urlsafe(FEWEST).encode() + b"\n", there=False, sync=True)
    except FileExistsError:
        return _read(places.web_token)  # another process has just created it
    except OSError as error:
        raise SchedulerError(f"cannot write the token: {error.strerror}", where=places.web_token) from None
    return _read(places.web_token)


def _read(path: str) -> str:
    """Return the token in this file. Raises FileNotFoundError if there is no such file.

    Raises SchedulerError if the file cannot be read, holds no valid token, or is not a private regular file of this
    user.
    """

    def refused(what: str) -> SchedulerError:
        return SchedulerError(what, where=path, do="remove the file; gpujob web creates a new token")

    try:
        fd = plain(path, os.O_RDONLY)
    except FileNotFoundError:
        raise
    except OSError:
        raise refused("cannot use the token file: it is a link, is not a regular file or is unreadable") from None
    try:
        status = os.fstat(fd)
        data = os.pread(fd, MOST_BYTES, 0)
    except OSError as error:
        raise SchedulerError(f"cannot read the token: {error.strerror}", where=path) from None
    finally:
        os.close(fd)
    if status.st_uid != os.getuid():
        raise refused(f"cannot use the token file: it belongs to user {name_of(status.st_uid)}")
    if status.st_mode & 0o7777 & ~stat.S_IRWXU:
        raise refused(
            f"cannot use the token file: other users have access to it (mode {status.st_mode & 0o7777:o}, not 600)"
        )
    text = data.decode("latin-1").strip()
    if len(text) < FEWEST or len(data) == MOST_BYTES or not _TOKEN.fullmatch(text):
        raise refused(f"cannot use the token file: it must contain one word of at least {FEWEST} characters")
    return text


class Key:
    """The token. An object of this class checks tokens, and issues, checks and revokes cookies.

    A cookie is signed with a key that is made from the token and the port. A cookie therefore stays valid if `gpujob
    web` is started again on the same port with the same token.
    """

    def __init__(self, token: str, port: int) -> None:
        self.cookie_name = f"gpujob_{port}"  # with the port, because browsers send a cookie to all ports of a host
        self._revoked: dict[str, None] = {}  # cookies of users who signed out; kept in memory only
        self.renew(token)

    def renew(self, token: str) -> None:
        """Replace the token. The previous token and its cookies are no longer accepted."""
        self._digest = hashlib.sha256(token.encode()).digest()
        self._signing = hmac.digest(token.encode(), self.cookie_name.encode(), "sha256")

    def is_token(self, said: bytes) -> bool:
        """Return whether ``said`` is the token. The comparison takes constant time."""
        return hmac.compare_digest(hashlib.sha256(said).digest(), self._digest)

    def user_of_token(self, said: bytes) -> int | None:
        """Return 0, the only user of this page, if ``said`` is the token; else None."""
        return 0 if self.is_token(said) else None

    def user_of_cookie(self, value: str) -> int | None:
        """Return 0, the only user of this page, if the cookie is valid; else None."""
        return 0 if self.is_cookie(value) else None

    def cookie_for(self, user: int) -> str:
        """Return the value of a new cookie."""
        return self.cookie()

    def cookie(self, now: float | None = None) -> str:
        """Return the value of a new cookie. ``now``: the present time in seconds since 1970 (default: the clock).

        The token cannot be computed from a cookie.
        """
        begun = f"v1.{int(time.time() if now is None else now) + COOKIE_S}.{secrets.token_hex(16)}"
        return f"{begun}.{self._sign(begun)}"

    def is_cookie(self, value: str, now: float | None = None) -> bool:
        """Return whether this cookie was issued for this token and port, and has neither expired nor been revoked."""
        found = _COOKIE.fullmatch(value)
        if found is None:
            return False
        ours = hmac.compare_digest(self._sign(value[: value.rindex(".")]), found[3])
        return ours and value not in self._revoked and int(found[1]) > (time.time() if now is None else now)

    def revoke(self, value: str) -> None:
        """Revoke a cookie. Does nothing if the cookie is not valid.

        Revoked cookies are kept only in the memory of this process, at most `MOST_REVOKED` of them; the oldest are
        dropped. A dropped cookie is accepted again until it expires.
        """
        if self.is_cookie(value):
            self._revoked[value] = None
            if len(self._revoked) > MOST_REVOKED:
                del self._revoked[next(iter(self._revoked))]

    def _sign(self, text: str) -> str:
        return hmac.new(self._signing, text.encode(), hashlib.sha256).hexdigest()
