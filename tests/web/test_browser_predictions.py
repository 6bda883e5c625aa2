"""Tests of predictions and offers on the pages, in a real browser: expected times, the predicted runs, and the buttons."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page as Tab
from playwright.sync_api import expect

from tests.stories.harness import wait_for
from tests.web.browsing import PATIENCE_MS, SMALL, UNNAMED, UUIDS, Lab, artefacts, browser, lab, press_to

__all__ = ["browser", "lab"]
expect.set_options(timeout=PATIENCE_MS)
CLOCK = re.compile(r"^(\d{4}-\d{2}-\d{2} )?\d{2}:\d{2}$")


@pytest.fixture
def full(lab: Lab) -> Iterator[tuple[list[int], int]]:
    """Jobs that run on all GPUs, and one that waits: (ids, id). After the test, all have been cancelled.

    They do not end by themselves: the scheduler would learn how short they are.
    """
    wait_for(lambda: all(gpu["state"] == "AVAILABLE" for gpu in lab.s.status()["gpus"]), "free GPUs")
    running = [lab.talker("never", time="1h", lines=3) for _ in UUIDS]
    for job in running:
        lab.s.wait_state(job, "running")
    waiting = lab.talker("never", time="30m", lines=3, label="later")
    yield running, waiting
    for job in (waiting, *running):
        lab.s.cli("cancel", str(job))
    for job in (*running, waiting):
        lab.s.wait_state(job, "cancelled")


def cell(tab: Tab, key: str, name: str) -> Any:
    return tab.locator(f'[data-key="{key}"] [data-th="{name}"] time')


def test_the_first_page_shows_expected_times_and_keeps_them_up_to_date(lab: Lab, full: tuple[list[int], int]) -> None:
    """Running jobs have an expected end and waiting jobs an expected start; the band is in the tooltip."""
    running, waiting = full
    with lab.tab() as tab:
        for job in running:
            expect(cell(tab, f"run-{job}", "expected end")).to_have_text(CLOCK)
        start = cell(tab, f"wait-{waiting}", "expected start")
        expect(start).to_have_text(CLOCK)
        expect(start).to_have_attribute("title", re.compile(r"^about "))
        expect(cell(tab, f"run-{running[0]}", "expected end")).to_have_attribute("title", re.compile("its time limit"))
        lab.s.cli("cancel", str(running[0]))
        expect(cell(tab, f"run-{waiting}", "expected end")).to_have_text(CLOCK)
        assert tab.evaluate(UNNAMED) == []


LONGEST = "about 2026-11-29 00:06 (2026-11-28 23:36 to 2026-11-29 00:24)"


def test_the_timeline_shows_predicted_runs_hatched_after_now(lab: Lab, full: tuple[list[int], int]) -> None:
    """The predicted run of a waiting job is a hatched bar after now, in the band of its GPU, as is the rest of a running job."""
    running, waiting = full
    with lab.tab("/timeline?hours=6") as tab:
        bar = tab.locator(f'svg.timeline a[href="/jobs/{waiting}"]')
        expect(bar).to_have_attribute(
            "aria-label", re.compile("waits, expected to start about .*, expected to end about")
        )
        for job in running:
            one = tab.locator(f'svg.timeline a[href="/jobs/{job}"]')
            expect(one).to_have_attribute("aria-label", re.compile("running, .* expected to end about"))
            expect(one.locator("svg.expected")).to_have_count(1)
        now = tab.locator("svg.timeline line.now").bounding_box()
        hatched = bar.locator("svg.expected rect").first
        box = hatched.bounding_box()
        assert now is not None and box is not None and box["x"] > now["x"] and box["width"] > 20
        assert hatched.get_attribute("fill") == "url(#p-expected)"
        expect(tab.locator(".legend-row")).to_contain_text("expected to run")
        tab.click("#h-expected")
        expect(tab.locator(f'#tl-list a[href="/jobs/{waiting}"]')).to_be_visible()
        assert tab.evaluate(UNNAMED) == []
        # Times of another day are told with their date: the longest text must fit, whatever the time of day is.
        tab.evaluate(f"document.querySelectorAll('td[data-th^=expected]').forEach(e => e.textContent = '{LONGEST}')")
        for width, scheme in itertools.product((360, 1280), ("light", "dark")):
            tab.set_viewport_size({"width": width, "height": 900})
            tab.emulate_media(color_scheme=scheme)
            over = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over <= 0, f"{over} px wider than {width}"
            shown = tab.evaluate("e => getComputedStyle(e).stroke", hatched.element_handle())
            assert shown not in ("none", "rgba(0, 0, 0, 0)")
            tab.screenshot(path=artefacts() / f"expected-{width}-{scheme}.png")
        tab.goto(f"{lab.page.url}/timeline?hours=6&end=1763815200")
        expect(tab.locator("svg.timeline .expected")).to_have_count(0)


def test_an_offer_is_carried_out_only_after_it_was_confirmed(lab: Lab, full: tuple[list[int], int]) -> None:
    """The page of a waiting job has a button for each offer. It asks, and names what will happen and the cost."""
    running, waiting = full
    with lab.tab(f"/jobs/{waiting}") as tab:
        part = tab.locator("#waits")
        expect(part).to_contain_text("place in the queue1 of 1")
        expect(part).to_contain_text(re.compile(rf"GPU 0jobs? {running[0]} holds 1 until about"))
        expect(part).to_contain_text(re.compile("expected startabout .* on GPU"))
        expect(part).to_contain_text("30 min 00 s (its time limit)")
        assert tab.evaluate(UNNAMED) == []
        for width in (360, 1280):
            tab.set_viewport_size({"width": width, "height": 900})
            over = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over <= 0, f"{over} px wider than {width}"
            tab.screenshot(path=artefacts() / f"offers-{width}.png")
            assert width > 360 or tab.evaluate(SMALL) == []
        asked = "SELECT count(*) FROM requests"
        before = lab.s.rows(asked)
        button = part.locator('button[data-key^="do gpujob cancel"]')
        ended = int((button.get_attribute("data-key") or "").split()[-1])
        assert ended in running
        press_to(tab, '#waits button[data-key^="do gpujob cancel"]')
        tab.keyboard.press("Enter")
        dialog = tab.locator("dialog")
        expect(dialog).to_contain_text(f"Start job {waiting} now? It cancels job {ended} (python talks.py")
        expect(dialog).to_contain_text(
            re.compile(rf"SIGTERM, then SIGKILL. Cost: ends job {ended}, which has run for \d+ s")
        )
        tab.keyboard.press("Enter")  # the focus is on No
        expect(dialog).to_be_hidden()
        expect(button).to_be_focused()
        assert lab.s.states()[ended] == "running" and lab.s.states()[waiting] == "pending"
        assert lab.s.rows(asked) == before
        tab.keyboard.press("Enter")
        press_to(tab, "dialog button[value=yes]")
        tab.keyboard.press("Enter")
        expect(tab.locator("#said")).to_contain_text(f"ob {ended}")
        expect(tab.locator("#job-head")).to_contain_text("running")
        expect(part.locator("button")).to_have_count(0)
        expect(tab.locator("#facts")).to_contain_text("expected end")
    assert lab.s.wait_state(ended, "cancelled")


def test_an_offer_that_costs_nobody_anything(lab: Lab) -> None:
    """A held job is offered its release; without scripts the command is shown."""
    wait_for(lambda: all(gpu["state"] == "AVAILABLE" for gpu in lab.s.status()["gpus"]), "free GPUs")
    lab.s.cli("queue", "pause")
    job = lab.talker("held", time="30m", lines=3)
    lab.s.cli("hold", str(job))
    lab.s.cli("queue", "resume")
    with lab.tab(f"/jobs/{job}", java_script_enabled=False) as tab:
        expect(tab.locator("#waits tbody th")).to_have_text(f"gpujob release {job}")
        assert tab.locator("#waits button:visible").count() == 0
    with lab.tab(f"/jobs/{job}") as tab:
        tab.click("#waits button")
        expect(tab.locator("dialog")).to_contain_text(f"It releases job {job}. Cost: it was held by its owner.")
        tab.click('dialog >> text="Yes"')
        expect(tab.locator("#job-head")).to_contain_text("running")
    lab.s.cli("cancel", str(job))
    lab.s.wait_state(job, "cancelled")


def test_the_preview_of_a_submission_tells_the_expected_times(lab: Lab, full: tuple[list[int], int]) -> None:
    with lab.tab("/submit") as tab:
        tab.fill("#f-command", "true")
        tab.fill("#f-time", "1h")
        preview = tab.locator("#preview")
        expect(preview).to_contain_text("It would wait")
        expect(preview).to_contain_text(re.compile(r"expected start: in (about )?\d+ (min|h)"))
        expect(preview).to_contain_text(re.compile(r"expected end: in (about )?\d+ (min|h)"))
        expect(preview).to_contain_text("expected run time: 1 h 00 min (its time limit)")
