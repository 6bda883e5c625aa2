"""Tests of the pages in a real browser: signing in, reading and acting by mouse, by keyboard and without scripts."""

from __future__ import annotations

import itertools
import re
import time
from html.parser import HTMLParser
from typing import Any

import pytest
from playwright.sync_api import Page as Tab
from playwright.sync_api import expect

from scheduler.client.client import SchedulerClient
from scheduler.core.job import JobSpec
from scheduler.core.model_table import ModelTable
from tests.stories.harness import wait_for
from tests.stories.test_payloads import PAYLOADS
from tests.web.browsing import PATIENCE_MS, SMALL, UNNAMED, UUIDS, Lab, artefacts, browser, lab, press_to

__all__ = ["browser", "lab"]
expect.set_options(timeout=PATIENCE_MS)
RAN = "window.ran"
XSS = [
    "<script>window.ran=1</script>", "<img src=x onerror=window.ran=1>", "\"><svg onload=window.ran=1>", "'onmouseover='window.ran=1",
    "javascript:window.ran=1", "</pre><script>window.ran=1</script>", "</title><script>window.ran=1</script>", "{{7*7}}", "{% raw %}", "<iframe src=//evil.test>",
    "<a href=javascript:window.ran=1>x</a>", "<style>@import '//evil.test'</style>", "<base href=//evil.test/>", "<form action=//evil.test><button>x",
    "<link rel=stylesheet href=//evil.test>", "<meta http-equiv=refresh content=0;url=//evil.test>", "&lt;script&gt;", "<!--", "]]>", "`${window.ran=1}`",
]  # fmt: skip
PAGES = (
    "/",
    "/jobs",
    "/timeline?hours=1",
    "/heatmap?measure=booked",
    "/submit",
    "/report?since=all",
    "/users",
    "/needs",
)


def row(tab: Tab, job: int) -> Any:
    """Return the locator of a job's row on the page Now, in any of its tables."""
    return tab.locator(f'[data-key="run-{job}"], [data-key="wait-{job}"], [data-key="end-{job}"]')


def test_the_form_signs_in_with_the_right_token_only(lab: Lab) -> None:
    with lab.context(signed_in=False) as context:
        tab = context.new_page()
        tab.goto(lab.page.url)
        expect(tab.locator("#gpus")).to_have_count(0)
        tab.fill("input[name=token]", "wrong" * 10)
        tab.keyboard.press("Enter")
        expect(tab.locator("input[name=token]")).to_be_visible()
        expect(tab.locator("#gpus")).to_have_count(0)
        tab.fill("input[name=token]", lab.page.token)
        tab.keyboard.press("Enter")
        expect(tab.locator("#gpus .card")).to_have_count(len(UUIDS))
        assert lab.page.token not in tab.url
        tab.click("text=Sign out")
        expect(tab.locator("input[name=token]")).to_be_visible()


@pytest.mark.smoke
def test_a_job_added_to_the_jobs_file_appears_without_a_reload(lab: Lab) -> None:
    """A job added to the jobs file appears on the page without a reload; the test prints the delay (target: 2 s)."""
    with lab.tab() as tab:
        expect(tab.locator("#live")).to_have_text("live")
        number = (lab.s.rows("SELECT max(id) FROM jobs")[0][0] or 0) + 1
        begun = time.monotonic()
        lab.s.append(f"0,{lab.folder}/talks.py,,3 {lab.folder}/end-echo;gpus=0.5;cuda=none")
        expect(row(tab, number)).to_be_visible()
        print(f"\na job was on the page {time.monotonic() - begun:.2f} s after echo")
        expect(row(tab, number)).to_contain_text("running")
        lab.let_end("echo")
        expect(row(tab, number)).to_contain_text("done")
        expect(row(tab, number)).to_contain_text("exit 0")


