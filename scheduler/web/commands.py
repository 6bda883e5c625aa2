"""The routes of the HTTP API that change jobs, GPUs or the queue, and the preview of a submission."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from scheduler.client.client import SCHEMA
from scheduler.client.dry_run import Preview, preview
from scheduler.client.submission import Submission, settings_of, spec_of, table_for
from scheduler.core.command_limits import check_nodes
from scheduler.core.errors import NotFound, Refused, UsageError, did_you_mean
from scheduler.core.job import Job, JobState, Outcome
from scheduler.core.job_options import BOOLEAN, GPUS, JOBS, PATH, SUBMIT_OPTIONS, TEXT, VARIABLES, read_options
from scheduler.core.requests import (
    Cancel,
    Edit,
    First,
    Hold,
    Pause,
    PauseQueue,
    Release,
    Request,
    Requeue,
    Resume,
)
from scheduler.core.secrets import without_secrets
from scheduler.views.predictions import expected_json
from scheduler.web.routes import Ask, Conflict, as_json

NOT_POSSIBLE, NOT_READ, REFUSED, LATER, NOT_THERE = 1, 2, 3, 5, 6  # exit codes in answers to requests (docs/json.md)
MOST_NAMED = 5  # jobs listed in a sentence
_FOR_TERMINALS = re.compile(r"; gpujob [a-z]+ \d+$")
SAID = "X-Gpujob-Said"
HEADERS = {
    SAID: "Sentence for people: what was done, or what is deferred until a scheduler starts; percent-encoded UTF-8."
}
LONGEST_SAID = 1000
OURS = "GPUJOB_"  # prefix of the web process's own variables, which jobs do not get

Reader = Callable[[str, Any], str]


def _text(key: str, value: Any) -> str:
    """Return a text, or a number as text (``3.0`` as ``3``). Raises UsageError for other types."""
    if isinstance(value, float):
        value = int(value) if value.is_integer() else value
    elif not isinstance(value, (str, int)) or isinstance(value, bool):
        raise UsageError("must be a text or a number", where=key)
    return _clean(key, str(value))


def _ids(key: str, value: Any) -> str:
    """Return GPU or job ids as text. The items of a list are joined by commas. Raises UsageError.

    A value that is not a list is converted by `_text`.
    """
    if not isinstance(value, list):
        return _text(key, value)
    if any(not isinstance(one, int) or isinstance(one, bool) or one < 0 for one in value):
        raise UsageError("must be a list of whole numbers", where=key)
    return ",".join(map(str, value))


def _gpus(key: str, value: Any) -> str:
    if value == []:
        raise UsageError("must name at least one GPU", where=key, do="leave it out to allow any GPU")
    return _ids(key, value)


def _yes(key: str, value: Any) -> str:
    if not isinstance(value, bool):
        raise UsageError("must be true or false", where=key)
    return "yes" if value else ""


def _path(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError("must be a text", where=key)
    return _clean(key, value)


def _clean(key: str, text: str) -> str:
    """Return the text unchanged. Raises UsageError for a NUL character or a text that cannot be encoded as UTF-8."""
    if "\0" in text:
        raise UsageError("must not contain a NUL character", where=key)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("must be valid UTF-8", where=key) from None
    return text


_TEXT: dict[str, Any] = {"type": ["string", "number"]}
_NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
# Kind of an option → function that turns a JSON value into the option's text, and the JSON Schema of the value.
KINDS: dict[str, tuple[Reader, Mapping[str, Any]]] = {
    TEXT: (_text, _TEXT),
    PATH: (_path, {"type": "string"}),
    BOOLEAN: (_yes, {"type": "boolean"}),
    JOBS: (_ids, {"anyOf": [_TEXT, _NUMBERS]}),
    GPUS: (_gpus, {"anyOf": [_TEXT, {**_NUMBERS, "minItems": 1}]}),
    VARIABLES: (_text, {"type": "object", "additionalProperties": _TEXT}),
}
OPTIONS = {option.name: option for option in SUBMIT_OPTIONS}
SUBMITTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "description": 'Program and arguments; a shell command is written ["sh", "-c", TEXT].',
        },
        **{name: {**KINDS[option.kind][1], "description": option.help} for name, option in OPTIONS.items()},
    },
    "required": ["command"],
    "additionalProperties": False,
}


def _shell(text: str) -> str:
    return json.dumps({"command": ["sh", "-c", text]}, ensure_ascii=False)


def check_keys(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise UsageError if the body has a key that is not in ``known``; the error names the key."""
    names = list(known)
    for key in body:
        if key not in names:
            do = f"known: {', '.join(names)}" if names else "send an empty object: {}"
            raise UsageError(f"unknown key {key[:40]!r}{did_you_mean(key, names)}", do=do)


