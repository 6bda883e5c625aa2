"""Tests of the settings that limit how many logs and ended jobs are kept."""

from __future__ import annotations

import pytest

from scheduler.core.config import read_option
from scheduler.core.errors import UsageError
from scheduler.core.retention import Keep, keep_finished, keep_logs, size_text


@pytest.mark.parametrize(
    ("text", "keep"),
    [
        ("", Keep()),
        ("  ", Keep()),
        ("30d", Keep(None, 30 * 86400)),
        ("20G", Keep(20 << 30)),
        ("20g", Keep(20 << 30)),
        ("1.5GiB", Keep(3 << 29)),
        ("512KB", Keep(512 << 10)),
        ("30m", Keep(None, 1800)),
        ("30M", Keep(30 << 20)),
        ("30d 20G", Keep(20 << 30, 30 * 86400)),
        ("20G, 1h30m", Keep(20 << 30, 5400)),
    ],
)
def test_limits_for_logs_are_read(text: str, keep: Keep) -> None:
    assert keep_logs(text) == keep and bool(keep) == bool(text.strip())


@pytest.mark.parametrize(
    ("text", "keep"),
    [("", Keep()), ("10000", Keep(10_000)), ("90d", Keep(None, 90 * 86400)), ("90d 10", Keep(10, 90 * 86400))],
)
def test_limits_for_finished_jobs_are_read(text: str, keep: Keep) -> None:
    assert keep_finished(text) == keep


@pytest.mark.parametrize(
    "text", ["30", "0d", "0G", "30d 40d", "1G 2G", "d", "G", "-3d", "3x", "1e9G", "³G", "all", "9" * 60]
)
def test_invalid_limits_for_logs_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        keep_logs(text)
    assert "write 30d, 20G or 30d 20G" in str(caught.value)


@pytest.mark.parametrize("text", ["0", "0s", "10 20", "1d 2d", "20G", "-1", "1.5", "²"])
def test_invalid_limits_for_finished_jobs_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        keep_finished(text)


def test_limits_in_yaml_are_read_or_refused() -> None:
    """The limits are read from the values of a YAML file. A value of the wrong type is refused."""
    assert read_option("keep_finished", 10000, "x") == "10000" and read_option("keep_logs", None, "x") == ""
    assert read_option("keep_logs", " 30d,  20G", "x") == "30d 20G"
    for value in (True, ["30d"], {"age": 1}, 30):
        with pytest.raises(UsageError, match="keep_logs"):
            read_option("keep_logs", value, "config.yaml")


def test_sizes_are_written_with_a_unit() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 5 << 19, 3 << 30, 1 << 40)] == [
        "0 bytes", "1023 bytes", "1 KB", "2.5 MB", "3 GB", "1 TB",
    ]  # fmt: skip
