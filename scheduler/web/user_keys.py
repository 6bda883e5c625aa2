"""Authentication when each user has a token of their own: the tokens, and the keys that check them (`gpujob token`)."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pwd
import secrets
import time
from collections.abc import Mapping

from scheduler.core.errors import SchedulerError
from scheduler.store.paths import Places
from scheduler.system.atomic_files import replace_file
from scheduler.system.safe_open import plain
from scheduler.web.auth import FEWEST, Key

LARGEST = 1 << 20  # bytes of the file
NAME_S = 60.0  # how long the name of a user is remembered: a name service may be slow
_names: dict[int, tuple[float, str]] = {}  # user id → when looked up, name


def tokens_file(places: Places) -> str:
    """Return the path of the file with the hashes of the tokens, which only the service user can read."""
    return os.path.join(places.state_dir, "web-tokens.json")


def read_tokens(path: str) -> dict[int, bytes]:
    """Return user id → SHA-256 of the user's token; empty if there is no file. Raises SchedulerError.

    The token of a deleted user does not count once another user has the id.
    """
    return {uid: digest for uid, (name, digest) in _tokens_in(path).items() if _known_name(uid) in (name, "")}


def _known_name(uid: int) -> str:
    """Return the name of a user as it was found at most a minute ago; empty if it is not known now."""
    at, name = _names.get(uid, (-NAME_S, ""))
    if time.monotonic() - at >= NAME_S:
        name = _name_of(uid)
        _names[uid] = (time.monotonic(), name)
    return name


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _tokens_in(path: str) -> dict[int, tuple[str, bytes]]:
    """Return user id → name of the user and SHA-256 of the token. Raises SchedulerError."""
    try:
        with open(path, "rb", opener=plain) as stream:
            found = json.loads(stream.read(LARGEST))
        return {int(uid): (str(one[0]), bytes.fromhex(one[1])) for uid, one in found.items() if isinstance(one, list)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise SchedulerError(f"cannot read the tokens: {error}", where=path) from None


def new_token(path: str, uid: int) -> str:
    """Return a new token for a user; the previous one is no longer accepted. Only its hash is stored.

    The caller makes sure that no other thread or process does the same at this time. Raises SchedulerError, OSError.
    """
    token = secrets.token_urlsafe(FEWEST)
    found = _tokens_in(path) | {uid: (_name_of(uid), hashlib.sha256(token.encode()).digest())}
    replace_file(path, json.dumps({str(one): [name, digest.hex()] for one, (name, digest) in found.items()}).encode())
    return token


class UserKey(Key):
    """The key of one user. ``secret``: signs the cookies; it is in memory only, so nobody can make a cookie from a file."""

    def __init__(self, digest: bytes, port: int, secret: bytes) -> None:
        super().__init__("", port)
        self._digest, self._signing = digest, hmac.digest(secret, digest, "sha256")


class UserKeys:
    """The keys of all users. To the gate it is what `auth.Key` is for a page with one token."""

    def __init__(self, port: int) -> None:
        self._port, self._secret = port, secrets.token_bytes(32)
        self.cookie_name = f"gpujob_{port}"
        self._digests: dict[int, bytes] = {}
        self._keys: dict[int, UserKey] = {}

    def renew(self, digests: Mapping[int, bytes]) -> set[int]:
        """Use these hashes of tokens: user id → hash. Return the users whose tokens have changed or are gone."""
        changed = {uid for uid, digest in self._digests.items() if digests.get(uid) != digest}
        for uid in changed:
            del self._keys[uid]
        self._digests = dict(digests)
        for uid, digest in digests.items():
            if uid not in self._keys:
                self._keys[uid] = UserKey(digest, self._port, self._secret)
        return changed

    def user_of_token(self, said: bytes) -> int | None:
        """Return the user whose token this is; None if it is nobody's. Each comparison takes constant time."""
        found = [uid for uid, key in self._keys.items() if key.is_token(said)]
        return found[0] if found else None

    def user_of_cookie(self, value: str) -> int | None:
        """Return the user who got this cookie; None if it is not valid."""
        found = [uid for uid, key in self._keys.items() if key.is_cookie(value)]
        return found[0] if found else None

    def cookie_for(self, user: int) -> str:
        """Return the value of a new cookie for a user."""
        return self._keys[user].cookie()

    def revoke(self, value: str) -> None:
        """Revoke a cookie of whichever user."""
        for key in self._keys.values():
            key.revoke(value)
