"""The verb `needs`: shows what the runs of each model used, and writes suggested needs into the model table."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from scheduler.client.locate import client_of, state_file_for
from scheduler.client.needs import apply_needs, table_path
from scheduler.client.needs import needs as needs_of
from scheduler.core.needs_to_apply import chosen
from scheduler.views import render
from scheduler.views.needs import applied_json, applied_lines, needs_json, needs_lines


def needs(
    models: Sequence[str] = (),
    *,
    json: bool = False,
    apply: bool = False,
    state_file: str | None = None,
    config: str | None = None,
) -> int:
    """Print the need of each model, or of ``models``; with ``apply`` write suggestions. Return the exit code 0.

    Raises NotFound for an unknown model, and the errors of `apply_needs`.
    """
    client = client_of(state_file_for(state_file, config))
    if apply:
        done = apply_needs(client, config, models)
        if json:
            render.print_json(applied_json(done))
        else:
            print("\n".join(applied_lines(done)))
        return 0
    rows = chosen(needs_of(client, config, _warn), models)
    path = table_path(client, config)
    if json:
        render.print_json(needs_json(rows, path))
    elif rows:
        print("\n".join(needs_lines(rows, path)))
    else:
        print("no models: no job with --llm NAME has run, and the model table is empty")
    return 0


def _warn(text: str) -> None:
    print(f"gpujob: {render.safe(text)}", file=sys.stderr)
