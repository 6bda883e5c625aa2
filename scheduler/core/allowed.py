"""The GPUs that a job may use: a list of GPU ids, or, on a cluster, names of nodes and types of GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Union

from scheduler.core.errors import BACKWARDS, Refused, UsageError
from scheduler.core.gpu import Gpu, gpu_ids_text, mask_of, named_gpus, parse_gpu_ids

# GPU ids, or the words that a user wrote (such as "node2" or "type=a100"); None: any GPU.
Allowed = Union[tuple[int, ...], tuple[str, ...], None]

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,127}|\d+\.\d+\.\d+\.\d+|type=[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}", re.ASCII)
TYPE = "type="


def parse_allowed(text: str, words: bool = True) -> Allowed:
    """Read a list of GPU ids such as ``0-3``, or, if ``words`` is true, nodes and types such as ``node2,type=a100``.

    An empty text gives None. Raises UsageError if the text is no such list, and Refused for a GPU id that is too high.
    """
    try:
        return parse_gpu_ids(text)
    except Refused:
        raise
    except UsageError as error:
        pieces = tuple(dict.fromkeys(piece.strip() for piece in text.split(",")))
        if error.code == BACKWARDS or not words or not all(map(_WORD.fullmatch, pieces)):
            raise
        return pieces


def is_words(allowed: Allowed) -> bool:
    """Return whether the list names nodes or types, which only a cluster has."""
    return bool(allowed) and isinstance(allowed[0], str) if allowed else False


def check_words(allowed: Allowed, has_nodes: bool) -> None:
    """Raise Refused if the list names nodes or types although there is no cluster. ``has_nodes``: there is one."""
    if is_words(allowed) and not has_nodes:
        raise Refused(
            f"{allowed_text(allowed)} is no list of GPU ids",
            do="write 2 or 0,2 or 0-3 (nodes and types are known while a scheduler runs with --engine slurm or ray)",
        )


def allowed_text(allowed: Allowed) -> str:
    """Return the list as a text that `parse_allowed` reads; empty for None."""
    if not allowed:
        return ""
    return ",".join(map(str, allowed)) if isinstance(allowed[0], str) else gpu_ids_text(map(int, allowed))


def named_allowed(allowed: Allowed) -> str:
    """Return the list as a noun for messages: ``GPUs 0,2``, ``node2``, ``GPUs of type a100 on node2``."""
    if not is_words(allowed):
        return named_gpus(tuple(map(int, allowed or ())))
    nodes, types = nodes_and_types(allowed)
    on_nodes = " or ".join(nodes)
    if not types:
        return on_nodes
    return f"GPUs of type {' or '.join(types)}" + (f" on {on_nodes}" if nodes else "")


def nodes_and_types(allowed: Allowed) -> tuple[list[str], list[str]]:
    """Return the nodes and the types that a list of words names."""
    words = [str(word) for word in allowed or ()]
    types = [word[len(TYPE) :] for word in words if word.startswith(TYPE)]
    return [word for word in words if not word.startswith(TYPE)], types


def allowed_mask(allowed: Allowed, gpus: Iterable[Gpu]) -> int:
    """Return the mask of the GPUs that the list allows.

    If the list names nodes, a GPU must be on one of them; if it names types, it must have one of them.
    """
    if allowed is None:
        return mask_of(gpu.index for gpu in gpus)
    if not is_words(allowed):
        ids = frozenset(map(int, allowed))
        return mask_of(gpu.index for gpu in gpus if gpu.index in ids)
    nodes, types = nodes_and_types(allowed)
    return mask_of(gpu.index for gpu in gpus if (not nodes or gpu.node in nodes) and (not types or gpu.name in types))