def test_s2_4_a_running_job_can_be_followed_searched_and_cancelled(lab: Lab) -> None:
    """S2.4, S2.9: The page of a running job follows the job's log and shows its pid.

    If the user presses the cancel button, the page asks for confirmation before the job is ended.
    """
    job = lab.talker("follow", label="follow-me")
    lab.s.wait_state(job, "running")
    with lab.tab(f"/jobs/{job}") as tab:
        log = tab.locator("#log")
        expect(log).to_contain_text("line 29")
        expect(log).to_contain_text("tick 3")
        shown = log.inner_text()
        expect(log).not_to_have_text(shown)
        expect(tab.locator("#facts")).to_contain_text(str(lab.s.job(job)["pid"]))
        tab.fill("#log-word", "line 2")
        expect(tab.locator("#log mark")).to_have_count(11)  # in the lines 2 and 20 to 29
        expect(tab.locator("#log-says")).to_contain_text("1 of 11")
        tab.click("text=search the whole log")
        expect(tab.locator("#log-found pre")).to_contain_text("line 29")
        tab.uncheck("#log-wrap")
        expect(log).not_to_have_class("log wrap")
        tab.click("#job-head button:has-text('cancel')")
        tab.click('dialog >> text="No"')
        assert lab.s.states()[job] == "running"
        tab.click("#job-head button:has-text('cancel')")
        tab.click('dialog >> text="Yes"')
        # Checked first: the message is shown for 6 s only, and the rest of the page may be updated later.
        expect(tab.locator("#said, #wrong").filter(has_text="Job")).to_have_count(1)
        expect(tab.locator("#job-head")).to_contain_text("cancelled")
        assert lab.s.wait_state(job, "cancelled")
        expect(tab.locator("#job-head button")).to_have_text(["retry"])


def test_a_long_log_shows_its_last_lines_and_a_button_adds_earlier_ones(lab: Lab) -> None:
    """If a log is long, the page shows only its last lines, and a text above the log says so.

    A button adds earlier lines. The lines on the screen stay in their place when the earlier lines are added.
    """
    job = int(lab.s.cli("submit", "--gpus", "0", "--", "seq", "-f", "line %05.0f of it", "3000").stdout)
    lab.s.wait_state(job, "done")
    with lab.tab(f"/jobs/{job}") as tab:
        part, log = tab.locator("#log-part"), tab.locator("#log")
        expect(log).to_contain_text("line 03000")
        expect(part).to_contain_text("The last 1,000 lines of about 3,000 (49.8 KiB).")
        expect(part).to_contain_text(f"gpujob logs {job}")
        expect(log).not_to_contain_text("line 02000")
        tab.evaluate("document.getElementById('log').scrollTop = 40")
        tab.evaluate(PLACE)
        tab.click("#log-earlier")
        expect(log).to_contain_text("line 01001")
        assert abs(tab.evaluate("window.place() - window.was")) < 2
        expect(part).to_contain_text("The last 2,000 lines of about 3,000")
        tab.click("#log-earlier")
        expect(part).to_be_hidden()
        assert log.inner_text().split() == [w for n in range(1, 3001) for w in ("line", f"{n:05}", "of", "it")]


# Defines ``window.place()``, the position of line 02003 on the screen in pixels, and sets ``window.was`` to it.
PLACE = """() => {
  window.place = () => {
    const walk = document.createTreeWalker(document.getElementById('log'), NodeFilter.SHOW_TEXT);
    for (let node = walk.nextNode(); node; node = walk.nextNode()) {
      const at = node.data.indexOf('line 02003');
      if (at < 0) continue;
      const range = document.createRange();
      range.setStart(node, at);
      range.setEnd(node, at + 4);
      return range.getBoundingClientRect().top;
    }
    return NaN;
  };
  window.was = window.place();
}"""


def test_search_moves_between_matches(lab: Lab) -> None:
    """If the user types a text into the search field of a log, the page shows the first match at once.

    Keys and buttons lead to the other matches. A link to a line of the log shows this line.
    """
    job = int(lab.s.cli("submit", "--gpus", "0", "--", "seq", "-f", "line %05.0f", "3000").stdout)
    lab.s.wait_state(job, "done")
    with lab.tab(f"/jobs/{job}") as tab:
        says, here = tab.locator("#log-says"), tab.locator("#log mark.here")
        expect(tab.locator("#log")).to_contain_text("line 03000")
        tab.fill("#log-word", "9 ")
        expect(says).to_have_text("no match in the shown part")
        tab.fill("#log-word", "line 025")
        expect(says).to_have_text("1 of 100")
        expect(here).to_be_in_viewport()
        tab.keyboard.press("Enter")
        expect(says).to_have_text("2 of 100")
        tab.keyboard.press("Shift+Enter")
        tab.keyboard.press("Shift+Enter")
        expect(says).to_have_text("100 of 100")
        expect(here).to_be_in_viewport()
        tab.click("#log-next")
        expect(says).to_have_text("1 of 100")
        tab.click("#log-before")
        expect(says).to_have_text("100 of 100")
        tab.click("#log-all")
        expect(tab.locator("#log-found")).to_contain_text("line 02500")
        tab.fill("#log-word", "line 00778")
        expect(tab.locator("#log-found")).to_be_hidden()  # its results belong to the previous word
        tab.keyboard.press("Enter")  # the shown part does not contain the word: Enter searches the whole log
        expect(tab.locator("#log-found a")).to_have_text("778")
        tab.click("#log-found a")
        expect(here).to_be_in_viewport()
        expect(tab.locator("#log")).not_to_contain_text("line 00777")
        tab.click("#log-earlier")
        expect(tab.locator("#log")).to_contain_text("line 00777")
        expect(here).to_be_in_viewport()


