"""Issue 27, 1: learned needs in the HTTP API and on the page, with a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.stories.harness import wait_for
from tests.stories.test_needs import ODD, SECRET, peak, ran
from tests.stories.test_schemas import check
from tests.web.browsing import PATIENCE_MS, SMALL, UNNAMED, Lab, artefacts, browser, lab

__all__ = ["browser", "lab"]
expect.set_options(timeout=PATIENCE_MS)
TABLE = '{\n  "models": {"seven": 1.00, "fits":0.45, "some-7b": 1}\n}'


@pytest.fixture
def table(lab: Lab) -> Iterator[Path]:
    """A model table, and runs of three models of which one is in the table."""
    path = lab.folder / "llm_config.json"
    path.write_text(TABLE)
    path.chmod(0o600)
    if not lab.s.rows("SELECT 1 FROM seen_runs"):
        for model in ("seven", "fits", ODD, SECRET):
            ran(lab.s, model, peak(31))
    yield path
    for backup in lab.folder.glob("*.before-*"):
        backup.unlink()


def test_the_api_shows_and_applies(lab: Lab, table: Path) -> None:
    """The answers have the forms of the verb; another key, an unknown model and a missing header are refused."""
    page = lab.page
    found = page.get("/api/needs").json()
    check("needs", found)
    assert {row["model"]: row["differs"] for row in found["models"]}["seven"] and "hunter22" not in json.dumps(found)
    headers = {"Authorization": f"Bearer {page.token}", "Content-Type": "application/json"}
    for body, status in (({"model": "seven"}, 400), ({"models": "seven"}, 400), ({"models": ["sevn"]}, 404)):
        assert page.post("/api/needs/apply", body).status == status, body
    assert page.ask("POST", "/api/needs/apply", {**headers, "Origin": "http://evil.test"}, b"{}").status == 403
    assert table.read_text() == TABLE
    answer = page.post("/api/needs/apply", {"models": ["seven", "fits"]})
    assert answer.status == 200, answer.body
    done = answer.json()
    check("needs-applied", done)
    assert done["changed"] == [{"model": "seven", "before": "1.0", "after": "0.45"}]
    assert done["unchanged"] == ["fits: the model table has 0.45 already"]
    assert table.read_text() == TABLE.replace("1.00", "0.45") and Path(done["backup"]).read_text() == TABLE
    table.chmod(0o400)
    refused = page.post("/api/needs/apply", {"models": ["some-7b"]})
    assert refused.status == 409 and "read-only" in refused.json()["error"]


def test_a_button_applies_a_suggestion_and_the_scheduler_uses_it(lab: Lab, table: Path) -> None:
    """It asks first; then the file is changed, and a waiting job of the model needs less."""
    lab.s.cli("queue", "pause")
    try:
        job = int(lab.s.cli("submit", "--", "true", "--llm", "seven").stdout)
        assert lab.s.job(job)["need"] == 1
        with lab.tab("/needs") as tab:
            row = tab.locator('[data-key="need-seven"]')
            expect(row).to_contain_text(re.compile(r"1\.0.*0\.45 for 34\.1 GiB.*31 GiB.*31 GiB.*50%.*1 min 30 s"))
            expect(tab.locator('[data-key="need-fits"] button')).to_have_count(0)
            expect(tab.locator('[data-key="need-some-7b"] button')).to_have_text("apply guess")
            expect(tab.locator("#needs")).not_to_contain_text("hunter22")
            assert tab.evaluate(UNNAMED) == []
            for scheme in ("light", "dark"):
                for width in (360, 1280):
                    tab.set_viewport_size({"width": width, "height": 900})
                    tab.emulate_media(color_scheme=scheme)
                    over = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                    assert over <= 0, f"{over} px wider than {width}"
                    tab.screenshot(path=artefacts() / f"needs-{width}-{scheme}.png")
                    assert width > 360 or tab.evaluate(SMALL) == []
            row.locator("button").click()
            expect(tab.locator("dialog")).to_contain_text("Write 0.45 for seven into")
            tab.click('dialog >> text="No"')
            assert table.read_text() == TABLE
            row.locator("button").click()
            tab.click('dialog >> text="Yes"')
            expect(tab.locator("#said")).to_contain_text("even: 1.0 → 0.45")
            expect(row.locator("button")).to_have_count(0)
            assert table.read_text() == TABLE.replace("1.00", "0.45")
            (backup,) = lab.folder.glob("*.before-*")
            assert backup.read_text() == TABLE
            wait_for(lambda: lab.s.job(job)["need"] == 0.45, "the new need of the waiting job")
            tab.click('[data-key="apply-all"]')
            expect(tab.locator("dialog")).to_contain_text("Write 1 suggestion from runs into")
            tab.click('dialog >> text="Yes"')
            expect(tab.locator('[data-key="apply-all"]')).to_have_count(0)
            models = json.loads(table.read_text())["models"]
            assert models == {"seven": 0.45, "fits": 0.45, "some-7b": 1, ODD: 0.45}
    finally:
        lab.s.cli("queue", "resume")
    lab.s.wait_state(job, "done")


def test_without_scripts_the_page_shows_the_command(lab: Lab, table: Path) -> None:
    with lab.tab("/needs", java_script_enabled=False) as tab:
        expect(tab.locator('[data-key="need-seven"]')).to_contain_text("0.45 for 34.1 GiB")
        expect(tab.locator("#needs")).to_contain_text("gpujob needs --apply")
        assert tab.locator("#needs button:visible").count() == 0


def test_a_mistake_in_the_table_is_shown(lab: Lab, table: Path) -> None:
    table.write_text('{"models": {"seven": 1,\n"fits": "many"}}')
    with lab.tab("/needs") as tab:
        expect(tab.locator(".banner")).to_contain_text(f"{table}:2: models.fits")
        tab.click('[data-key="apply-seven"]')
        tab.wait_for_selector("dialog[open]")
        tab.click('dialog >> text="No"')
    refused = lab.page.post("/api/needs/apply", {})
    assert refused.status == 409 and ":2: models.fits" in refused.json()["error"]
