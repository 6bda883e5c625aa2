"""The identity of a job: two lines with equal script, arguments (in order) and environment are the same job."""

from __future__ import annotations

import hashlib

from scheduler.core.job import JobSpec


def identity_of(spec: JobSpec) -> str:
    """Return a hash of script path, conda environment and arguments: 32 hex digits. Priority and GPU list do not count.

    In a scheduler of several users, the user counts: equal lines of two users are two jobs.
    The fields are separated by NUL bytes before the text is hashed. No field can contain a NUL byte, so different
    fields never give the same text.
    """
    words = [spec.script, spec.conda_env, *spec.arguments]
    if spec.uid is not None:
        words.append(f"\0user {spec.uid}")
    return hashlib.blake2b("\0".join(words).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