def test_a_search_typed_before_the_log_is_loaded_works(lab: Lab) -> None:
    """If a user types a search word before the log is loaded, the search runs when the log is loaded.

    Until then, the lines that the server put into the page stay visible.
    """
    job = int(lab.s.cli("submit", "--gpus", "0", "--", "seq", "-f", "line %05.0f", "300").stdout)
    lab.s.wait_state(job, "done")
    with lab.context() as context:
        tab = context.new_page()
        held = []
        tab.route("**/log?*", lambda route: held.append(route), times=1)
        tab.goto(f"{lab.page.url}/jobs/{job}")
        wait_for(lambda: tab.wait_for_timeout(20) or held, "the page asks for the log")
        tab.fill("#log-word", "line 002")
        expect(tab.locator("#log")).to_contain_text("line 00300")
        for route in held:
            route.continue_()
        expect(tab.locator("#log-says")).to_have_text("1 of 100")
        expect(tab.locator("#log mark.here")).to_be_in_viewport()


def test_s2_5_switches_pause_and_resume_a_gpu_and_the_queue(lab: Lab) -> None:
    """S2.5: A switch shows whether a GPU is paused, and pauses or resumes the GPU. The queue has such a switch, too."""
    with lab.tab() as tab:
        switch = tab.get_by_role("switch", name="GPU 1 takes new jobs")
        expect(switch).to_have_attribute("aria-checked", "true")
        switch.click()
        expect(switch).to_have_attribute("aria-checked", "false")
        expect(tab.locator('[data-key="gpu-1"]')).to_contain_text("PAUSED")
        assert lab.s.status()["gpus"][1]["paused"]
        expect(switch).not_to_have_attribute("aria-busy", "true")  # until the answer arrives, a click is ignored
        switch.click()
        expect(switch).to_have_attribute("aria-checked", "true")
        wait_for(lambda: not lab.s.status()["gpus"][1]["paused"], "resumed")
        queue = tab.locator('[data-key="queue-pause"]')
        queue.click()
        expect(queue).to_have_attribute("aria-checked", "false")
        expect(tab.locator("#troubles")).to_contain_text("The queue is paused")
        expect(queue).not_to_have_attribute("aria-busy", "true")
        queue.click()
        expect(tab.locator("#troubles")).not_to_contain_text("The queue is paused")
        assert lab.s.status()["paused"] is False


