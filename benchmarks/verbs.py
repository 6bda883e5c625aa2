"""Case verbs: how long the commands that do not wait take as whole processes, with and without the warm process."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.figures import Report, median, p99, progress, spread
from benchmarks.house import House, timed
from benchmarks.plan import Plan
from benchmarks.programs import TRUE

# One round. The queue is paused, and `@` is the job that the round has submitted last. `WORD` differs in each round.
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("--version",), ("--help",), ("status",), ("jobs",), ("show", "1"), ("why", "1"), ("logs", "1"), ("report",),
    ("add", TRUE, "--args", "WORD"), ("submit", "--", TRUE), ("hold", "@"), ("release", "@"), ("first", "@"),
    ("edit", "@", "--priority", "3"), ("cancel", "@"), ("retry", "@"), ("pause", "0"), ("resume", "0"),
    ("queue", "pause"), ("config", "show"), ("ts", "-l"), ("ts", TRUE),
)  # fmt: skip


def verbs(plan: Plan) -> Report:
    """Measure whole processes beside the start of an interpreter that loads nothing (`python -I -S -c pass`).

    Each command runs both ways: in a fork of the warm process, and in a new interpreter that loads gpujob.
    """
    count = plan.count(10)
    took: dict[str, dict[str, list[float]]] = {" ".join(words[:2]): {} for words in COMMANDS}
    bare: list[float] = []
    with House(plan.folder, gpus=2) as house:
        program = Path(house.folder, "gpujob-program")
        program.write_text(f"#!{sys.executable}\nfrom scheduler.entrypoint import entry\n\nentry()\n")
        program.chmod(0o700)
        fast = {**house.environ, "TS_SOCKET": house.path("ts.socket"), "GPUJOB_WARM": house.folder}
        ways = {"warm": fast, "ordinary": {**fast, "GPUJOB_WARM": "0"}}
        house.command("submit", "--wait", "--", TRUE)
        house.command("queue", "pause")
        try:
            for n in range(
                -1, count
            ):  # the first round compiles modules, and starts the warm process and a `ts` server
                progress(f"verbs: round {n + 1} of {count}")
                for way, environ in ways.items():
                    for words in COMMANDS:
                        house.wait_quiet()
                        said = [str(program), *(f"{way}{n}" if word == "WORD" else word for word in words)]
                        seconds = timed(said, house.folder, environ)
                        if n >= 0:
                            took[" ".join(words[:2])].setdefault(way, []).append(seconds * 1e3)
                bare.append(timed([sys.executable, "-I", "-S", "-c", "pass"], house.folder, fast) * 1e3)
        finally:
            timed([str(program), "ts", "-K"], house.folder, ways["ordinary"])
    floor = median(bare)
    report = Report(
        "verbs",
        f"whole processes, {count} times; python -I -S -c pass takes {floor:.1f} ms",
        ("ms", "warm p50", "p99", "ratio", "ordinary p50", "p99", "ratio"),
    )
    for name, found in took.items():
        cells = [(median(found[way]), p99(found[way]), median(found[way]) / floor) for way in ways]
        report.row(name.replace(TRUE, "true"), *(cell for row in cells for cell in row))
        report.figures[name] = {way: spread(values) for way, values in found.items()}
    report.figures["python -I -S -c pass"] = spread(bare)
    return report
