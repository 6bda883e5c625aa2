"""Creates the pictures in docs/pictures/ with the real program: a terminal with `gpujob attach`, and web pages.

``make pictures`` runs it. It needs screen and chromium, installs pyte (a terminal emulator) and writes SVG with rich.
The pages show real jobs on simulated GPUs; the times of the jobs are stretched, and earlier readings of the GPUs are
invented (tests/web/lived_in.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text

try:
    import pyte
except ImportError:  # the pictures of the web pages do not need it
    pyte = None
ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 100, 20
TRAIN = """\
import os, sys, time
print(f"\\033[1mqwen2.5-7b-inst\\033[0m on GPU \\033[36m{os.environ['CUDA_VISIBLE_DEVICES']}\\033[0m, terminal: {sys.stdout.isatty()}")
for epoch in range(1, 4):
    for step in range(1, 41):
        bar = "\\033[32m" + "━" * (step * 40 // 40) + "\\033[90m" + "─" * (40 - step) + "\\033[0m"
        print(f"\\repoch {epoch}/3 {bar} {step:3}/40  loss \\033[33m{2.4 / (epoch + step / 40):.3f}\\033[0m ", end="", flush=True)
        time.sleep(0.05)
    print()
time.sleep(60)
"""


def run(folder: Path, *words: str) -> str:
    """Run a gpujob command in this folder; return its stdout."""
    environ = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "scheduler", *words], cwd=folder, env=environ, capture_output=True, text=True
    )
    return done.stdout


def shown(folder: Path, words: list[str], seconds: float, ready: str) -> pyte.Screen:
    """Run a command in a terminal; return its screen ``seconds`` after the text ``ready`` was first shown.

    The command is detached by Ctrl-a d afterwards. Raises RuntimeError with its output if it ends before.
    """
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.chdir(folder)
        os.environ.update(PYTHONPATH=str(ROOT), TERM="xterm-256color", LC_ALL="C.UTF-8")
        os.execv(sys.executable, [sys.executable, "-m", "scheduler", *words])
    end = time.monotonic() + 30
    until = None
    while time.monotonic() < (until or end):
        if select.select([fd], [], [], 0.1)[0]:
            try:
                stream.feed(os.read(fd, 65536))
            except OSError:  # the terminal is closed
                raise RuntimeError(f"{words} ended: {[line for line in screen.display if line.strip()]}") from None
        if until is None and any(ready in line for line in screen.display):
            until = time.monotonic() + seconds
    os.write(fd, b"\x01d")  # Ctrl-a d detaches; the job continues
    os.waitpid(pid, 0)
    os.close(fd)
    return screen


def as_svg(screen: pyte.Screen, title: str) -> str:
    """Return the terminal screen as an SVG picture."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for row in range(ROWS):
        line = Text()
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        for look, same in itertools.groupby(cells, key=lambda cell: (cell.fg, cell.bg, cell.bold, cell.reverse)):
            style = Style(color=_colour(look[0]), bgcolor=_colour(look[1]), bold=look[2], reverse=look[3])
            line.append("".join(cell.data or " " for cell in same), style)
        console.print(line, no_wrap=True)
    return console.export_svg(title=title)


def _colour(name: str) -> str | None:
    known = {"default": None, "brown": "yellow", "brightblack": "bright_black"}
    if name in known:
        return known[name]
    return f"#{name}" if len(name) == 6 and all(c in "0123456789abcdef" for c in name) else name


# Picture → path, width, height, colour scheme, scale, selector of the element at its top (empty: the top of the page).
PAGES = {
    "web-now": ("/", 1360, 1020, "light", 1, ""),
    "web-timeline": ("/timeline?hours=3.6", 1360, 580, "light", 1, ""),
    "web-job": ("/jobs/20", 1360, 1010, "light", 1, ""),
    "web-why": ("/jobs/28", 1360, 640, "light", 1, ""),
    "web-users": ("/users", 1360, 610, "light", 1, ""),
    "web-heatmap": ("/heatmap?measure=load", 1360, 390, "dark", 1, ""),
    "web-phone-dark": ("/", 390, 844, "dark", 2, "#h-gpus"),
}


@contextlib.contextmanager
def neighbour(bookings: str, gpus: Sequence[str], home: str) -> Iterator[None]:
    """Let another user, lab3, book two GPUs as a scheduler does. This user is made for it, which needs root."""
    from scheduler.core.job import Process
    from scheduler.core.shared_bookings import Booking, Document
    from scheduler.sharing.bookings_file import own_space
    from scheduler.sharing.bookings_folder import BookingsFolder
    from scheduler.system.proc import boot_id
    from scheduler.system.processes import seen
    from tests.stories.people import User

    subprocess.run(["useradd", "-M", "-U", "-d", home, "lab3"], check=True)
    try:
        uid, gid = (int(subprocess.check_output(["id", which, "lab3"])) for which in ("-u", "-g"))
        boot = boot_id()  # loads what the child, as another user, may be unable to load

        def publish() -> None:
            found, now = seen(os.getpid()), time.clock_gettime(time.CLOCK_BOOTTIME)
            me = Process(found.pid, found.ticks)
            folder = BookingsFolder(bookings, "lab3", boot)
            folder.prepare()
            booked = (
                Booking(gpus[0], 500, since=max(0.0, now - 3100), processes=(me,)),
                Booking(gpus[1], 1000, since=max(0.0, now - 7400), until=now + 9000, processes=(me,)),
            )
            folder.publish(
                Document(
                    "lab3",
                    boot,
                    process=me,
                    space=own_space(),
                    waiting=2,
                    used=200.0,
                    used_at=now,
                    bookings=booked,
                )
            )
            os.read(wait, 1)  # until the parent closes its end

        wait, open_end = os.pipe()
        child = os.fork()
        if not child:
            os.close(open_end)
            os._exit(User("lab3", uid, gid).do(publish))
        try:
            while not any(name.startswith(f"gpujob-{uid}-") for name in os.listdir(bookings)):
                if os.waitpid(child, os.WNOHANG)[0]:
                    raise ChildProcessError("the neighbour could not publish its bookings")
                time.sleep(0.05)
            yield
        finally:
            os.close(open_end)
            os.waitpid(child, 0)
    finally:
        subprocess.run(["userdel", "lab3"], check=True)


def web_pictures(bookings: str) -> None:
    """Write the pictures of the web pages, for a scheduler with running, waiting and ended jobs."""
    from playwright.sync_api import expect, sync_playwright

    from tests.web.browsing import chromium
    from tests.web.lived_in import UUIDS, lived_in
    from tests.web.page import Page

    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory())
        playwright = stack.enter_context(sync_playwright())
        folder = Path(name) / "runs"
        folder.mkdir(mode=0o700)
        lived = lived_in(folder, bookings)
        if os.getuid() == 0:
            stack.enter_context(neighbour(bookings, UUIDS[2:], name))
        page = Page(lived.s).start()
        flags = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--disable-gpu", *flags])
        try:
            time.sleep(25)  # a few readings of the running jobs
            for picture, (path, width, height, scheme, scale, start) in PAGES.items():
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=scale
                )
                tab = context.new_page()
                tab.goto(page.url)
                tab.fill("input[name=token]", page.token)
                tab.keyboard.press("Enter")
                tab.wait_for_selector("#gpus")
                tab.goto(page.url + path)
                expect(tab.locator("#live")).to_have_text("live")
                if start:
                    tab.locator(start).evaluate("e => scrollTo(0, e.getBoundingClientRect().top + scrollY - 12)")
                tab.wait_for_timeout(1500)
                target = ROOT / "docs" / "pictures" / f"{picture}.png"
                target.write_bytes(packed(tab.screenshot()))
                print(f"written: {target} ({target.stat().st_size >> 10} KiB)")
                context.close()
        finally:
            browser.close()
            page.end()
            lived.end()