def submission_of(ask: Ask) -> Submission:
    """Return the submission that the body of the request describes. Raises UsageError for a wrong key or value."""
    body = ask.body()
    check_keys(body, SUBMITTED["properties"])
    command = body.get("command")
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise UsageError('must be a list of words such as ["python", "train.py"]', where="command")
    for word in command:
        _clean("command", word)
    variables = body.pop("env", {})
    if not isinstance(variables, dict):
        raise UsageError('must be an object such as {"SEED": "1"}', where="env")
    env = []
    for name, value in variables.items():
        if not name or "=" in name:
            raise UsageError(f"{name[:40]!r} is not a valid name of a variable", where="env")
        env.append(f"{_clean('env', name)}={_text('env', value)}")
    texts = {key: KINDS[OPTIONS[key].kind][0](key, value) for key, value in body.items() if key != "command"}
    client = ask.source.client
    own = client.submission_place()
    if own is not None:
        return Submission(command=command, folder=own[0], environ=own[1], options=texts, env=env)
    folder = os.path.dirname(client.remembered("jobs_file") or client.places.state_file)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return Submission(command=command, folder=folder, environ=environ, options=texts, env=env)


def submit(ask: Ask) -> Response:
    """Add a job to the queue, and answer with its id."""
    source = ask.source
    spec, environment = spec_of(submission_of(ask), str, _shell)
    try:
        job = source.client.submit(spec, environment, table_for(spec, source.client, source.config))
    except NotFound as error:  # a dependency does not exist: an error in the body (400), not in the address (404)
        raise UsageError(error.what, do=error.do) from None
    finally:
        source.changed()
    return as_json({"id": job.id}, 201, {"Location": f"/api/jobs/{job.id}"})


def would(ask: Ask) -> Response:
    """Answer with a preview: what would happen to this job if it were submitted now. Changes nothing."""
    source = ask.source
    spec, environment = spec_of(submission_of(ask), str, _shell)  # a wrong value is an error, not the answer "never"
    try:
        check_nodes(spec.arguments)
        table = table_for(spec, source.client, source.config)
        if source.client.shared:  # the page looks at no file that a user has named
            found = source.client.preview(spec, environment, table)
        else:
            config = settings_of(source.client, source.config)
            found = preview(source.client.places, config, spec, environment, table, alive=source.client.alive())
    except Refused as error:
        found = Preview("never", reason_code="never", reason=str(error))
    except NotFound as error:
        raise UsageError(error.what, do=error.do) from None
    return as_json(
        {
            "schema": SCHEMA,
            "would": found.would,
            "gpus": list(found.gpus),
            "reason": found.reason or None,
            "reason_code": found.reason_code or None,
            "need": found.need,
            "command": list(found.command),
            "notes": [*found.notes, *([f"the command would fail immediately: {found.doubt}"] if found.doubt else [])],
            "expected": None if found.expected is None else expected_json(found.expected),
        }
    )


def carry_out(ask: Ask, request: Request) -> str:
    """Carry out a request and return a sentence about the result.

    If no daemon runs, the parts of the request that only a daemon can carry out are stored for the next daemon. This
    counts as success. Raises NotFound if the job or GPU does not exist, UsageError if the request cannot be read, and
    Conflict if the request is refused for another reason.
    """
    answer = ask.source.do(request)
    text = "; ".join(answer.lines)
    if answer.code == NOT_THERE:
        raise NotFound(text)
    if answer.code == NOT_READ:
        raise UsageError(text)
    if answer.code not in (0, LATER):
        raise Conflict(text)
    return _FOR_TERMINALS.sub("", text)


def answered(value: Mapping[str, Any], said: str) -> Response:
    """Return an answer of the API.

    ``value``: the body, which describes the new state. ``said``: the value of the header `SAID`, which says what was
    done.
    """
    return as_json(value, headers={SAID: quote(without_secrets(said)[:LONGEST_SAID])})


def acted(job: Job, said: str) -> Response:
    """Return the answer to a request about a job. ``said``: what was done, for people."""
    return answered({"id": job.id, "state": job.state.value}, said)


def _again(job: Job) -> Requeue:
    return Requeue((job.id,), after=(job.attempt,))


def _asking(kind: type[Any]) -> Callable[[Job], Request]:
    def request(job: Job) -> Request:
        made: Request = kind((job.id,))
        return made

    return request


