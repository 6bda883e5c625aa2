"""Tests of the texts that pages show about jobs."""

from __future__ import annotations

from scheduler.core.job import Event
from scheduler.web.view_models import story
from tests.builders import a_job


def test_the_event_history_does_not_repeat_the_job_in_each_line() -> None:
    """The sentences of events begin without the job's id and name, also if the name has a control character."""
    for name in ("train", "tr\x1bain"):
        told = [text for _, text in story(a_job(7, label=name), [Event(7, 1.0, "started", {"gpus": [0], "pid": 12})])]
        assert told[1:] == ["runs on GPU 0, pid 12"]