def test_s2_7_the_first_page_shows_why_a_job_waits_and_changes_the_order(lab: Lab) -> None:
    """S2.7: The first page shows why each job waits. It has buttons to put a job first, hold, release or cancel it.

    The page of a job can change the priority of the job.
    """
    busy = [lab.talker(f"busy-{n}") for n in range(3)]
    for job in busy:
        lab.s.wait_state(job, "running")
    one, two = lab.talker("busy-3"), lab.talker("busy-4")
    with lab.tab() as tab:
        expect(row(tab, one).locator(".reason")).to_contain_text("GPU")
        # Both are read repeatedly: a late GPU reading changes the reason for a moment.
        shown = row(tab, one).locator(".reason")
        wait_for(
            lambda: (shown.text_content() or "").split() == lab.s.job(one)["reason"].split(),
            "the reason that the job has",
        )
        rows = tab.locator("#waiting tbody tr")
        expect(rows.first).to_have_attribute("data-key", f"wait-{one}")
        tab.click(f'[data-key="first-{two}"]')
        # Each message is checked first: it is shown for 6 s only, and the rest of the page may be updated later.
        expect(tab.locator("#said")).to_have_text(f"Job {two} is now first in the queue.")
        expect(rows.first).to_have_attribute("data-key", f"wait-{two}")
        expect(row(tab, two).locator('[data-th="priority"]')).to_contain_text("first")
        tab.focus(f'[data-key="hold-{one}"]')
        tab.keyboard.press("Enter")
        expect(tab.locator("#said")).to_have_text(f"Job {one} is held; release it: gpujob release {one}.")
        expect(row(tab, one).locator(".reason")).to_contain_text("held")
        expect(tab.locator(f'[data-key="release-{one}"]')).to_be_focused()  # this button replaces the hold button
        tab.keyboard.press("Enter")
        expect(tab.locator("#said")).to_have_text(f"Job {one} is released.")
        expect(tab.locator(f'[data-key="hold-{one}"]')).to_be_focused()
        tab.click(f'[data-key="cancel-{one}"]')
        tab.click('dialog >> text="Yes"')
        expect(row(tab, one)).to_contain_text("cancelled")
        expect(row(tab, one).locator("a.job")).to_be_focused()  # the row has moved to another table
        row(tab, one).locator("button").click()
        expect(row(tab, one).locator(".reason")).to_be_visible()
        row(tab, one).locator("a.job").click()
        expect(tab.locator("#job-head")).to_contain_text("Waiting:")
        head = tab.locator("#job-head")
        wait_for(lambda: lab.s.job(one)["reason"] in " ".join((head.text_content() or "").split()), "its reason")
        tab.fill("#priority", "-5")
        tab.click("text=change")
        expect(tab.locator("#said")).to_contain_text(f"job {two}, which was put first, still comes before it")
        wait_for(lambda: lab.s.job(one)["priority"] == -5, "its priority")
        tab.click("#job-head button:has-text('cancel')")
        expect(tab.locator("dialog")).to_contain_text("retry puts it back")
        tab.click('dialog >> text="Yes"')
        expect(tab.locator("#job-head")).to_contain_text("cancelled")
    lab.s.cli("cancel", str(two))
    lab.let_end(*(f"busy-{n}" for n in range(5)))
    for job in busy:
        lab.s.wait_state(job, "done")


def test_the_submit_page_shows_a_preview_and_submits_the_job(lab: Lab) -> None:
    # A GPU can be DRAINING for a moment after a job's end, and the page requests the preview only once.
    wait_for(lambda: all(gpu["state"] == "AVAILABLE" for gpu in lab.s.status()["gpus"]), "free GPUs")
    with lab.tab("/submit") as tab:
        tab.fill("#f-command", "python -c \"import sys; print(sys.argv[1:])\" 'two words' a\\ b")
        expect(tab.locator("#f-words b")).to_have_text(
            ["python", "-c", "import sys; print(sys.argv[1:])", "two words", "a b"]
        )
        preview = tab.locator("#preview")
        expect(preview).to_contain_text("✓ It would start immediately on GPU")
        tab.fill("#f-gpus", "77")
        expect(preview).to_contain_text("never run")
        for wrong in ("-1", "much"):
            tab.fill("#f-gpus", wrong)
            expect(preview).to_contain_text("✗ Cannot submit: gpus")
        tab.fill("#f-gpus", "0.5")
        expect(preview).to_contain_text("✓ It would start immediately")
        whole = tab.input_value("#f-command")
        for odd in ("|", ">", ">out.txt", "&&", "$HOME"):
            tab.fill("#f-command", f"echo x {odd} y")
            expect(preview.locator(".warning")).to_contain_text(f"{odd} is passed to the program as a word")
            expect(preview).not_to_contain_text("✓")
        tab.fill("#f-command", "no-such-program --x")
        expect(preview.locator(".warning")).to_contain_text("program no-such-program not found in PATH")
        expect(preview).not_to_contain_text("✓")
        tab.fill("#f-command", "echo 'open")
        for place in ("#f-words", "#preview"):
            expect(tab.locator(place)).to_contain_text("a quote is not closed")
        tab.click("button:has-text('Submit')")
        expect(tab.locator("#submit-says")).to_contain_text("a quote is not closed")
        tab.fill("#f-command", whole)
        expect(preview).to_contain_text("✓ It would start immediately")
        tab.fill("#f-after_ok", "999999")
        expect(preview).to_contain_text("cannot wait for job 999999: there is no such job")
        tab.fill("#f-after_ok", "")
        tab.fill("#f-conda", str(lab.folder / "no-such-environment"))
        expect(preview).to_contain_text("no-such-environment")
        tab.fill("#f-conda", "")
        tab.fill("#f-vram", "1M")
        tab.fill("#f-time", "1h")
        tab.fill("#f-label", "from the page")
        tab.click("text=add a variable")
        tab.get_by_label("its value").fill("7")
        expect(preview).to_contain_text("✗ Cannot submit: the variable with the value 7 has no name")
        tab.get_by_label("name of a variable").fill("SEED")
        expect(tab.locator("#preview")).to_contain_text("It would start immediately")
        tab.click("button:has-text('Submit')")
        tab.wait_for_url("**/jobs/*")
        job = lab.s.job(int(tab.url.rpartition("/")[2]))
        assert (job["need"], job["conda_env"]) == (0.5, None), "what was emptied again is not sent"
        expect(tab.locator("#facts")).to_contain_text("time limit")
        expect(tab.locator("#job-head")).to_contain_text("done")
        expect(tab.locator("#log")).to_contain_text("['two words', 'a b']")
        expect(tab.locator("#facts")).to_contain_text("from the page")


