"""A soak test with few jobs; `make soak` runs the long form."""

from __future__ import annotations

import os

import pytest

from tests.soak.run import soak
from tests.stories.harness import LONG


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_soak_500_jobs_under_20_daemon_kills_and_5_supervisor_or_shim_kills():
    """S3.35, P1 to P8, and invariants 1 to 7, 9 and 10 of the fault list hold during a soak test.

    docs/reliability.md, section "The soak", says what the judge checks. The soak test has 500 jobs, 20 kills of the
    daemon, and 5 kills of a supervisor or shim. The long form has 3,000 jobs, 60 kills of the daemon, and 15 kills of a
    supervisor or shim. `make soak` has 10,000 jobs, 200 kills of the daemon, and 50 kills of a supervisor or shim.
    """
    seed = int(os.environ.get("GPUJOB_SEED", "20261121"))
    print(f"seed {seed}")
    jobs, daemons, supervisors, seconds = (3_000, 60, 15, 400) if LONG else (500, 20, 5, 45)
    print(soak(seed, jobs, daemons, supervisors, seconds).table())
