"""How the pages come to be: templates, what stands in them made harmless, and the files that go with them."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from scheduler.core.secrets import without_secrets
from scheduler.core.units import mib_text, span_text, utc

HERE = os.path.dirname(os.path.abspath(__file__))
# File → its media type. The only files that are given out: there is no path to look one up by.
STATIC = {
    "style.css": "text/css; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "act.js": "text/javascript; charset=utf-8",
    "log.js": "text/javascript; charset=utf-8",
    "submit.js": "text/javascript; charset=utf-8",
    "timeline.js": "text/javascript; charset=utf-8",
    "favicon.svg": "image/svg+xml",
}
# Glyph of each state: never the colour alone.
GLYPHS = {
    "pending": "○", "starting": "◔", "running": "▸", "stopping": "◒", "done": "✓", "failed": "✗",
    "cancelled": "⊘", "skipped": "↷",
    "AVAILABLE": "○", "BUSY": "▸", "PAUSED": "‖", "UNHEALTHY": "✗", "GONE": "✗", "STALE": "?", "FOREIGN": "◆",
    "DRAINING": "◒",
}  # fmt: skip
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def plain(text: str) -> str:
    """The text without secrets, what controls it or turns it round made visible; line ends stay."""
    return _UNSAFE.sub(_visible, without_secrets(text))


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _shown(value: Any) -> Any:
    return plain(value) if type(value) is str else value


def moment(seconds: float | None, form: str = "") -> Markup | str:
    """A time in this machine's zone, with the UTC one for programs and as a hint; a dash for none."""
    if seconds is None:
        return "–"
    local = time.localtime(seconds)
    if not form:
        today = time.localtime()[:3] == local[:3]
        form = "%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S"
    exact = utc(seconds)
    return Markup('<time datetime="{0}" title="{0}">{1}</time>').format(exact, time.strftime(form, local))


def clock(seconds: float) -> str:
    """A time in this machine's zone as bare text, for hints."""
    return time.strftime("%a %d %b %H:%M", time.localtime(seconds))


def zone() -> str:
    """The zone that this machine's times are in."""
    return time.strftime("%Z")


def since(start: float | None, now: float) -> Markup | str:
    """How long ago, which a script counts on; a dash for never."""
    if start is None:
        return "–"
    return Markup('<span data-since="{:.0f}">{}</span>').format(start, span_text(now - start))


def state(name: str) -> Markup:
    """A state as its glyph and its word."""
    return Markup('<span class="state s-{0}"><span aria-hidden="true">{1}</span> {0}</span>').format(
        name, GLYPHS.get(name, "·")
    )


def number(value: float, digits: int = 2) -> str:
    """A number without trailing zeros."""
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def percent(value: float | None) -> str:
    """0 to 1 in per cent; a dash for what nobody knows."""
    return "–" if value is None else f"{value:.0%}"


def size(mib: float | None) -> str:
    """Memory in MiB for people; a dash for what nobody knows."""
    return "–" if mib is None else mib_text(mib)


@functools.cache
def environment() -> Environment:
    """The templates: every text escaped and made harmless, an unknown name is an error."""
    made = Environment(
        loader=FileSystemLoader(os.path.join(HERE, "templates")),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(
        moment=moment, span=span_text, state=state, num=number, percent=percent, mib=size, utc=utc, plain=plain
    )
    made.globals.update(since=since, static=static_address, glyphs=GLYPHS, clock=clock, zone=zone)
    return made


@functools.cache
def static_file(name: str) -> bytes:
    """The content of one of `STATIC`."""
    with open(os.path.join(HERE, "static", name), "rb") as stream:
        return stream.read()


@functools.cache
def static_address(name: str) -> str:
    """Where one of `STATIC` is fetched: another address when it changes."""
    return f"/static/{name}?v={hashlib.sha256(static_file(name)).hexdigest()[:12]}"


def render(template: str, **names: Any) -> str:
    """A page."""
    return environment().get_template(template).render(**names)
