"""Hooks of schemathesis: change the generated requests so that they run no program and use no file."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

NOWHERE = "/nonexistent/"
PROGRAMS, FILES, LEFT_OUT = ("on_finish",), ("cwd", "log_dir"), ("mail",)
GENERATED_IDS = 3


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Return the parameters with a job id from 0 to ``GENERATED_IDS``. Jobs with most of these ids exist."""
    number = path_parameters.get("id") if isinstance(path_parameters, dict) else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        return path_parameters
    return {**path_parameters, "id": number % (GENERATED_IDS + 1)}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Return the body of a request in a form that runs no program and uses no file outside the test's folder.

    The names of programs are replaced by names of programs that do not exist. Paths are replaced by the test's folder.
    Some keys are removed.
    """
    if not isinstance(body, dict):
        return body
    command = body.get("command")
    if isinstance(command, list) and command and isinstance(command[0], str):
        body = {**body, "command": [NOWHERE + command[0].lstrip("/"), *command[1:]]}
    for key in PROGRAMS:
        if isinstance(body.get(key), str):
            body = {**body, key: NOWHERE + body[key].lstrip("/")}
    for key in FILES:
        if isinstance(body.get(key), str):
            body = {**body, key: os.environ["GENERATED_FILES"]}
    return {key: value for key, value in body.items() if key not in LEFT_OUT}
