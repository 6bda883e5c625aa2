"""README.md and docs/: every `sh` block works as printed, and every other `gpujob …` has a known verb and options."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from scheduler.cli.app import app
from tests.stories.harness import Scheduler, alive, wait_for

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)

# Scripts that the pages mention; they accept any arguments and end quickly.
SCRIPTS = {
    "train.py": "import sys, time\nprint('GPU', *sys.argv[1:])\ntime.sleep(0.2)\n",
    "eval.py": "print('evaluated')\n",
    "fail.py": "raise SystemExit('this script fails')\n",
    "step1.py": "print('step 1')\n",
    "step2.py": "print('step 2')\n",
}


def blocks(page: Path, language: str) -> list[str]:
    """Return the texts of the fenced blocks of this language."""
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def _end_scheduler(folder: Path, environ: dict[str, str]) -> None:
    """End the scheduler that a page has started in the background."""
    shown = subprocess.run(
        ["gpujob", "status", "--json"], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    pid = json.loads(shown.stdout)["daemon"]["pid"] if shown.returncode == 0 else None
    if pid and alive(pid):
        os.kill(pid, 15)
        wait_for(lambda: not alive(pid), "the scheduler of the page ends")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")], ids=lambda page: page.stem)
def test_documented_commands_succeed_in_order(tmp_path: Path, page: Path, scheduler: Callable[..., Scheduler]) -> None:
    """All `sh` blocks of a page succeed, in their order, in one shell that ends at the first command that fails."""
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    folder = tmp_path / "work"
    folder.mkdir()
    cleaner = scheduler(folder=folder)  # ends the jobs of the page
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    (folder / "commands.txt").write_text("python train.py 1\npython eval.py\n")
    gpujob = home / "bin" / "gpujob"
    gpujob.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m scheduler "$@"\n')
    gpujob.chmod(0o755)
    (home / "bin" / "python").symlink_to(shutil.which("python3") or sys.executable)
    environ = {
        **cleaner.environ,
        "HOME": str(home),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "LC_ALL": "C.UTF-8",
    }
    script = "set -euo pipefail\n" + "\n".join(blocks(page, "sh"))
    said = tmp_path / "said"
    try:
        with said.open("wb") as out:
            done = subprocess.run(
                ["bash", "-c", script], cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=150,
                check=False,
            )  # fmt: skip
        assert done.returncode == 0, said.read_text(errors="replace")
    finally:
        _end_scheduler(folder, environ)


def _shown_commands(page: Path) -> list[str]:
    """Return every `gpujob …` in code spans and in blocks that are not run, without prompts and comments."""
    text = page.read_text()
    spans = re.findall(r"`(gpujob [^`\n]+)`", BLOCK.sub("", text))
    lines = [
        line for language, block in BLOCK.findall(text) if language not in ("sh", "json") for line in block.splitlines()
    ]
    lines = [re.sub(r"^\$ ", "", line) for line in lines if re.match(r"(\$ )?gpujob [a-z-]", line)]
    return [re.sub(r"\s+#.*", "", one) for one in (*spans, *lines)]


def _verbs() -> Any:
    return typer.main.get_command(app)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_documented_commands_have_only_existing_verbs_and_options(page: Path) -> None:
    """Each `gpujob` command that a page shows has a verb and options that exist.

    The options of `ts` and `track` are not checked here, because these verbs parse their words themselves.
    """
    group = _verbs()
    for shown in _shown_commands(page):
        words = shlex.split(re.sub(r"[|<>;&].*", "", shown))[1:]
        words = words[2:] if words[:1] in (["--state-file"], ["--config"]) else words
        if not words or words[0].startswith("-") or words[0] in ("…", "VERB"):
            continue
        command = group.commands.get(words[0])
        assert command is not None, f"{page.name}: {shown}"
        inner = getattr(command, "commands", None)
        if inner and words[1:] and words[1] in inner:
            command, words = inner[words[1]], words[1:]
        if words[0] in ("ts", "track"):
            continue
        known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
        for word in words[1:]:
            if word == "--":
                break
            if word.startswith("--"):
                assert word.partition("=")[0] in known, f"{page.name}: {shown}: no option {word}"


def test_documentation_pages_are_short_and_have_one_title() -> None:
    """Each page has at most 200 lines and exactly one title.

    Tables written by `make tables` do not count. The pages acceptance, architecture and CHANGELOG are not checked.
    """
    for page in PAGES:
        if page.stem in ("acceptance", "architecture", "CHANGELOG"):
            continue
        text = re.sub(
            r"<!-- ([\w ]+): written by make tables -->.*?<!-- end of \1 -->", "", page.read_text(), flags=re.S
        )
        assert len(text.splitlines()) <= 200, f"{page.name}: {len(text.splitlines())} lines"
        titles = re.findall(r"^# .+", BLOCK.sub("", text), re.M)
        assert len(titles) == 1, f"{page.name}: {titles}"


def test_anchors_lead_to_headings() -> None:
    """Each link with an anchor (`page.md#some-heading`) leads to a heading to which GitHub gives this anchor."""

    def anchors(path: Path) -> set[str]:
        heads = re.findall(r"^#+ (.+)$", BLOCK.sub("", path.read_text()), re.M)
        return {
            re.sub(r"[^\w\- ]", "", re.sub(r"`|\[|\]\(.*?\)", "", head)).strip().lower().replace(" ", "-")
            for head in heads
        }

    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
            path = (page.parent / target) if target else page
            assert anchor in anchors(path), f"{page.name}: {target}#{anchor}"
