"""The cluster that the last daemon recorded, and its ledger."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.core.engine_placement import EngineFleet, EngineRules
from scheduler.core.gpu import Gpu
from scheduler.core.placement import Fleet
from scheduler.store import jobs as rows

KEY = "cluster"  # in `meta`


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster: ``engine`` (slurm or ray), the rules of its ledger, and the number of CPUs of all nodes."""

    engine: str
    rules: EngineRules
    cpus: int


def save_cluster(connection: sqlite3.Connection, cluster: Cluster | None) -> None:
    """Record the cluster of this daemon; None: jobs run on this machine."""
    text = ""
    if cluster is not None:
        rules = cluster.rules
        text = json.dumps([cluster.engine, rules.name, rules.shards, rules.ignore_ids, cluster.cpus])
    rows.set_meta(connection, KEY, text)


def cluster_of(connection: sqlite3.Connection) -> Cluster | None:
    """Return the cluster that the last daemon recorded; None if jobs run on this machine."""
    text = rows.meta(connection, KEY)
    if not text:
        return None
    engine, name, shards, ignore_ids, cpus = json.loads(text)
    return Cluster(engine, EngineRules(name, shards, ignore_ids), cpus)


def fleet_of(connection: sqlite3.Connection, gpus: Sequence[Gpu], cpu_slots: int, retired: Iterable[int] = ()) -> Fleet:
    """Return a ledger of these GPUs without bookings: of this machine, or of the cluster of the last daemon."""
    cluster = cluster_of(connection)
    if cluster is None:
        return Fleet(gpus, cpu_slots, retired)
    return EngineFleet(gpus, cluster.rules, cpu_slots, retired)
