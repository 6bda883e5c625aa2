"""Writes the generated parts of the documents (tables, JSON Schemas, config.example.yaml): `make tables`.

The tables list verbs, options, settings and reasons. With --check it only prints the files that differ.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import typer

from scheduler.cli.app import app
from scheduler.core.config import OPTIONS, RELOADABLE, written
from scheduler.core.failure_signs import CLASSES
from scheduler.core.job import REASON_CODES
from scheduler.core.job_options import (
    BOOLEAN,
    GPUS,
    JOB_OPTIONS,
    JOBS,
    LINE_KEYS,
    PATH,
    SUBMIT_OPTIONS,
    TEXT,
    VARIABLES,
)  # fmt: skip
from scheduler.core.rights import RIGHTS, ROLES
from scheduler.views.documents import DOCUMENTS, JobDocument
from scheduler.views.json_schema import published

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "config.example.yaml"
SCHEMAS = ROOT / "scheduler/views/schemas"
HEAD = """\
# gpujob: every setting with its default. Copy to config.yaml and take the # away from the lines you change;
# `gpujob config check` says what is wrong with it, `gpujob config show --origin` what counts and why.
# Read from --config FILE, else $GPUJOB_CONFIG, else ./config.yaml, else ~/.config/gpujob/config.yaml.
# What wins: option on the command line > environment variable GPUJOB_SET_<KEY> > this file > default.
# A key without a value has its default. Nobody but you (or root) may be able to write this file, nor its folder.
# Relative paths here are relative to this file's folder. Durations: 30, 30s, 5m, 4h, 2d.
# Keys marked (*) are read again when this file changes while the scheduler runs.
# `make tables` writes this file from the rows in scheduler/core/config.py.
"""
IN_JSON = {
    TEXT: "text or number",
    PATH: "text",
    BOOLEAN: "true or false",
    JOBS: "list of ids, or text",
    GPUS: "list of ids, or text",
    VARIABLES: "object",
}


def example_config() -> str:
    """Return the text of `config.example.yaml`: every setting as a comment, with its default and its meaning."""
    lines = [HEAD.rstrip("\n")]
    for name, row in OPTIONS.items():
        if row.metadata["section"]:
            lines += ["", f"# --- {row.metadata['section']} ".ljust(104, "-")]
        star = "(*) " if name in RELOADABLE else ""
        lines.append(f"{f'#{name}: {written(row.default)}':<38} # {star}{row.metadata['help']}")
    return "\n".join(lines) + "\n"


def line_keys() -> str:
    """Return the table of the `;key=value` pairs of a line."""
    rows = [f"| `{key}={option.example}` | {option.meaning} |" for key, option in LINE_KEYS.items()]
    return "\n".join(["| key | meaning |", "|---|---|", *rows])


def http_keys() -> str:
    """Return the table of the keys that `POST /api/jobs` accepts."""
    rows = [f"| `{option.name}` | {IN_JSON[option.kind]} | {option.help} |" for option in SUBMIT_OPTIONS]
    return "\n".join(["| key | value | |", "|---|---|---|", *rows])


def restart() -> str:
    """Return the sentence that lists the settings that a running scheduler does not read again."""
    names = ", ".join(f"`{name}`" for name in OPTIONS if name not in RELOADABLE)
    return f"These settings need a restart: {names}."


def settings() -> str:
    """Return the tables of settings, one for each section of the config."""
    lines: list[str] = []
    for name, row in OPTIONS.items():
        if row.metadata["section"]:
            heading = row.metadata["section"]
            lines += [
                "",
                f"### {heading[0].upper()}{heading[1:]}",
                "",
                "| setting | default | meaning |",
                "|---|---|---|",
            ]
        default = written(row.default)
        lines.append(
            f"| `{name}` | {f'`{default}`' if default else ''} | {row.metadata['help'].replace('|', chr(92) + '|')} |"
        )
    return "\n".join(lines[1:])


def reasons() -> str:
    """Return the table of reason codes."""
    rows = [f"| `{code}` | {meaning} |" for code, meaning in REASON_CODES.items()]
    return "\n".join(["| code | the job waits because |", "|---|---|", *rows])


def classes() -> str:
    """Return the table of classes of failures."""
    rows = [f"| `{row.name}` | {row.meaning} | {_as_cell(row.hint)} |" for row in CLASSES.values()]
    return "\n".join(["| class | the job failed because | what to do |", "|---|---|---|", *rows])


def _as_cell(hint: str) -> str:
    text = hint if not hint.endswith(": ") else f"{hint}request more or a larger share, or use a smaller batch size"
    return text.replace("|", "\\|")


def rights() -> str:
    """Return the table of rights in the scheduler of all users."""
    lines = ["| what | owner of the job | other user | administrator |", "|---|---|---|---|"]
    for right in RIGHTS.values():
        lines.append(f"| {right.what} | {' | '.join('yes' if role in right.roles else 'no' for role in ROLES)} |")
    return "\n".join(lines)


def job_options() -> str:
    """Return the table of a job's options: flag, meaning, whether `edit` accepts it, and its key on a line."""
    lines = ["| option | meaning | `edit` | on a line |", "|---|---|---|---|"]
    for option in SUBMIT_OPTIONS:
        flag = f"`{option.flag}{f' {option.metavar}' if option.metavar else ''}`"
        key = f"`{option.key}=`" if option.key else ""
        lines.append(f"| {flag} | {option.help} | {'yes' if option.edit else ''} | {key} |")
    return "\n".join(lines)


