"""The start of the daemon on a cluster that does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.core.config import Config
from scheduler.core.errors import NoGpuData
from scheduler.daemon import cluster
from scheduler.daemon.cluster import ClusterLink
from scheduler.store.database import Database
from scheduler.store.paths import Places


def test_the_wait_for_an_engine_shows_why_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P9: A wrong address or token is told after seconds, not only when the start gives up."""
    monkeypatch.setattr(cluster, "SLOW_S", 0.3)
    monkeypatch.setattr(cluster, "FIRST_LIMIT_S", 0.6)
    places = Places(str(tmp_path / "state.json"))
    database = Database(places)
    config = Config(engine="ray", engine_url="http://127.0.0.1:1")
    link = ClusterLink(lambda: config, {}, places)
    said: list[str] = []
    try:
        with pytest.raises(NoGpuData, match=r"Ray does not answer at .* refused"):
            link.managed(database.connection, said.append, lambda: None)
    finally:
        link.runner.close()
        database.close()
    assert said == [
        "Ray does not answer at http://127.0.0.1:1: [Errno 111] Connection refused; waiting for an answer …"
    ]
