"""Tests of the OpenAPI document: it is valid and complete, and describes every answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from scheduler.web import api
from scheduler.web.openapi import document
from tests.stories.harness import LONG, ROOT
from tests.web.generating import GENERATED_IDS, NOWHERE
from tests.web.page import Page

ENDLESS = "/api/events"
# Checks that do not apply: a value that fits the schema may still be refused (`gpus` "much"), and a POST that is
# not JSON is 415 also on a path without POST.
UNFIT = ("positive_data_acceptance", "unsupported_method")


def test_the_openapi_document_is_valid_and_describes_each_route_once() -> None:
    """The document is valid OpenAPI 3.1 and describes each route once, with all its answers."""
    from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

    told = document(api.CALLS)
    OPENAPI_31_VALIDATOR.validate(told)
    routes = {(method, path) for path, methods in told["paths"].items() for method in methods}
    assert routes == {(call.method.lower(), call.path) for call in api.CALLS} and len(routes) == len(api.CALLS)
    names = [operation["operationId"] for methods in told["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            codes = set(operation["responses"])
            assert {"400", "401", "421", "500", "503"} <= codes, path
            assert ("{" not in path) or "404" in codes, path
            assert (method == "get") or {"403", "413", "415"} <= codes, path
            assert (method == "get") == ("requestBody" not in operation), path
            named = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
            assert named == {word[1:-1] for word in path.split("/") if word.startswith("{")}, path
    for name, form in told["components"]["schemas"].items():
        Draft202012Validator.check_schema(form)
        assert "schema.json" not in str(form), name
    assert set(told["components"]["securitySchemes"]) == {"token", "browser"}


def test_the_page_serves_the_openapi_document(page: Page) -> None:
    """The page serves the document that `document` returns."""
    answer = page.get("/api/openapi.json")
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json() == document(api.CALLS)


@pytest.mark.long
@pytest.mark.timeout(3000 if LONG else 300)
def test_the_openapi_document_describes_every_answer(pages: Callable[[], Page], tmp_path: Path) -> None:
    """S6: The document describes every answer of the page to generated requests, valid and invalid ones.

    The generated requests contain no command that can run.
    """
    page = pages()
    page.scheduler.start("--cpu-slots=1", PATH="/nonexistent")
    page.start(PATH="/nonexistent")
    for _ in range(GENERATED_IDS):
        assert page.post("/api/jobs", {"command": [f"{NOWHERE}x"]}).status == 201
    (tmp_path / "schemathesis.toml").write_text('[headers]\nAuthorization = "Bearer ${GPUJOB_TEST_TOKEN}"\n')
    files = tmp_path / "files"
    files.mkdir()
    skipped = [ENDLESS, *([] if LONG else ["/api/preview"])]  # it has the same body as a submission
    done = subprocess.run(
        [
            shutil.which("st", path=os.path.dirname(sys.executable)) or "st", "run", f"{page.url}/api/openapi.json",
            "--phases=coverage,fuzzing", f"--max-examples={300 if LONG else 4}", "--generation-deterministic",
            "--suppress-health-check=all", "--no-color", "--continue-on-failure", "--request-timeout=30",
            f"--exclude-checks={','.join(UNFIT)}", *(f"--exclude-path={path}" for path in skipped),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=2900 if LONG else 280, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SCHEMATHESIS_HOOKS": "tests.web.generating", "GPUJOB_TEST_TOKEN": page.token,
             "GENERATED_FILES": str(files)},
    )  # fmt: skip
    print(done.stdout[-6000:].encode("ascii", "backslashreplace").decode())
    assert done.returncode == 0, (
        (done.stdout[-12000:] + done.stderr[-2000:]).encode("ascii", "backslashreplace").decode()
    )
    assert page.get("/api/status").status == 200 and page.process is not None and page.process.poll() is None
    outcomes = {row[0] for row in page.scheduler.rows("SELECT DISTINCT outcome FROM jobs WHERE outcome IS NOT NULL")}
    assert outcomes <= {"could_not_start", "cancelled", "dependency"}, outcomes
