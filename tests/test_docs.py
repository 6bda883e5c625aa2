"""Checks that the documents agree with the program: settings, verbs, examples, links and named tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import typer
import yaml

from scheduler.cli.app import app
from scheduler.core.config import OPTIONS, read_option
from scheduler.core.model_table import table_from
from scheduler.intake.config_file import read_entries
from scheduler.intake.jobs_file import LineContext, parse

ROOT = Path(__file__).resolve().parents[1]


def documents() -> list[Path]:
    """Return the paths of all documents of the project. The changelog is left out, because it describes the past."""
    found = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "scheduler").rglob("*.md"),
        ROOT / "tests/README.md",
    ]
    return [path for path in found if path.name != "CHANGELOG.md"]


def verbs() -> set[str]:
    return set(typer.main.get_command(app).commands)


def test_the_example_config_lists_every_key_with_its_default(tmp_path: Path) -> None:
    """config.example.yaml sets nothing. If the `#` before each key is removed, it sets each key to its default."""
    text = (ROOT / "config.example.yaml").read_text()
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert read_entries(str(path)) == ({}, [])
    path.write_text(re.sub(r"(?m)^#(?=[a-z_]+:)", "", text))
    entries, errors = read_entries(str(path))
    assert not errors and set(entries) == set(OPTIONS)
    for name, entry in entries.items():
        assert entry.value is None or read_option(name, entry.value, "example") == OPTIONS[name].default, name


def test_generated_tables_in_the_documents_are_up_to_date() -> None:
    """The generated tables in the documents are up to date (`make tables`)."""
    script = ROOT / "docs/make_tables.py"
    found = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_every_verb_is_in_the_readme_and_the_verbs_page() -> None:
    for document in ("README.md", "docs/verbs.md"):
        text = (ROOT / document).read_text()
        for verb in verbs():
            assert re.search(rf"\b{verb}\b", text), f"{verb} is not in {document}"


def test_the_example_files_are_valid() -> None:
    line_context = LineContext(str(ROOT), managed=(0, 1))
    jobs = [parse(line, line_context) for line in (ROOT / "jobs.example.txt").read_text().splitlines()]
    specs = [job.spec for job in jobs if job]
    assert len(specs) == 6
    assert all(Path(spec.script).is_file() and not spec.conda_env for spec in specs)
    table_from(json.loads((ROOT / "llm_config.json").read_text()), "llm_config.json")


def test_the_readme_examples_are_valid() -> None:
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```csv\n(# priority.*?)```", text, re.S)
    assert block
    jobs = [parse(line, LineContext("/data", managed=range(8))) for line in block.group(1).splitlines()]
    assert [job is not None for job in jobs] == [False, True, True, True, True]
    config = re.search(r"```yaml\n(.*?)```", text, re.S)
    assert config
    for key, value in yaml.safe_load(config.group(1)).items():
        read_option(key, value, "README.md")
    for document in re.findall(r"```json\n(.*?)```", text, re.S):
        json.loads(document)


def test_every_statement_of_the_acceptance_page_names_existing_tests() -> None:
    """docs/acceptance.md names an existing test for each statement."""
    text = (ROOT / "docs/acceptance.md").read_text()
    rows = re.findall(r"^\| (S\d\.\d+) \| .*? \| (.*?) \|$", text, re.M)
    assert len(rows) >= 20
    for statement, cell in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)
        assert named, f"{statement} has no test"
        for path, name in named:
            source = (ROOT / path).read_text()
            found = re.search(rf"def {name}\(.*?(?=\ndef |\Z)", source, re.S)
            assert found, f"{statement}: no {name} in {path}"


def test_every_row_of_the_fault_list_names_existing_tests() -> None:
    """docs/acceptance.md names an existing test for each row of the fault list, A to K and S."""
    text = (ROOT / "docs/acceptance.md").read_text()
    rows = re.findall(r"^\| ([A-K]\d\d|S\d+) \| (.*) \|$", text, re.M)
    assert len(rows) > 150
    no_test = set(re.findall(r"^\| ([A-K]\d\d) \|", (ROOT / "docs/reliability.md").read_text(), re.M))
    last = {"A": 21, "B": 26, "C": 40, "D": 11, "E": 19}
    wanted = {f"{part}{number:02}" for part, most in last.items() for number in range(1, most + 1)}
    assert not wanted - no_test - {row for row, _ in rows}
    for row, cell in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)
        assert named, f"{row} has no test"
        for path, name in named:
            assert re.search(rf"\bdef {name}\(", (ROOT / path).read_text()), f"{row}: no {name} in {path}"


def test_every_test_with_a_row_id_is_named_in_that_row() -> None:
    """If a test has the id of a row of docs/acceptance.md in its name, this row names the test."""
    rows = dict(re.findall(r"^\| ([A-K]\d\d|S\d+) \| (.*) \|$", (ROOT / "docs/acceptance.md").read_text(), re.M))
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M):
            found = re.match(r"test_((?:(?:[a-k]\d\d|s\d+)_)+)(?!\d)", name)
            for row in found[1].upper().strip("_").split("_") if found else ():
                if row in rows and not re.search(rf"{row}_\d", name.upper()):  # S3_32 belongs to another list
                    assert f"`{path.relative_to(ROOT)}::{name}`" in rows[row], f"{row}: {name} is not named"


def test_every_test_that_a_document_names_exists() -> None:
    """Each `test_…` in a document is the name of a test or of a test file.

    If "…" follows the name, as in `test_h02_…`, at least one name begins with it.
    """
    paths = list((ROOT / "tests").rglob("test_*.py"))
    names = {path.stem for path in paths}
    names |= {name for path in paths for name in re.findall(r"^ *(?:async )?def (test_\w+)\(", path.read_text(), re.M)}
    wrong = []
    for document in documents():
        for name, open_end in re.findall(r"\b(test_\w+)(…?)", document.read_text()):
            if not (any(one.startswith(name) for one in names) if open_end else name in names):
                wrong.append(f"{document.relative_to(ROOT)}: {name}{open_end}")
    assert not wrong, "\n".join(wrong)


def test_links_in_documents_have_targets() -> None:
    for document in documents():
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_files_and_names_mentioned_in_documents_and_docstrings_exist() -> None:
    """Each file that a document or a docstring names exists.

    If a name follows the file, as in `core/states.py: TABLE`, the file contains this name. `NAME.py` and the
    names of users' own scripts are not checked.
    """
    theirs = {"NAME.py", "train.py", "eval.py", "job.py", "x.py", "scheduler.py", "queue.py"}
    files = [path for folder in ("scheduler", "tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")]
    wrong = []
    for document in [*documents(), *(ROOT / "scheduler").rglob("*.py")]:
        for name, inside in re.findall(r"`([\w/]+\.py)(?:: (\w+))?", document.read_text()):
            if name.rpartition("/")[2] in theirs:
                continue
            meant = [path for path in files if f"/{path.relative_to(ROOT)}".endswith(f"/{name}")]
            if not any(re.search(rf"\b{inside}\b", path.read_text()) for path in meant):
                wrong.append(f"{document.relative_to(ROOT)}: {name}{f': {inside}' if inside else ''}")
    assert not wrong, "\n".join(wrong)
