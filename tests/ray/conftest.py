"""A real Ray in two network namespaces, for the tests of this folder; only `make test-ray` collects them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.namespaces import Hosts

RAY = os.environ.get("GPUJOB_TEST_RAY", "")  # path of the program `ray`
PORT = 8265
collect_ignore_glob = [] if RAY else ["test_*.py"]


class RayCluster:
    """A head and a node of Ray, with a token, each in a namespace of its own."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.token = folder / "token"
        self.token.touch(0o600)
        self.token.write_text("a-token-for-this-test-only-0123456789")
        self.environ = {
            **os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token),
        }  # fmt: skip
        self.environ.pop("PYTHONPATH", None)

    def ray(self, host: int, *words: str) -> None:
        done = subprocess.run(
            [*self.hosts.enter(host), RAY, *words], env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        common = ("--disable-usage-stats", "--num-cpus=8")
        self.ray(1, "start", "--head", "--port=6399", f"--node-ip-address={Hosts.address(1)}", "--num-gpus=4", "--node-name=n1",
                 "--dashboard-host=127.0.0.1", f"--dashboard-port={PORT}", f"--temp-dir={self.folder}/t", *common)  # fmt: skip
        self.ray(2, "start", f"--address={Hosts.address(1)}:6399", f"--node-ip-address={Hosts.address(2)}", "--num-gpus=2",
                 "--node-name=n2", *common)  # fmt: skip

    def kill_head(self) -> None:
        """Kill the processes of the head (SIGKILL): those of the control store and of the dashboard."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes()
                if str(self.folder).encode() in words and (
                    b"gcs_server" in words or b"dashboard/dashboard.py" in words
                ):
                    os.kill(int(path.name), signal.SIGKILL)

    def stop(self) -> None:
        for host in (2, 1):
            subprocess.run(
                [*self.hosts.enter(host), RAY, "stop", "-f"], env=self.environ, capture_output=True, check=False
            )


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="gjray-"))
    with Hosts(2) as hosts:
        made = RayCluster(hosts, folder)
        try:
            made.start()
            yield made
        finally:
            made.stop()
    shutil.rmtree(folder, ignore_errors=True)