def test_a_count_links_to_the_jobs_of_that_state(lab: Lab) -> None:
    """The count of failed jobs links to their list, which stays up to date."""
    jobs = [int(lab.s.cli("submit", "--gpus", "0", "--label", "bad", "--", "false").stdout) for _ in range(2)]
    for job in jobs:
        lab.s.wait_state(job, "failed")
    with lab.tab() as tab:
        tab.click('#scheduler a[href="/jobs?state=failed"]')
        tab.wait_for_url("**/jobs?state=failed")
        for job in jobs:
            expect(tab.locator(f'[data-key="row-{job}"]')).to_contain_text("exit 1")
        tab.fill("#j-label", "bad")
        tab.select_option("#j-state", "")
        tab.click("text=show")
        expect(tab.locator("#list tbody tr")).to_have_count(2)
        more = int(lab.s.cli("submit", "--gpus", "0", "--label", "bad", "--", "true").stdout)
        expect(tab.locator(f'[data-key="row-{more}"]')).to_contain_text("done")


def test_s2_8_the_page_shows_both_attempts_after_a_retry(lab: Lab) -> None:
    """S2.8: After a retry the page shows both attempts."""
    job = int(lab.s.cli("submit", "--gpus", "0", "--", "python", "-c", "raise SystemExit(3)").stdout)
    lab.s.wait_state(job, "failed")
    with lab.tab(f"/jobs/{job}") as tab:
        expect(tab.locator("#job-head")).to_contain_text("exit 3")
        tab.click("#job-head button:has-text('retry')")
        expect(tab.locator("#runs tbody tr")).to_have_count(2)
        expect(tab.locator("#job-head")).to_contain_text("Failed: exit 3")


def test_the_timeline_shows_a_running_job_and_zooms(lab: Lab) -> None:
    job = lab.talker("bar", gpus="0.5", label="a-bar")
    lab.s.wait_state(job, "running")
    with lab.tab("/timeline?hours=1") as tab:
        bar = tab.locator(f'svg.timeline a[href="/jobs/{job}"]')
        assert (bar.get_attribute("aria-label") or "").startswith(
            f"job {job} a-bar: python talks.py 30 end-bar, running, "
        )
        tab.keyboard.press("+")
        tab.wait_for_url("**/timeline?hours=0.5**")
        tab.keyboard.press("-")
        tab.wait_for_url("**/timeline?hours=1**")
        area = tab.locator("svg.timeline").bounding_box()
        assert area is not None
        tab.mouse.move(area["x"] + area["width"] * 0.5, area["y"] + area["height"] - 8)
        tab.mouse.down()
        tab.mouse.move(area["x"] + area["width"] * 0.97, area["y"] + area["height"] - 8, steps=4)
        tab.mouse.up()
        tab.wait_for_url("**end=**")
        expect(tab.locator(f'svg.timeline a[href="/jobs/{job}"]')).to_have_count(1)
        tab.locator(f'svg.timeline a[href="/jobs/{job}"]').focus()
        tab.keyboard.press("Enter")
        tab.wait_for_url(f"**/jobs/{job}")
    lab.let_end("bar")
    lab.s.wait_state(job, "done")


