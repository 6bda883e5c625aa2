"""`python -m benchmarks.picture RESULTS OUT`: draw the ratios of the case peers as an SVG file.

RESULTS: a file that `python -m benchmarks peers --json RESULTS` has written; its last line of this case is drawn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from html import escape
from typing import Any

from benchmarks.figures import median

WIDTH, ROW, LEFT, BAR, GAP = 760, 22, 170, 470, 34
PANELS = (  # title, ratio of a program, goal of gpujob
    ("burst of short jobs: jobs/s, as a multiple of the floor (more is better)", "burst_ratios", 0.35),
    ("from handing a job over to its start, as a multiple of the floor (less is better)", "start_ratio", 2.6),
    ("from the end of a job to the start of the next (less is better)", "gap_ratio", 2.0),
)


def drawing(programs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return an SVG document. ``programs``: name of a program → its figures, as in the results file."""
    out: list[str] = []
    y = 10
    for title, key, goal in PANELS:
        found = {name: figures[key] for name, figures in programs.items()}
        ratios = {name: median(value) if isinstance(value, list) else value for name, value in found.items()}
        scale = BAR / max(goal, *ratios.values())
        out.append(f'<text x="10" y="{y + 14}" class="title">{escape(title)}</text>')
        top = y = y + 24
        for name, ratio in ratios.items():
            mine = " mine" if name == "gpujob" else ""
            out.append(f'<text x="{LEFT - 8}" y="{y + 15}" class="name">{escape(name)}</text>')
            out.append(
                f'<rect x="{LEFT}" y="{y + 3}" width="{ratio * scale:.1f}" height="{ROW - 6}" class="bar{mine}"/>'
            )
            out.append(f'<text x="{LEFT + ratio * scale + 6:.1f}" y="{y + 15}" class="value">{ratio:.2f}</text>')
            y += ROW
        at = LEFT + goal * scale
        out.append(f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{y}" class="goal"/>')
        out.append(f'<text x="{at:.1f}" y="{y + 12}" class="note">goal {goal:g}</text>')
        y += GAP
    style = (
        "svg{background:#fff;font:13px sans-serif}.title{font-weight:bold}.name{text-anchor:end}.value{fill:#444}"
        ".bar{fill:#9aa7b8}.mine{fill:#1f5fbf}.goal{stroke:#b42318;stroke-dasharray:4 3}.note{fill:#b42318;text-anchor:middle;"
        "font-size:11px}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}">'
    return "\n".join([head, f"<style>{style}</style>", *out, "</svg>\n"])


def main() -> None:
    """Read the results file and write the SVG file."""
    results, target = sys.argv[1:]
    with open(results, encoding="utf-8") as stream:
        last = [line for line in map(json.loads, stream) if line["case"] == "peers"][-1]
    with open(target, "w", encoding="utf-8") as stream:
        stream.write(drawing(last["figures"]))


if __name__ == "__main__":
    main()
