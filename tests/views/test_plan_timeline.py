"""Tests of the timeline of `plan`: it fits the terminal, has all jobs, and is plain ASCII where it must be."""

from __future__ import annotations

import xml.etree.ElementTree as xml
from dataclasses import replace

import pytest

from scheduler.client.outlook import Expectation, Moment, Outlook
from scheduler.core.job import Job, JobState
from scheduler.views import plan_timeline, terminal
from scheduler.views.plan_timeline import plan_lines, plan_svg
from tests.builders import a_job, some_gpus

NOW = 1_760_000_000.0
DAY = 86_400.0


def moment(at: float, before: float = 0.0, after: float | None = 0.0) -> Moment:
    return Moment(NOW + at, NOW + at - before, None if after is None else NOW + at + after)


def some_jobs() -> dict[int, Job]:
    """Return a job that runs, one whose end is not known, and two that wait, one with a hostile name."""
    jobs = {number: replace(a_job(number), state=JobState.RUNNING) for number in (1, 2)}
    jobs[3] = a_job(3, "2", label="一二三 <b>&\"'\n\x1b[31m")
    jobs[4] = a_job(4, "0.5")
    return jobs


OUTLOOK = Outlook(
    NOW,
    {
        1: Expectation(1, None, moment(7200, 3600, 2 * DAY), (0,), 7200.0, "its time limit"),
        2: Expectation(2, None, None, (1,)),
        3: Expectation(3, moment(2 * DAY, DAY, DAY), moment(3 * DAY, DAY, None), (0, 1), DAY, "its time limit"),
        4: Expectation(4, moment(0), moment(30), (0,), 30.0, "one run of the same script"),
    },
)


@pytest.mark.parametrize("width", [None, 40, 80, 120, 200])
def test_the_timeline_fits_the_terminal_and_has_all_jobs(monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
    monkeypatch.setattr(terminal, "width", lambda: width)
    lines = plan_lines(OUTLOOK, some_jobs(), 7)
    assert width is None or max(map(terminal.cells, lines)) <= width
    assert [line.split()[0] for line in lines[:5]] == ["JOB", "1", "2", "4", "3"]
    text = " ".join(" ".join(lines).split())
    assert "7 jobs wait without a prediction" in text
    if width is None or width >= 80:
        assert lines[0].split()[:4] == ["JOB", "NAME", "GPU", "STARTS"] and lines[0].endswith("ENDS")
        assert lines[2].endswith("not known") and lines[3].endswith("in 30 s") and "now" in lines[3]
        assert all("█" in line for line in lines[1:5])


def test_without_jobs_there_is_a_sentence() -> None:
    assert plan_lines(Outlook(NOW), {}, 0) == ["no job runs or waits"]
    assert plan_lines(Outlook(NOW), {}, 1)[0].startswith("1 job waits without a prediction: the start")


def test_in_a_c_locale_the_bars_are_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    text = "\n".join(plan_lines(OUTLOOK, some_jobs(), 0))
    assert text.isascii() and "####" in text and "# expected to run" in text and "\\u2588" not in text


def test_the_picture_is_valid_xml_and_hatches_jobs_that_wait() -> None:
    picture = xml.fromstring(plan_svg(OUTLOOK, some_jobs(), some_gpus(2)))
    rects = picture.iter("{http://www.w3.org/2000/svg}rect")
    classes = [one.get("class") for one in rects]
    assert (
        classes.count("runs") == 2
        and classes.count("later") == 3
        and "url(#hatched)" in plan_timeline.plan_svg(OUTLOOK, {}, [])
    )


def test_jobs_without_a_gpu_are_drawn_below_the_gpus() -> None:
    """Beside each other if they run at the same time, else in one row."""
    jobs = {number: a_job(number, "0") for number in (1, 2, 3)}
    times = {1: (0, 100), 2: (0, 300), 3: (200, 400)}
    rows = {one: Expectation(one, moment(first), moment(last), ()) for one, (first, last) in times.items()}
    picture = xml.fromstring(plan_svg(Outlook(NOW, rows), jobs, some_gpus(1)))
    texts = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    boxes = [one for one in picture.iter("{http://www.w3.org/2000/svg}rect") if one.get("class") == "later"]
    assert texts.count("no GPU") == 2 and len(boxes) == 3 and len({one.get("y") for one in boxes}) == 2
