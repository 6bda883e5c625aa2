"""Runs a real browser on a real page.

A test fails if the browser reports a console error, a dialog or a request to another host. The fixtures `browser` and
`lab` are shared by the tests of a module.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, sync_playwright
from playwright.sync_api import Page as Tab

from tests.gpus.stub import FakeDriver
from tests.stories.harness import ROOT, Scheduler
from tests.web.page import Page, fixed_port

PATIENCE_MS = 30_000
TOTAL_MIB, IDLE_MIB = 80_000, 500
UUIDS = ("GPU-a", "GPU-b", "GPU-c")
TALKS = """\
import sys, time, pathlib
for n in range(int(sys.argv[1])):
    print("line", n, "loss", round(3 / (n + 1), 4), flush=True)
hold = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
n = 0
while hold and not hold.exists():
    n += 1
    print("tick", n, flush=True)
    time.sleep(0.2)
print("the last line", flush=True)
"""
# Logs violations of the Content-Security-Policy as console errors; a payload that runs sets ``window.ran`` to 1.
WATCH = """
document.addEventListener('securitypolicyviolation', (e) => console.error('CSP: ' + e.violatedDirective + ' ' + e.blockedURI));
window.ran = 0;
"""


# Finds links and buttons in lists and tables that are smaller than 24 px or extend beyond their card.
SMALL = """() => [...document.querySelectorAll('main table a, main .on a, main button, main .pills a')].filter((e) => {
  const box = e.getBoundingClientRect();
  const card = e.closest('.card')?.getBoundingClientRect();
  return box.width && (box.height < 24 || box.width < 24 || (card && box.right > card.right));
}).map((e) => `${e.textContent.trim().slice(0, 30)} ${JSON.stringify(e.getBoundingClientRect())}`)"""


# Finds elements without a name for screen readers, headings out of order, duplicate ids, states without text,
# and inline styles and handlers.
UNNAMED = """() => {
  const wrong = [];
  const named = (e) => (e.getAttribute('aria-label') || e.textContent.trim() || e.title || e.labels?.length
    || (e.getAttribute('aria-labelledby') && document.getElementById(e.getAttribute('aria-labelledby'))));
  for (const e of document.querySelectorAll('a, button, input, select, [role=switch], [role=region], [role=img], nav, section'))
    if (!named(e)) wrong.push('no name: ' + e.outerHTML.slice(0, 120));
  for (const e of document.querySelectorAll('svg:not([role]):not([aria-hidden])'))
    if (!e.closest('svg[role], .scroll, a')) wrong.push('neither named nor hidden: ' + e.outerHTML.slice(0, 120));
  const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push('twice: #' + id);
  let level = 0;
  for (const e of document.querySelectorAll('h1, h2, h3')) {
    const now = Number(e.tagName[1]);
    if (now > level + 1) wrong.push('heading out of order: ' + e.textContent.trim());
    level = now;
  }
  if (document.querySelectorAll('h1').length !== 1) wrong.push('not one h1');
  if (document.querySelectorAll('main').length !== 1) wrong.push('not one main');
  for (const e of document.querySelectorAll('th:not([scope])')) wrong.push('th without scope: ' + e.textContent);
  for (const e of document.querySelectorAll('.state')) if (!/\\w/.test(e.textContent)) wrong.push('a state without its word');
  for (const e of document.querySelectorAll('[style], [onclick]')) wrong.push('inline: ' + e.outerHTML.slice(0, 80));
  return wrong;
}"""


def press_to(tab: Tab, selector: str) -> None:
    """Press Tab until this element has the focus; fail if the focus is not visible."""
    for _ in range(150):
        if tab.evaluate("s => document.activeElement.matches(s)", selector):
            assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", selector
            return
        tab.keyboard.press("Tab")
    raise AssertionError(f"{selector} is not reached by Tab")


def chromium() -> str:
    """Return the path of the system's browser; without one, skip the test (in CI, fail it)."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        sentence = "no browser; as root run: apt-get install -y chromium"
        (pytest.fail if os.environ.get("CI", "").lower() in ("true", "1") else pytest.skip)(sentence)
    assert found is not None
    return found