def card_picture() -> None:
    """Write the picture of the card of a job that ran out of GPU memory, after a good run of the same script."""
    from playwright.sync_api import expect, sync_playwright

    from tests.web.browsing import chromium
    from tests.web.failed_run import failed_run
    from tests.web.page import Page

    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name) / "runs"
        folder.mkdir(mode=0o700)
        s = failed_run(folder)
        page = Page(s).start()
        flags = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--disable-gpu", *flags])
        try:
            tab = browser.new_page(viewport={"width": 1000, "height": 900}, color_scheme="light")
            tab.goto(page.url)
            tab.fill("input[name=token]", page.token)
            tab.keyboard.press("Enter")
            tab.wait_for_selector("#gpus")
            tab.goto(page.url + "/jobs/2")
            expect(tab.locator("#live")).to_have_text("live")
            target = ROOT / "docs" / "pictures" / "failure-card.png"
            box = tab.locator("#job-head").bounding_box()
            assert box is not None
            clip = {"x": box["x"] - 16, "y": box["y"] - 8, "width": box["width"] + 32, "height": box["height"] + 24}
            target.write_bytes(packed(tab.screenshot(clip=clip, full_page=True)))
            print(f"written: {target} ({target.stat().st_size >> 10} KiB)")
        finally:
            browser.close()
            page.end()
            s.end_all()


def packed(png: bytes) -> bytes:
    """Return the PNG picture compressed with the highest level; browsers use a lower one."""
    at, out, data = 8, [png[:8]], b""
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        else:
            if kind == b"IEND":
                body = zlib.compress(zlib.decompress(data), 9)
                out.append(
                    struct.pack(">I4s", len(body), b"IDAT") + body + struct.pack(">I", zlib.crc32(b"IDAT" + body))
                )
            out.append(png[at : at + 12 + size])
        at += 12 + size
    return b"".join(out)


def main() -> None:
    """Write all pictures; with the argument ``web``, only those of the web pages, with ``card``, only that of a failure card."""
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as bookings:
        os.chmod(bookings, 0o1777)  # noqa: S103  sticky, as /run/lock
        os.environ["GPUJOB_BOOKINGS_FOLDER"] = bookings
        card_picture()
        if "card" in sys.argv[1:]:
            return
        web_pictures(bookings)
        if "web" not in sys.argv[1:]:
            terminal_picture()


def terminal_picture() -> None:
    """Write the picture of a terminal that is attached to the session of a job."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        (folder / "jobs.txt").write_text("0,train.py,,--llm qwen2.5-7b-inst --mode train --epochs 3,0-1\n")
        daemon = subprocess.Popen(
            [sys.executable, "-m", "scheduler", "start", "--gpus", "2", "--screen"], cwd=folder,
            env=dict(os.environ, PYTHONPATH=str(ROOT)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            end = time.monotonic() + 20
            while "gpujob_" not in run(folder, "screens") and time.monotonic() < end:
                time.sleep(0.1)
            screen = shown(folder, ["attach", "1"], 4.0, "epoch")
            target = ROOT / "docs" / "pictures" / "screen.svg"
            target.write_text(as_svg(screen, "screen -r gpujob_0_train_1"))
            print(f"written: {target}")
        finally:
            run(folder, "cancel", "1")
            run(folder, "wait", "1", "--timeout", "20")
            daemon.terminate()
            daemon.wait()


if __name__ == "__main__":
    main()
