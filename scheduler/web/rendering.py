"""Rendering of the pages: templates, filters, masking and escaping of texts, and the static files."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from scheduler.client.outlook import Moment
from scheduler.core.secrets import without_secrets
from scheduler.core.units import local_time, mib_text, span_text, utc
from scheduler.views.predictions import at_text, band_text

HERE = os.path.dirname(os.path.abspath(__file__))
# File → its media type. Only these files are served; no file is opened by a path from a request.
STATIC = {
    "style.css": "text/css; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "act.js": "text/javascript; charset=utf-8",
    "log.js": "text/javascript; charset=utf-8",
    "submit.js": "text/javascript; charset=utf-8",
    "timeline.js": "text/javascript; charset=utf-8",
    "favicon.svg": "image/svg+xml",
}
# Glyph of each state, so that no state is shown by colour only.
GLYPHS = {
    "pending": "○", "starting": "◔", "running": "▸", "stopping": "◒", "done": "✓", "failed": "✗",
    "cancelled": "⊘", "skipped": "↷",
    "AVAILABLE": "○", "BUSY": "▸", "PAUSED": "‖", "UNHEALTHY": "✗", "GONE": "✗", "STALE": "?", "FOREIGN": "◆",
    "DRAINING": "◒",
}  # fmt: skip
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def plain(text: str) -> str:
    """Return the text with secrets masked and control and direction characters escaped; tabs and newlines stay."""
    return _UNSAFE.sub(_visible, without_secrets(text))


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8 (surrogateescape)
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _shown(value: Any) -> Any:
    return plain(value) if type(value) is str else value


def moment(seconds: float | None, form: str = "") -> Markup | str:
    """Return a time in this machine's zone as HTML, with the UTC time as its tooltip; a dash for None."""
    if seconds is None:
        return "–"
    local = time.localtime(seconds)
    if not form:
        today = time.localtime()[:3] == local[:3]
        form = "%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S"
    exact = utc(seconds)
    return Markup('<time datetime="{0}" title="{0}">{1}</time>').format(exact, time.strftime(form, local))


def clock(seconds: float) -> str:
    """Return a time in this machine's zone as plain text, for tooltips."""
    return time.strftime("%a %d %b %H:%M", time.localtime(seconds))


def zone() -> str:
    """Return the name of this machine's time zone."""
    return time.strftime("%Z")


def since(start: float | None, now: float) -> Markup | str:
    """Return the time since ``start`` as HTML, which `live.js` keeps up to date; a dash for None."""
    if start is None:
        return "–"
    return Markup('<span data-since="{:.0f}">{}</span>').format(start, span_text(now - start))


def expected(found: Moment | None, now: float, source: str = "") -> Markup | str:
    """Return a predicted time as HTML, with its band as tooltip; a dash if it is not known.

    ``source``: what the prediction is based on. `live.js` counts down the seconds to a near time.
    """
    if found is None:
        return Markup('<span title="not known">–</span>')
    tip = band_text(found, now) + (f"; expected run time from {source}" if source else "")
    return Markup('<time datetime="{0}" title="{1}" data-until="{2:.0f}">{3}</time>').format(
        utc(round(found.likely)), tip, found.likely, at_text(found, now)
    )


def state(name: str) -> Markup:
    """Return a state as HTML: its glyph and its name."""
    return Markup('<span class="state s-{0}"><span aria-hidden="true">{1}</span> {0}</span>').format(
        name, GLYPHS.get(name, "·")
    )


def number(value: float, digits: int = 2) -> str:
    """Return a number with up to ``digits`` decimals, without trailing zeros."""
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def percent(value: float | None) -> str:
    """Return a share of 0 to 1 in per cent; a dash for None."""
    return "–" if value is None else f"{value:.0%}"


def size(mib: float | None) -> str:
    """Return an amount of memory, given in MiB, as text with its unit; a dash for None."""
    return "–" if mib is None else mib_text(mib)


@functools.cache
def environment() -> Environment:
    """Return the template environment. It applies `plain` to every text and escapes the text for HTML.

    If a template uses a variable that was not given, this is an error.
    """
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
        moment=moment,
        span=span_text,
        band=band_text,
        clock_near=local_time,
        state=state,
        num=number,
        percent=percent,
        mib=size,
        utc=utc,
        plain=plain,
    )
    made.globals.update(since=since, expected=expected, static=static_address, glyphs=GLYPHS, clock=clock, zone=zone)
    return made


@functools.cache
def static_file(name: str) -> bytes:
    """Return the content of a static file, one of `STATIC`."""
    with open(os.path.join(HERE, "static", name), "rb") as stream:
        return stream.read()


@functools.cache
def static_address(name: str) -> str:
    """Return the URL of a static file. It contains a hash of the content, so browsers fetch a changed file again."""
    return f"/static/{name}?v={hashlib.sha256(static_file(name)).hexdigest()[:12]}"


def render(template: str, **names: Any) -> str:
    """Return a template filled with these variables."""
    return environment().get_template(template).render(**names)