EVERYWHERE = ("--state-file", "--config", "--json", "--help")  # options that the document explains once


def _own_options(command: Any) -> list[str]:
    """Return a line for each option of a verb, except settings, options of a job and options of all verbs."""
    shared = {option.flag for option in JOB_OPTIONS.values()} if command.name in ("submit", "edit") else set()
    given = {f"--{name.replace('_', '-')}" for name in OPTIONS} if command.name in ("start", "run") else set()
    lines = []
    for one in command.params:
        names = [*one.opts, *one.secondary_opts]
        if one.param_type_name != "option" or shared.union(given, EVERYWHERE).intersection(names):
            continue
        text = ", ".join(names) + (f" {one.metavar}" if one.metavar else "")
        lines.append(f"- `{text}`: {one.help}")
    return lines


def _usage(name: str, command: Any) -> str:
    """Return the usage of a verb: `gpujob`, its name and its arguments."""
    arguments = [
        one.make_metavar() if not one.metavar else one.metavar
        for one in command.params
        if one.param_type_name == "argument"
    ]
    return " ".join(["gpujob", name, *arguments])


def verbs() -> str:
    """Return a section for each verb: usage, meaning, its own options."""
    found: list[tuple[str, Any]] = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found += [(f"{name} {word}", one) for word, one in inner.items()] if inner else [(name, command)]
    lines: list[str] = []
    for name, command in found:
        json = ", `--json`" if any("--json" in one.opts for one in command.params) else ""
        lines += [f"### {name}", "", f"`{_usage(name, command)}`{json}. {command.help}"]
        if name in ("submit", "add", "edit"):
            lines[-1] += " Options: [options of a job](#options-of-a-job)."
        if name in ("start", "run"):
            lines[-1] += " Options: [settings](configuration.md#settings)."
        own = _own_options(command)
        lines += ["", *own] if own else []
        lines.append("")
    return "\n".join(lines).rstrip("\n")


# Document → name of a block in it (between two comments) → function that returns the block's text.
BLOCKS = {
    "docs/jobs-file.md": {"line keys": line_keys},
    "docs/configuration.md": {"settings": settings, "restart": restart},
    "docs/gpus.md": {"reasons": reasons},
    "docs/failures.md": {"classes": classes},
    "docs/sharing.md": {"rights": rights},
    "docs/verbs.md": {"verbs": verbs, "options of a job": job_options},
    "docs/api.md": {"keys of a job": http_keys},
}


def made() -> dict[Path, str]:
    """Return file → its text with up-to-date generated parts. Exits with an error if a document lacks a block."""
    found = {EXAMPLE: example_config()}
    for name, blocks in BLOCKS.items():
        text = (ROOT / name).read_text()
        for block, make in blocks.items():
            begin, end = f"<!-- {block}: written by make tables -->\n", f"\n<!-- end of {block} -->"
            pattern = re.escape(begin) + ".*?" + re.escape(end)
            if not re.search(pattern, text, re.S):
                raise SystemExit(f"{name}: no block {begin.strip()} … {end.strip()}")
            whole = begin + make() + end
            text = re.sub(pattern, lambda _, whole=whole: whole, text, flags=re.S)
        found[ROOT / name] = text
    for name, form in DOCUMENTS.items():
        schema = published(name, form, {JobDocument: "job"})
        found[SCHEMAS / f"{name}.schema.json"] = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
    return found


def main() -> int:
    """Write and print the files that differ; with --check only print them, and return 1 if there are any."""
    differ = [path for path, text in made().items() if path.read_text() != text]
    for path in differ:
        if "--check" not in sys.argv:
            path.write_text(made()[path])
        print(path.relative_to(ROOT))
    return 1 if differ and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