def _on_job(
    verb: str, request: Callable[[Job], Request], possible: Callable[[Job], bool], what: str = ""
) -> Callable[[Ask], Response]:
    """Return the function of a route that makes a request about one job.

    ``possible``: function that returns whether the job's state allows the request. ``what``: the action as it is named
    in the error message, with ``{}`` in place of the job's id (default: the verb and the job).
    """
    what = what or f"{verb} job {{}}"

    def does(ask: Ask) -> Response:
        check_keys(ask.body(), ())
        job = ask.source.client.states([ask.numbers["id"]])[0]
        if not possible(job):
            raise Conflict(f"cannot {what.format(job.id)}: it is {job.state.value}")
        said = carry_out(ask, request(job))
        job = ask.source.client.states([job.id])[0]
        if verb == "cancel" and job.state.ended and job.outcome is not Outcome.CANCELLED:
            raise Conflict(said)  # the job ended before it could be cancelled
        return acted(job, "; ".join([said, *_also(ask, verb, job)]))

    return does


def _also(ask: Ask, verb: str, job: Job) -> list[str]:
    """Return further sentences about a retried job. For other verbs than `retry`, return an empty list.

    The sentences say which dependencies the user has to retry first, or that the job is still held.
    """
    if verb != "retry":
        return []
    if job.state is JobState.SKIPPED:
        parents = ask.source.client.known(job.spec.after_ok).values()
        bad = [one for one in parents if one.state.ended and not one.succeeded]
        return [f"job {one.id} is {one.state.value}; retry it first" for one in bad[:MOST_NAMED]]
    return ["it is still held; release it to let it start"] if job.held and job.state is JobState.PENDING else []


def _waits(job: Job) -> bool:
    return job.state is JobState.PENDING


cancel = _on_job("cancel", _asking(Cancel), lambda job: not job.state.ended)
retry = _on_job("retry", _again, lambda job: job.state.ended)
hold = _on_job("hold", _asking(Hold), _waits)
release = _on_job("release", _asking(Release), _waits)
first = _on_job("first", _asking(First), _waits, "put job {} first")


def priority(ask: Ask) -> Response:
    """Change the priority of a waiting job."""
    body = ask.body()
    check_keys(body, ("priority",))
    text = _text("priority", body.get("priority", ""))
    if not text:
        raise UsageError("the priority is missing", do='send {"priority": 0}')
    level = read_options({"priority": text}, str)
    said = carry_out(ask, Edit((ask.numbers["id"],), level))
    job = ask.source.client.states([ask.numbers["id"]])[0]
    return acted(job, "; ".join(filter(None, (said, _place_of(ask, job)))))


def _place_of(ask: Ask, job: Job) -> str:
    """Return a note about the place of a job in the queue after a change of its priority; empty if there is no note.

    Jobs that were put first start before all other jobs, whatever priorities they have. If this job was put first, the
    note says this. Otherwise the note names the jobs that were put first. There is no note if the job does not wait, or
    if no job was put first.
    """
    if job.state is not JobState.PENDING:
        return ""
    if job.order < 0:
        return "it was put first and stays first at any priority (cancel and retry return it to its ordinary place)"
    ahead = [one for one in ask.source.overview().jobs if one.state is JobState.PENDING and one.order < 0]
    names = [str(one.id) for one in sorted(ahead, key=lambda one: one.turn)]
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    jobs, were, verb = ("job", "was", "comes") if len(names) == 1 else ("jobs", "were", "come")
    return f"{jobs} {', '.join(names[:MOST_NAMED])}{more}, which {were} put first, still {verb} before it"


def pause_gpu(ask: Ask) -> Response:
    """Pause a GPU: no new job starts on it."""
    check_keys(ask.body(), ())
    return _paused(ask, carry_out(ask, Pause((ask.numbers["n"],))))


def resume_gpu(ask: Ask) -> Response:
    """Resume a GPU. ``force`` in the body also accepts the foreign processes and memory that are on it now."""
    body = ask.body()
    check_keys(body, ("force",))
    force = bool(_yes("force", body.get("force", False)))
    if force and not ask.source.client.alive():
        raise Conflict(
            "cannot resume with force: no scheduler is running, so the GPU is not read; start the scheduler first"
        )
    return _paused(ask, carry_out(ask, Resume((ask.numbers["n"],), force)))


def _paused(ask: Ask, said: str) -> Response:
    return answered({"paused_gpus": list(ask.source.client.pauses()[1])}, said)


def pause_queue(ask: Ask) -> Response:
    """Pause the queue: no job starts."""
    check_keys(ask.body(), ())
    return answered({"paused": True}, carry_out(ask, PauseQueue(True)))


def resume_queue(ask: Ask) -> Response:
    """Resume the queue: jobs start again."""
    check_keys(ask.body(), ())
    return answered({"paused": False}, carry_out(ask, PauseQueue(False)))
