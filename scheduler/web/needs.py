"""The routes of the HTTP API about learned needs: the needs of models, and writing suggestions into the model table."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from scheduler.client.needs import apply_needs, table_path
from scheduler.client.needs import needs as needs_of
from scheduler.core.errors import NoDaemon, NotFound, Refused, SchedulerError, StoreTrouble, UsageError
from scheduler.core.gpu import ResourceRequest
from scheduler.core.learned_needs import Advice
from scheduler.core.model_table import ModelTable
from scheduler.core.secrets import without_secrets
from scheduler.views.needs import applied_json, applied_lines, needs_json
from scheduler.web.commands import answered, check_keys
from scheduler.web.routes import Ask, Conflict, as_json

MOST = 1000  # models in a request
APPLIED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "models": {
            "type": "array",
            "items": {"type": "string"},
            "maxItems": MOST,
            "description": "Only these models; a need that is guessed from the name is written only if its model is named.",
        }
    },
    "additionalProperties": False,
}


def needs(ask: Ask) -> Response:
    """Answer with the needs of all models."""
    client, config = ask.source.client, ask.source.config
    return as_json(needs_json(needs_of(client, config, lambda text: None), table_path(client, config)))


def apply(ask: Ask) -> Response:
    """Write suggested needs into the model table. Raises Conflict if its file cannot be written, NotFound, UsageError."""
    body = ask.body()
    check_keys(body, APPLIED["properties"])
    models = body.get("models", [])
    if not isinstance(models, list) or len(models) > MOST or not all(isinstance(one, str) for one in models):
        raise UsageError(f"must be a list of at most {MOST} names", where="models")
    try:
        done = apply_needs(ask.source.client, ask.source.config, models)
    except (NotFound, StoreTrouble, NoDaemon):
        raise
    except SchedulerError as error:  # about the file, not about the request
        raise Conflict(error.what, where=error.where, do=error.do) from None
    ask.source.changed()
    return answered(applied_json(done), "; ".join(applied_lines(done)))


def shown_needs(ask: Ask) -> tuple[list[Advice], bool, list[str]]:
    """Return the advice for each model, whether the user may apply it, and what is wrong with the model table."""
    client, problems = ask.source.client, list[str]()
    try:
        rows = needs_of(client, ask.source.config, problems.append)
    except UsageError as error:  # a mistake in the table, and no scheduler that has read an earlier one
        rows, problems = client.needs(ModelTable()), [str(error)]
    try:
        client.needs(ModelTable(), every=True)
    except Refused:
        return rows, False, problems
    return rows, bool(table_path(client, ask.source.config)), problems


def may_be_applied(row: Advice) -> bool:
    """Return whether the page offers to write the suggestion of this row."""
    if row.suggestion is None or (not row.table and row.model != without_secrets(row.model)):
        return False
    return not row.table or ResourceRequest.parse(row.table) != row.suggestion.need