def test_very_short_bars_can_be_clicked_and_pauses_are_visible(lab: Lab) -> None:
    moment = int(lab.s.cli("submit", "--gpus", "0.5", "--", "true").stdout)
    lab.s.wait_state(moment, "done")
    with lab.tab("/timeline?hours=24") as tab:
        bar = tab.locator(f'svg.timeline a[href="/jobs/{moment}"]')
        box = bar.bounding_box()
        assert box is not None and box["width"] >= 3 and box["height"] >= 5
        bar.focus()
        assert bar.evaluate("e => e === document.activeElement")
    lab.s.cli("pause", "2")
    try:
        with lab.tab("/timeline?hours=1") as tab:
            strip = tab.locator('[aria-label="GPU 2"] .paused').last
            # The history is written at the end of an interval of 10 s, and the page fetches every 10 s.
            expect(strip).to_be_attached(timeout=90_000)
            box = strip.bounding_box()
            assert box is not None and box["height"] >= 5
    finally:
        lab.s.cli("resume", "2")


def test_the_header_has_the_same_height_on_every_page(lab: Lab) -> None:
    with lab.tab() as tab:
        for width in (360, 800, 1280):
            tab.set_viewport_size({"width": width, "height": 800})
            found = {}
            for path in PAGES:
                tab.goto(lab.page.url + path)
                if path != "/submit":
                    expect(tab.locator("#live")).to_have_text("live")
                    lines = tab.evaluate("e => e.getClientRects().length && e.offsetHeight / parseFloat(getComputedStyle(e).lineHeight)",
                                         tab.query_selector("#live"))  # fmt: skip
                    assert lines < 1.6, f"{lines} lines at {width} px"
                found[path] = tab.evaluate("document.querySelector('header.top').offsetHeight")
            assert len(set(found.values())) == 1, (width, found)


def test_signing_in_and_cancelling_a_job_work_by_keyboard_alone(lab: Lab) -> None:
    job = lab.talker("keys", label="keys")
    lab.s.wait_state(job, "running")
    with lab.context(signed_in=False) as context:
        tab = context.new_page()
        tab.goto(lab.page.url)
        press_to(tab, "input[name=token]")
        tab.keyboard.type(lab.page.token)
        tab.keyboard.press("Enter")
        expect(tab.locator("#gpus")).to_be_visible()
        press_to(tab, f'[data-key="cancel-{job}"]')
        tab.keyboard.press("Enter")
        expect(tab.locator("dialog")).to_be_visible()
        press_to(tab, "dialog button[value=yes]")
        tab.keyboard.press("Enter")
        expect(row(tab, job)).to_contain_text("cancelled")


def test_an_update_of_the_page_keeps_elements_and_opened_details(lab: Lab) -> None:
    """An update of the page keeps its elements and an opened detail."""
    job = lab.talker("stays")
    lab.s.wait_state(job, "running")
    with lab.tab(f"/jobs/{job}") as tab:
        expect(tab.locator("#live")).to_have_text("live")
        tab.click("#runs summary")
        opened = tab.evaluate("document.querySelector('#runs details').open")
        button = f'[data-key="cancel-{job}"]'
        tab.focus(button)
        tab.evaluate(
            "document.querySelector('#runs').dataset.mark = 1; window.mark = document.querySelector('#job-head')"
        )
        lab.let_end("stays")
        expect(tab.locator("#job-head")).to_contain_text("Done")
        assert tab.evaluate("window.mark === document.querySelector('#job-head')")
        assert tab.evaluate("document.querySelector('#runs details').open") is opened


