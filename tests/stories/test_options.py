"""Options and defaults of `start`, and the Python version and GPU libraries that it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stories.harness import wait_for

DEFAULTS = {
    "--gpus": "", "--jobs-file": "jobs.txt", "--llm-config": "llm_config.json",
    "--state-file": "", "--screen": "", "--mem-threshold": "0.8", "--load-threshold": "0.8", "--monitor-interval": "30",
    "--state-interval": "20", "--max-assign-attempts": "5", "--assign-retry-wait": "5",
}  # fmt: skip


def test_s3_1_start_takes_the_documented_options_with_their_defaults(scheduler: Any) -> None:
    """S3.1: `start` has the documented options and defaults, and applies the values given.

    ``--state-file`` works before and after the verb.
    """
    s = scheduler()
    said = s.cli("start", "--help").stdout
    for option, default in DEFAULTS.items():
        line = re.search(rf"{option}\b.*(?:\n(?!\s+--).*)*", said)
        assert line, f"{option} is not in the help"
        assert f"[{default}" in line[0].replace("\n", " ") or not default, line[0]
    s.settings.update(
        jobs_file="mine.txt", llm_config="models.json", mem_threshold=0.9, load_threshold=0.7, monitor_interval=5,
        state_interval=4, max_assign_attempts=2, assign_retry_wait=1, state_file="other.json",
    )  # fmt: skip
    (s.folder / "models.json").write_text('{"models": {"small": 0.5}}')
    (s.folder / "mine.txt").write_text(s.line("a", more="--llm small") + "\n")
    s.start()
    for words in (
        ("--state-file", "other.json", "status", "--json"),
        ("status", "--json", "--state-file", "other.json"),
    ):
        assert '"alive": true' in s.cli(*words).stdout
    known = lambda: s.cli("--state-file", "other.json", "show", "1", code=None).returncode == 0  # noqa: E731
    wait_for(known, "the line is read")
    done = s.cli("--state-file", "other.json", "wait", "1")
    assert done.returncode == 0
    assert '"need": 0.5' in s.cli("--state-file=other.json", "show", "1", "--json").stdout


@pytest.mark.parametrize("option", ["mem-threshold", "load-threshold"])
@pytest.mark.parametrize("value", ["1.5", "-1", "much"])
def test_s3_1_a_threshold_outside_0_to_1_is_refused(scheduler: Any, option: str, value: str) -> None:
    """S3.1: `start` refuses a threshold outside 0 to 1 with exit code 2 and one line."""
    done = scheduler().cli("start", "--gpus", "1", f"--{option}={value}", code=2)
    assert (
        done.stderr.startswith(f"gpujob: --{option}: must be a share between 0 and 1, not {value};")
        and done.stderr.count("\n") == 1
    )


def test_s3_43_the_scheduler_runs_without_gputil_and_without_nvml(scheduler: Any, tmp_path: Path) -> None:
    """S3.43: Without GPUtil and pynvml, the scheduler starts and runs jobs on declared GPUs."""
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    for name in ("GPUtil", "pynvml"):
        (shadow / f"{name}.py").write_text("raise ImportError('not installed, for this test')\n")
    s = scheduler()
    s.environ["PYTHONPATH"] = f"{shadow}:{s.environ['PYTHONPATH']}"
    s.start()
    s.append(s.line("a"))
    assert s.wait_ended(1) == {1: "done"}


def test_s3_43_python_3_10_is_declared_as_the_oldest_version() -> None:
    """S3.43: pyproject.toml and the Makefile name Python 3.10 as the oldest version."""
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in text
    assert sys.version_info >= (3, 10)
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    assert "gpujob needs Python 3.10 or newer" in makefile


def test_s3_43_importing_the_daemon_loads_no_gpu_library() -> None:
    """S3.43: Importing the daemon loads neither GPUtil nor pynvml nor distutils."""
    code = "import sys, scheduler.daemon.process; print([m for m in ('GPUtil', 'pynvml', 'distutils') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
