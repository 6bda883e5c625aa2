"""When two lines or commands are the same job: script, arguments in order, environment."""

from __future__ import annotations

import hashlib

from scheduler.core.job import JobSpec


def identity_of(spec: JobSpec) -> str:
    """32 hex digits over script path, words and environment; priority and GPU list do not count.

    Fields are separated by NUL bytes, which none of them can hold, so they never run together.
    """
    words = [spec.script, spec.conda_env, *spec.arguments]
    return hashlib.blake2b("\0".join(words).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