def test_every_page_fits_both_widths_in_both_colour_schemes(lab: Lab) -> None:
    """Every page fits a narrow and a wide window, in the light and in the dark scheme. The test saves screenshots.

    All elements have names. Links and buttons are large enough.
    """
    job = lab.talker("pictures", gpus="0.5", label="pictures")
    lab.s.wait_state(job, "running")
    with lab.context() as context:
        tab = context.new_page()
        for path in (*PAGES, f"/jobs/{job}", "/jobs/999999"):
            tab.goto(lab.page.url + path)
            expect(tab.locator("h1").first).to_be_attached()
            name = re.sub(r"\W+", "-", path.partition("?")[0].strip("/").replace(str(job), "one")) or "now"
            assert tab.evaluate(UNNAMED) == [], path
            for width, scheme in itertools.product((360, 1600), ("light", "dark")):
                tab.set_viewport_size({"width": width, "height": 900})
                tab.emulate_media(color_scheme=scheme)
                over = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert over <= 0, f"{path} is {over} px wider than {width}"
                tab.screenshot(path=artefacts() / f"{name}-{width}-{scheme}.png")
            tab.set_viewport_size({"width": 360, "height": 900})
            small = tab.evaluate(SMALL)
            assert small == [], f"{path}: {small}"
    lab.let_end("pictures")


def test_the_card_of_a_failed_job_tells_what_differs(lab: Lab) -> None:
    """The card shows class, cause, hint and differences, links to the good run, and fits a narrow dark screen."""
    script = lab.folder / "card.py"
    script.write_text("import sys\nif '--bad' in sys.argv: raise ValueError('no such split: ' + 'x' * 200)\n")
    s = lab.page.scheduler
    good, bad = (int(s.cli("submit", "--", "python", "card.py", *more).stdout) for more in ((), ("--bad",)))
    s.wait_state(good, "done")
    s.wait_state(bad, "failed")
    if s.job(bad)["failure"]["good_run"] != good:  # both ran at the same time
        bad = int(s.cli("submit", "--", "python", "card.py", "--bad").stdout)
        s.wait_state(bad, "failed")
    for width, scheme in ((390, "dark"), (1360, "light")):
        with lab.tab(f"/jobs/{bad}", viewport={"width": width, "height": 844}, color_scheme=scheme) as tab:
            card = tab.locator("#failure")
            for text in (
                "Why it failed: traceback",
                "ValueError: no such split",
                "What to do:",
                "arguments: added --bad",
            ):
                expect(card).to_contain_text(text)
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            card.get_by_role("link", name=f"job {good}, the last good run").click()
            expect(tab.locator("#job-head")).to_contain_text(f"Job {good}")
            expect(tab.locator("#failure")).to_have_count(0)


def test_s19_user_texts_are_never_parsed_as_html(lab: Lab) -> None:
    """S19: Hostile texts create no element and run no script.

    The texts are used as script names, arguments, labels and log lines.
    """
    lab.s.cli("queue", "pause")
    client = SchedulerClient(str(lab.folder / "gpu_scheduler_state.json"))
    texts = [*XSS, *(text for text in PAYLOADS if "<" in text or "{" in text or '"' in text)][:60]
    first = None
    for text in texts:
        spec = JobSpec(
            source="submit", arguments=(text, text), label=text.replace("\n", " "), gpus="0", conda_env="", info=text
        )
        job = client.submit(spec, None, ModelTable())
        first = first or job.id
    script = lab.folder / "<img src=x onerror=window.ran=1>.sh"
    script.write_text("#!/bin/sh\n" + "".join(f"cat <<'EOF'\n{text}\nEOF\n" for text in XSS))
    script.chmod(0o755)
    lab.s.append('0,"<svg onload=window.ran=1>.py",,"<b>",0;nonsense=<script>window.ran=1</script>')
    talking = int(lab.s.cli("submit", "--gpus", "0", "--label", "<b>bold</b>", "--", str(script)).stdout)
    lab.s.cli("first", str(talking))
    lab.s.cli("queue", "resume")
    lab.s.wait_state(talking, "done")
    with lab.context() as context:
        tab = context.new_page()
        for path in (*PAGES, f"/jobs/{talking}", *(f"/jobs/{first + n}" for n in range(0, len(XSS), 4))):
            tab.goto(lab.page.url + path)
            expect(tab.locator("h1").first).to_be_attached()
            assert tab.evaluate(RAN) == 0, path
            assert Foreign.found(tab.content(), lab.page.url) == [], path
        tab.goto(f"{lab.page.url}/jobs/{talking}")
        expect(tab.locator("#log")).to_contain_text("<script>window.ran=1</script>")
        tab.fill("#log-word", "<img")
        expect(tab.locator("#log mark").first).to_have_text("<img")
        tab.click("text=search the whole log")
        expect(tab.locator("#log-found pre")).to_contain_text("<img")
        assert tab.evaluate(RAN) == 0 and tab.locator("#log img, #log-found img, #log script").count() == 0


