"""The GPUs that a job may use: a list of GPU ids, or, on a cluster, names of nodes and types of GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from scheduler.core.errors import BACKWARDS, Refused, UsageError
from scheduler.core.gpu import Gpu, gpu_ids_text, mask_of, named_gpus, parse_gpu_ids

# Ids of GPUs; or nodes and types as a user wrote them, such as "node2" and "type=a100"; None: any GPU.
Allowed = tuple[int | str, ...] | None

_NODE_OR_TYPE = re.compile(
    r"[A-Za-z][A-Za-z0-9_.-]{0,127}|\d+\.\d+\.\d+\.\d+|type=[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}", re.ASCII
)
TYPE = "type="


def parse_allowed(text: str, cluster: bool = True) -> Allowed:
    """Read a list of GPU ids such as ``0-3``. If ``cluster`` is true, also read nodes and types: ``node2,type=a100``.

    An empty text gives None. Raises UsageError if the text is no such list, and Refused for a GPU id that is too high.
    """
    try:
        return parse_gpu_ids(text)
    except Refused:
        raise
    except UsageError as error:
        pieces = tuple(dict.fromkeys(piece.strip() for piece in text.split(",")))
        if error.code == BACKWARDS or not cluster or not all(map(_NODE_OR_TYPE.fullmatch, pieces)):
            raise
        return pieces


def names_nodes(allowed: Allowed) -> bool:
    """Return whether the list names nodes or types instead of GPU ids. Only a cluster has nodes and types."""
    return allowed is not None and len(allowed) > 0 and isinstance(allowed[0], str)


def check_nodes(allowed: Allowed, has_nodes: bool) -> None:
    """Raise Refused if the list names nodes or types and ``has_nodes`` is false, because jobs run on this machine."""
    if names_nodes(allowed) and not has_nodes:
        raise Refused(
            f"{allowed_text(allowed)} is no list of GPU ids",
            do="write 2 or 0,2 or 0-3 (nodes and types are known while a scheduler runs with --engine slurm or ray)",
        )


def allowed_text(allowed: Allowed) -> str:
    """Return a text from which `parse_allowed` reads this list; empty for None."""
    if allowed is None:
        return ""
    return ",".join(map(str, allowed)) if names_nodes(allowed) else gpu_ids_text(map(int, allowed))


def named_allowed(allowed: Allowed) -> str:
    """Return words that name the allowed GPUs in a message: ``GPUs 0,2``, ``node2``, ``GPUs of type a100 on node2``."""
    if not names_nodes(allowed):
        return named_gpus(tuple(map(int, allowed or ())))
    nodes, types = nodes_and_types(allowed)
    on_nodes = " or ".join(nodes)
    if not types:
        return on_nodes
    return f"GPUs of type {' or '.join(types)}" + (f" on {on_nodes}" if nodes else "")


def nodes_and_types(allowed: Allowed) -> tuple[list[str], list[str]]:
    """Return the nodes and the types that the list names; two empty lists if it names GPU ids or is None."""
    named = [str(name) for name in allowed or ()] if names_nodes(allowed) else []
    types = [name[len(TYPE) :] for name in named if name.startswith(TYPE)]
    return [name for name in named if not name.startswith(TYPE)], types


def allowed_mask(allowed: Allowed, gpus: Iterable[Gpu]) -> int:
    """Return the mask of those of ``gpus`` that the list allows.

    If the list names nodes, a GPU must be on one of them; if it names types, it must have one of them.
    """
    if allowed is None:
        return mask_of(gpu.index for gpu in gpus)
    if not names_nodes(allowed):
        ids = frozenset(map(int, allowed))
        return mask_of(gpu.index for gpu in gpus if gpu.index in ids)
    nodes, types = nodes_and_types(allowed)
    return mask_of(gpu.index for gpu in gpus if (not nodes or gpu.node in nodes) and (not types or gpu.name in types))
