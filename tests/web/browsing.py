"""Runs a real browser on a real page.

A test fails if the browser reports a console error, a dialog or a request to another host.
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
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage
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

    def talker(self, key: str, *, gpus: str = "1", lines: int = 30, label: str = "") -> int:
        """Submit a job that prints ``lines`` lines and then runs until `let_end`; return its id."""
        words = [
            "--gpus",
            gpus,
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
