"""Payloads that attack shells, SQL, terminals and paths, in every field.

No payload is executed. The jobs get the exact bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.client.client import SchedulerClient
from scheduler.core.job import JobSpec
from scheduler.core.model_table import ModelTable
from tests.stories.harness import Scheduler, wait_for

MARK = "canary"
DO = f"touch {MARK}"
PAYLOADS = list(dict.fromkeys([
    *(form.format(DO) for form in (
        "; {0}", "| {0}", "|| {0}", "& {0} &", "&& {0}", "`{0}`", "$({0})", "${{x:-$({0})}}", "'; {0}; '", '"; {0}; "', "\\'; {0}; #",
        "x\n{0}\n", "x\r\n{0}", "$(({0}))", "<({0})", ">({0})", "{0}", "-c {0}", "!{0}", "%({0})s", "{{{{{0}}}}}", "{{%{0}%}}", "$'{0}'",
        "a;{0};b", "a|{0}", "a\t;{0}", "()\x20{{ :; }}; {0}", "$IFS;{0}", "x';`{0}`;'", 'x";$({0});"', "#{{{0}}}", "<%= `{0}` %>",
        "$[{0}]", "\\;{0}", "~;{0}", "--;{0}", "@{0}", "={0}", "eval {0}", "exec {0}", "sh -c '{0}'", "python -c 'open(\"canary\",\"w\")'",
    )),
    *(f"{quote} OR 1=1{end}" for quote in ("'", '"', "`", "\\'", "')", '")') for end in ("", " --", " #", ";", "/*")),
    *(f"{start}{what}; --" for start in ("'; ", '"; ', "1); ", "'); ") for what in (
        "DROP TABLE jobs", "DELETE FROM jobs", "UPDATE jobs SET state='done'", "ATTACH DATABASE 'canary' AS x", "VACUUM INTO 'canary'",
        "PRAGMA user_version=9", "INSERT INTO meta VALUES('a','b')",
    )),
    *("__class__ __init__ __globals__ {0.__class__} {self} %s %n %x %(x)s {} {0} ${x} $x $$ $? $! $0 $@ * ? [a-z] {a,b} ~ ~root ! !! ^a^b "
      ".. ../.. ../../etc/passwd /etc/passwd /dev/null /dev/stdin /proc/self/environ . / // -rf --help --version --state-file -- - -X + "
      "C:\\x \\ \\\\ %2e%2e%2f %00 %0a ＂ ʼ ‮abc ⁦x é 日本語 \U0001f600 ﻿ nul con null None NaN Infinity true 0 -1 1e999 "
      "0x10 01 +1 1_000 ١ ; ;; ;key=value ;gpus=0 ;after=1 , ,, ,,, ,0 ,0-3 \" ' \"\" '' \"' `` ` # #x <x> <script>alert(1)</script> &amp; "
      "javascript:alert(1) !!python/object/apply:os.system ${jndi:ldap://x} file:///etc/passwd http://x/ @ @~1 @all".split(" ")),
    "a b", " a", "a ", "\ta", "a\x01b", "\x1b[2J", "\x7f", "a\x0bb", "x" * 5000, "\u2028", "=cmd|' /C calc'!A0", "a'b\"c`d$e\\f",
]))  # fmt: skip

# The file contains the number of words, so that `saw` can leave out a file that is still being written.
SEES = """#!/bin/sh
printf '%s\\0' "$GPUJOB_ID" "$#" "$@" > "{folder}/saw-$GPUJOB_ID"
"""


@pytest.fixture
def s(scheduler: Callable[..., Scheduler]) -> Scheduler:
    made = scheduler(gpus=1, cpu_slots=16)
    script = made.folder / "sees.sh"
    script.write_text(SEES.format(folder=made.folder))
    script.chmod(0o755)
    return made


def saw(s: Scheduler) -> dict[int, list[bytes]]:
    """Return job id → arguments that the job got, for jobs that have written all of their arguments."""
    found = {}
    for path in s.folder.glob("saw-*"):
        number, _, rest = path.read_bytes().partition(b"\0")
        count, whole, rest = rest.partition(b"\0")
        words = rest.split(b"\0")[:-1]
        if whole and len(words) == int(count):
            found[int(number)] = words
    return found


def no_mark(s: Scheduler) -> None:
    found = [str(path) for top in (s.folder, Path.cwd(), Path("/tmp")) for path in top.glob(f"{MARK}*")]
    assert found == []
    assert list(s.folder.rglob(MARK)) == []


def test_s12_no_payload_in_a_field_of_a_line_or_submission_is_executed(s: Scheduler) -> None:
    """S12, S7: No payload in a field of a jobs line or a submission is executed; jobs get the exact bytes as arguments.

    Fields: arguments, label, variable, working folder, conda environment, script.
    """
    assert len(PAYLOADS) >= 200
    s.start()
    clean = [text for text in PAYLOADS if "\n" not in text and "\r" not in text]
    as_words = {}
    lines = []
    for text in clean:
        field = '"' + shlex.join([text, "end"]).replace('"', '""') + '"'
        lines.append(f"0,sees.sh,,{field};gpus=0")
    s.append(*lines)
    client = SchedulerClient(str(s.folder / "gpu_scheduler_state.json"))
    environ = dict(os.environ)
    for n, text in enumerate(PAYLOADS):
        spec = JobSpec(
            source="submit", arguments=(str(s.folder / "sees.sh"), text), label=text, gpus="0", cwd=str(s.folder)
        )
        job = client.submit(spec, {**environ, "PAYLOAD": text.replace("\0", "")}, ModelTable())
        as_words[job.id] = [os.fsencode(text)]
        if n % 10 == 0:  # jobs with the text as environment, folder or script: nearly all wait forever
            for more in ({"conda_env": text}, {"cwd": f"/{text}"}, {"script": f"/nowhere/{text}", "arguments": ()}):
                client.submit(
                    JobSpec(**{**spec.as_dict(), "arguments": ("true",), "label": "", **more}), environ, ModelTable()
                )
    total = len(lines) + len(PAYLOADS)
    wait_for(lambda: len(saw(s)) >= total, f"{total} jobs, {len(saw(s))}\n{s.said()[-2000:]}")
    got = saw(s)
    assert {number: words for number, words in got.items() if number in as_words} == as_words
    assert sorted(words for number, words in got.items() if number not in as_words) == sorted(
        [os.fsencode(text), b"end"] for text in clean
    )
    no_mark(s)
    wait_for(
        lambda: s.rows("SELECT count(*) FROM jobs WHERE state='done'")[0][0] >= total, "all are written down as done"
    )
    assert s.rows("PRAGMA integrity_check") == [("ok",)] and s.rows("SELECT count(*) FROM meta WHERE key='a'") == [(0,)]
    shown = json.loads(s.cli("jobs", "--json").stdout)["jobs"]
    assert {job["label"] for job in shown} >= {text for text in PAYLOADS if "\0" not in text and text}
    for verb in (["status"], ["jobs"], ["screens"], ["cancel", "1-9999"]):
        s.cli(*verb, code=None)
    no_mark(s)


def test_s12_payloads_as_job_state_gpu_or_option_value_change_no_job(s: Scheduler) -> None:
    """S12, S6, S11: A verb that gets a payload as job, state, GPU or option value changes no job.

    The verb either gives an answer or refuses the payload.
    """
    s.start()
    s.cli("submit", "--cpu", "--wait", "--label", "one", "--", "true")
    before = s.rows("SELECT id, state, spec FROM jobs")
    some = [
        text
        for n, text in enumerate(PAYLOADS)
        if n % 28 == 0 and text and "@" not in text and text not in ("0", "1", "+1", "01")
    ]
    for text in some:
        for words in (
            ["show", "--", text], ["cancel", "--", text], ["logs", "--", text], ["jobs", f"--state={text}"], ["pause", "--", text],
            ["edit", "1", f"--allowed={text}"], ["submit", f"--after={text}", "--", "true"], ["submit", f"--gpus=x{text}", "--", "true"],
            ["submit", f"--conda={text}\0"[:-1], f"--priority=x{text}", "--", "true"],
        ):  # fmt: skip
            done = s.cli(*words, code=None)
            assert done.returncode in (1, 2, 3, 6) or words[0] in ("jobs", "show", "logs"), (words, done)
            assert done.stderr.count("\n") <= 3
    assert s.rows("SELECT id, state, spec FROM jobs") == before
    no_mark(s)


def test_s27_add_writes_one_line_or_none(s: Scheduler) -> None:
    """S27, S12: `add` appends exactly one line, or refuses its arguments and appends nothing.

    Therefore a line break in a field adds no second job. The job gets each payload unchanged.
    """
    evil = s.folder / "evil.py"
    evil.write_text(f"open({str(s.folder / MARK)!r}, 'w')\n")
    s.start()
    written = []
    breaks = (
        "\n0,evil.py",
        "x\n0,evil.py\n",
        "\r0,evil.py",
        "x\r\n0,evil.py,,,",
        "\x0b0,evil.py",
        "\u2028 0,evil.py",
        "\x85 0,evil.py",
        "\0",
    )
    for text in breaks:
        for words in (
            [f"sees.sh{text}"], ["sees.sh", f"--args=a {text}"], ["sees.sh", f"--conda={text}"], ["sees.sh", f"--gpus={text}"],
            ["sees.sh", f"--priority=0{text}"], ["sees.sh", "--set", f"label={text}"],
        ):  # fmt: skip
            if "\0" in text:
                continue  # a word of a command cannot contain a NUL byte
            before = s.jobs_file.read_bytes() if s.jobs_file.exists() else b""
            done = s.cli("add", *words, code=None)
            after = s.jobs_file.read_bytes() if s.jobs_file.exists() else b""
            new = after[len(before) :]
            assert after.startswith(before) and new.count(b"\n") == (1 if new else 0), (words, new)
            assert (done.returncode == 0) == bool(new), (words, done)
            if "\n" in text or "\r" in text:
                assert done.returncode in (1, 2, 3) and not new, (words, done)
            written += [new] if new else []
    for text in [t for n, t in enumerate(PAYLOADS) if n % 5 == 0 and not set("\n\r") & set(t)]:
        done = s.cli("add", "sees.sh", "--args", shlex.join([text, "added"]), "--set", "gpus=0", code=None)
        assert done.returncode == 0, (text, done.stderr)
        written.append(os.fsencode(text))
    marked = [t for n, t in enumerate(PAYLOADS) if n % 5 == 0 and not set("\n\r") & set(t)]
    wait_for(
        lambda: {w[0] for w in saw(s).values() if w[-1:] == [b"added"]} >= {os.fsencode(t) for t in marked},
        s.said()[-2000:],
    )
    no_mark(s)


def test_s12_payloads_in_state_file_config_or_model_table_do_no_harm(s: Scheduler) -> None:
    """S12: Payloads in state file, config or model table are refused or read as text, and the scheduler continues."""
    s.start()
    state = s.folder / "gpu_scheduler_state.json"
    wait_for(state.exists, "the state file")
    table = s.folder / "llm_config.json"
    config = s.folder / "config.yaml"
    for text in PAYLOADS[::12]:
        state.write_text(
            json.dumps({text: text, "paused_gpus": [], "paused": False, "gpus": [{"index": text, "uuid": text}]})
        )
        table.write_text(json.dumps({"default_requirement": 0.5, "models": {text: 0.5, "b": text}}))
        config.write_text(f"mem_threshold: {json.dumps(text)}\n{json.dumps(text)}: 1\n")
        assert s.cli("config", "check", code=None).returncode in (0, 2)
        s.cli("submit", "--cpu", "--wait", "--", "true")
    state.write_text('{"paused_gpus": ["; touch canary"]}')
    config.unlink()
    table.unlink()
    s.cli("submit", "--cpu", "--wait", "--", "true")
    assert s.process is not None and s.process.poll() is None
    no_mark(s)
    with contextlib.closing(sqlite3.connect(f"file:{s.folder}/.gpujob/store.db?mode=ro", uri=True)) as store:
        assert store.execute("PRAGMA quick_check").fetchone() == ("ok",)