def artefacts() -> Path:
    """Return the folder for screenshots; create it if needed."""
    folder = Path(os.environ.get("GPUJOB_ARTEFACTS") or ROOT / ".build") / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Lab:
    """A scheduler with three fake GPUs, its web page, and a browser.

    `context` yields a browser context that is signed in, unless ``signed_in`` is False.
    """

    def __init__(self, folder: Path, browser: Browser) -> None:
        folder.chmod(0o700)
        self.browser = browser
        self.driver = FakeDriver(folder / ".driver")
        with self.driver.together():
            for uuid in UUIDS:
                self.driver.gpu(uuid, name="NVIDIA H100", total=TOTAL_MIB, used=IDLE_MIB, load=0, temp=40, power=80)
        self.s = Scheduler(folder, None, gpu_interval=0.25)
        self.s.environ |= self.driver.environ()
        self.s.environ.pop("CUDA_VISIBLE_DEVICES", None)
        (folder / "talks.py").write_text(TALKS)
        self.page = Page(self.s)
        self.cookies: Any = None
        self.wrong: list[str] = []  # problems that browsers reported

    @property
    def folder(self) -> Path:
        return self.s.folder

    def start(self) -> Lab:
        self.s.start()
        self.page.start("--port", str(fixed_port()))  # fixed, since a test restarts the page on the same port
        return self

    def end(self) -> None:
        self.page.end()
        for hold in self.folder.glob("hold-*"):
            hold.unlink()
        self.s.end_all()

    # -- the browser ----------------------------------------------------------------------------------

    @contextmanager
    def context(self, signed_in: bool = True, may_be_lost: bool = False, **options: Any) -> Iterator[BrowserContext]:
        """Yield a new browser context. When it ends, fail if the browser reported a problem in it.

        Problems are console errors and warnings, errors in scripts, dialogs, and requests to another host.
        ``signed_in``: use the cookie of `sign_in`. ``may_be_lost``: do not count network errors as problems.
        """
        if signed_in and self.cookies is None:
            self.sign_in()
        options.setdefault("viewport", {"width": 1280, "height": 900})
        context = self.browser.new_context(storage_state=self.cookies if signed_in else None, **options)
        context.set_default_timeout(PATIENCE_MS)
        context.set_default_navigation_timeout(PATIENCE_MS)
        context.add_init_script(WATCH)
        wrong: list[str] = []

        def request(asked: Any) -> None:
            where = urlsplit(asked.url)
            if where.scheme not in ("data", "blob") and where.netloc != f"127.0.0.1:{self.page.port}":
                wrong.append(f"a request to another host: {asked.url}")

        def said(message: ConsoleMessage) -> None:
            expected = ("401" in message.text and not signed_in) or (may_be_lost and "net::ERR_" in message.text)
            expected = expected or ("400" in message.text and "/api/preview" in message.location.get("url", ""))
            expected = expected or ("404" in message.text and "/jobs/999999" in message.location.get("url", ""))
            if message.type in ("error", "warning") and not expected:
                wrong.append(f"console {message.type}: {message.text} ({message.location.get('url')})")

        def dialog(shown: Any) -> None:
            wrong.append(f"a dialog: {shown.message}")
            shown.dismiss()

        context.on("request", request)
        context.on("console", said)
        context.on("weberror", lambda error: wrong.append(f"an error in a script: {error.error}"))
        context.on("dialog", dialog)
        try:
            yield context
        finally:
            context.close()
        assert not wrong, wrong

    def sign_in(self) -> None:
        """Sign in with the form. Keep the cookie for later browser contexts."""
        with self.context(signed_in=False) as context:
            tab = context.new_page()
            tab.goto(self.page.url)
            tab.fill("input[name=token]", self.page.token)
            tab.keyboard.press("Enter")
            tab.wait_for_selector("#gpus")
            self.cookies = context.storage_state()

    @contextmanager
    def tab(self, path: str = "/", **options: Any) -> Iterator[Tab]:
        """Yield a tab that shows ``path`` on the page's server, in a new browser context."""
        with self.context(**options) as context:
            tab = context.new_page()
            tab.goto(self.page.url + path)
            yield tab

    # -- jobs -----------------------------------------------------------------------------------------

    def talker(self, key: str, *, gpus: str = "1", lines: int = 30, label: str = "", time: str = "") -> int:
        """Submit a job that prints ``lines`` lines and then runs until `let_end`; return its id.

        ``time``: its time limit, which is also its expected run time.
        """
        words = [
            "--gpus",
            gpus,
            *(["--time", time] if time else []),
            *(["--label", label] if label else []),
            "--",
            "python",
            "talks.py",
            str(lines),
            f"end-{key}",
        ]
        return int(self.s.cli("submit", *words).stdout)

    def let_end(self, *keys: str) -> None:
        for key in keys:
            (self.folder / f"end-{key}").touch()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser that the tests of this module share."""
    program = chromium()
    flags = ["--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=program, args=[*flags, *(["--no-sandbox"] if os.getuid() == 0 else [])]
        )
        yield made
        made.close()


@pytest.fixture(scope="module")
def lab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A scheduler and a page that the tests of this module share."""
    made = Lab(tmp_path_factory.mktemp("lab"), browser)
    try:
        yield made.start()
    finally:
        made.end()