class Foreign(HTMLParser):
    """Parser that collects the forbidden parts of a page.

    Forbidden are event handlers in attributes, frames, images, style elements, inline scripts, and links or scripts of
    other hosts.
    """

    def __init__(self, ours: str) -> None:
        super().__init__()
        self.ours, self.wrong = ours, list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("iframe", "img", "style", "base", "object", "embed") or any(
            name.startswith("on") for name in values
        ):
            self.wrong.append(f"<{tag} {values}>")
        where = values.get("src") or values.get("href") or values.get("action") or "/"
        if not where.startswith(("/", "#", self.ours)) or where.startswith("//"):
            self.wrong.append(f"<{tag}> leads to {where}")
        if tag == "script" and not (values.get("src") or "").startswith("/static/"):
            self.wrong.append("a script that is not a file of ours")

    @classmethod
    def found(cls, html: str, ours: str) -> list[str]:
        parser = cls(ours)
        parser.feed(html)
        return parser.wrong


def test_every_page_can_be_read_without_scripts(lab: Lab) -> None:
    """If scripts are switched off, every page can be read.

    The buttons are hidden, and commands are shown in their place.
    """
    job = lab.talker("plain", gpus="0.5", label="plain")
    lab.s.wait_state(job, "running")
    wait_for(lambda: "line 29" in lab.s.log(job), "its lines")
    with lab.context(java_script_enabled=False) as context:
        tab = context.new_page()
        tab.goto(lab.page.url)
        expect(row(tab, job)).to_contain_text("running")
        assert tab.locator("button[data-post]:visible").count() == 0
        expect(tab.locator("noscript .hint li").first).to_have_text("gpujob pause 0")
        tab.goto(f"{lab.page.url}/jobs/{job}")
        expect(tab.locator("#log")).to_contain_text("line 29")
        expect(tab.locator("#facts")).to_contain_text("plain")
        for path in PAGES[1:]:
            tab.goto(lab.page.url + path)
            expect(tab.locator("h1")).to_be_visible()
        tab.goto(f"{lab.page.url}/timeline?hours=1")
        expect(tab.locator(f'svg.timeline a[href="/jobs/{job}"]')).to_have_count(1)
    lab.let_end("plain")


def test_the_page_shows_the_end_and_the_return_of_the_scheduler(lab: Lab) -> None:
    with lab.tab() as tab:
        expect(tab.locator("#live")).to_have_text("live")
        lab.s.stop()
        expect(tab.locator("#scheduler .banner")).to_contain_text("No scheduler is running")
        lab.s.start()
        expect(tab.locator("#scheduler .banner")).to_have_count(0)
        expect(tab.locator("#scheduler")).to_contain_text("scheduler is running")


def test_the_page_reports_a_lost_connection(lab: Lab) -> None:
    """When the connection to the server is lost, the page says so, and its clocks stop until the connection is back.

    This test is the last, because it restarts the page's server.
    """
    with lab.tab(may_be_lost=True) as tab:
        expect(tab.locator("#live")).to_have_text("live")
        lab.page.stop()
        expect(tab.locator("#live")).to_contain_text("not live")
        banner = tab.locator("#stale")
        expect(banner).to_have_text(re.compile(r"^✗ Not live; the data is from \d\d:\d\d:\d\d: no connection"))
        assert tab.evaluate("getComputedStyle(document.querySelector('#gpus')).opacity") == "0.5"
        clocks = "[...document.querySelectorAll('[data-since]')].map((e) => e.textContent)"
        stand = tab.evaluate(clocks)
        tab.evaluate("window.beats = 0; setInterval(() => { window.beats += 1; }, 1100)")
        wait_for(lambda: tab.evaluate("window.beats") >= 2, "two beats of its clocks")
        assert tab.evaluate(clocks) == stand != []
        port = lab.page.port
        lab.page.start("--port", str(port))
        expect(tab.locator("#live")).to_have_text("live")
        expect(banner).to_have_count(0)
        wait_for(lambda: tab.evaluate(clocks) != stand, "clocks that go on")
