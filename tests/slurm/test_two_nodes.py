"""The minimal configuration of docs/slurm, started on two network namespaces."""

from __future__ import annotations

import pytest

from tests import two_nodes
from tests.slurm.conftest import need_slurm


@pytest.mark.waits
def test_the_minimal_configuration_of_the_documents_runs_jobs_on_both_servers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    need_slurm()
    two_nodes.main()
    out = capfd.readouterr().out
    assert all(f"{node} idle gpu:a100:4,shard:" in out for node in ("server1", "server2"))
    assert out.count("done") == 4 and "server2 (job " in out and "server1 (job " in out
    whole = next(line.split() for line in out.splitlines() if line.startswith("2   done"))
    half = next(line.split() for line in out.splitlines() if line.startswith("1   done"))
    assert half[-3] != whole[-3], "a whole GPU and a share are on one GPU"
