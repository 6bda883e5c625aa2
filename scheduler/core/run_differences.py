"""Tells in short sentences what differs between a failed run and the last good run of the same script."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from scheduler.core.failure_signs import UNKNOWN, usual_hint
from scheduler.core.job import Failure, Job
from scheduler.core.run_facts import Code, GoodRun, Run, RunFacts
from scheduler.core.run_target import target_of
from scheduler.core.secrets import without_secrets, words_without_secrets
from scheduler.core.units import span_text

NO_GOOD_RUN = "no earlier run of this script is known to have ended well"
MOST_NAMED = 6  # arguments, variables or packages that a sentence names
LONGEST_WORD = 60
_NUMBER = re.compile(r"-\.?\d[\d.,]*(e[-+]?\d+)?", re.IGNORECASE)
_ASSIGNED = re.compile(r"[\w.+@/-]+=")
_VERSION = re.compile(r"(.*) \(([\w.+-]+)\)")
# Variables that differ between any two shells or starts, or that the scheduler sets itself.
_NOT_COMPARED = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|GPUJOB_.*|PWD|OLDPWD|SHLVL|_|STY|SSH_.*|TERM.*|TMUX.*|WINDOW.*|COLUMNS|LINES"
    r"|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID|MANAGERPID|MAINPID|NOTIFY_SOCKET|LISTEN_.*|MEMORY_PRESSURE_.*|XDG_SESSION_.*"
    r"|XDG_VTNR|XDG_SEAT|DBUS_.*|SESSION_MANAGER|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|DESKTOP_STARTUP_ID|GPG_TTY|GPG_AGENT_INFO|PS\d"
    r"|PROMPT.*|HIST.*|LS_COLORS|VTE_.*|COLORTERM|KONSOLE_.*|KITTY_.*|ITERM_.*|VSCODE_.*|GIT_ASKPASS|SUDO_.*|MAIL|DIRENV_.*"
    r"|STARSHIP_.*|BASH_EXECUTION_STRING|PYTEST_CURRENT_TEST"
)


def is_compared(variable: str) -> bool:
    """Return whether a variable of the environment may tell why a run failed."""
    return _NOT_COMPARED.fullmatch(variable) is None


def run_of(job: Job, gpus: tuple[str, ...], driver: str) -> Run:
    """Return the current or last attempt of a job as it is compared. ``gpus``: the name of each of its GPUs."""
    spec = job.spec
    return Run(
        target_of(spec).words, spec.conda_env, job.interpreter, spec.cwd, job.need.in_words(), tuple(sorted(gpus)), driver,
        job.facts or RunFacts(),
    )  # fmt: skip


def compared(
    found: Failure | None, run: Run, good: GoodRun | None, sets: Mapping[str, Mapping[str, str]]
) -> Failure | None:
    """Return the cause of a failure with what differs from the last good run (None: no good run is known).

    ``found``: the cause; None: neither log nor exit code shows it. Then the result has the class `UNKNOWN` if there is
    a good run, else it is None. ``sets``: the sets that the facts of both runs name.
    """
    if good is None:
        return None if found is None else replace(found, differs=(NO_GOOD_RUN,))
    found = found or Failure(UNKNOWN, "", usual_hint(UNKNOWN))
    return replace(found, good_run=good.job, good_at=good.at, differs=differences(run, good.run, sets))


def differences(run: Run, good: Run, sets: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """Return what differs in a run from a good run, as sentences without secrets. What is not known is left out."""
    told = [
        _listed("arguments", _arguments(run.words, good.words)),
        _instead("need", run.need, good.need),
        _instead("conda environment", run.conda_env or "none", good.conda_env or "none"),
        _interpreter(run.interpreter, good.interpreter),
        _instead("folder", run.folder, good.folder),
        _listed("environment", _variables(run.facts, good.facts, sets)),
        _code(run.facts.code, good.facts.code),
        _instead("GPU", _gpus(run.gpus), _gpus(good.gpus)),
        _instead("driver", run.driver, good.driver),
        _listed("versions", _packages(run.facts.packages, good.facts.packages, sets)),
    ]
    return tuple(without_secrets(text) for text in told if text)


def since_good_run(job: Job) -> str:
    """Return the last good run as text, such as ``job 17, the last good run (2 d 3 h before)``; empty: none is known."""
    found = job.failure
    if found is None or found.good_run is None:
        return ""
    which = "an earlier attempt" if found.good_run == job.id else f"job {found.good_run}"
    age = None if found.good_at is None or job.finished_at is None else job.finished_at - found.good_at
    return f"{which}, the last good run" + ("" if age is None else f" ({span_text(age)} before)")


def differences_of(job: Job) -> tuple[str, ...]:
    """Return what differs from the last good run, as sentences; also says that nothing does, or that none is known."""
    found = job.failure
    if found is None or found.good_run is None or found.differs:
        return () if found is None else found.differs
    return ("nothing differs in what is compared",)


def difference_lines(job: Job) -> tuple[str, ...]:
    """Return lines for people: the last good run, then what differs from it; empty if nothing was compared."""
    good, told = since_good_run(job), differences_of(job)
    return (f"compared with {good}:", *(f"  {text}" for text in told)) if good else told


def _listed(what: str, pieces: Iterable[str]) -> str:
    told = list(pieces)
    more = f", and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else ""
    return f"{what}: {', '.join(told[:MOST_NAMED])}{more}" if told else ""


def _instead(what: str, now: str, before: str) -> str:
    return f"{what}: {now} instead of {before}" if now and before and now != before else ""


# -- arguments ------------------------------------------------------------------------------------------------


def _arguments(words: tuple[str, ...], before: tuple[str, ...]) -> list[str]:
    if words == before:
        return []
    now, old = _options(words), _options(before)
    told = []
    for name in dict.fromkeys((*now, *old)):
        values, earlier = now.get(name, []), old.get(name, [])
        if [raw for raw, _ in values] == [raw for raw, _ in earlier]:
            continue
        shown, shown_earlier = (_short(" ".join(text for _, text in some)) for some in (values, earlier))
        if not earlier:
            told.append(f"added {shown}")  # after an option such as --token, a word would be hidden as its value
        elif not values:
            told.append(f"removed {shown_earlier}")
        elif shown == shown_earlier:  # only what is hidden or cut off differs
            told.append(f"another value of {name or shown}")
        else:
            told.append(f"{shown} instead of {shown_earlier}")
    return told or ["in another order"]


def _options(words: tuple[str, ...]) -> dict[str, list[tuple[str, str]]]:
    """Return option → its values as (raw, shown without secrets). The name of other words is empty."""
    masked = words_without_secrets(words)
    found: dict[str, list[tuple[str, str]]] = {}
    at = 0
    while at < len(words):
        word, shown, name, raw = words[at], masked[at], "", words[at]
        assigned = _ASSIGNED.match(word)
        if assigned:
            name = assigned.group()[:-1]
        elif word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word):
            name = word
            following = words[at + 1] if at + 1 < len(words) else "-"
            # A hidden value may begin with "-".
            hidden = not following.startswith("--") and at + 1 < len(words) and masked[at + 1] != following
            if hidden or not following.startswith("-") or _NUMBER.fullmatch(following):
                at += 1
                raw, shown = f"{word}={words[at]}", f"{word} {masked[at]}"
        found.setdefault(name, []).append((raw, shown))
        at += 1
    return found


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_WORD else f"{text[: LONGEST_WORD - 1]}…"


# -- environment, code, versions ------------------------------------------------------------------------------


def _variables(now: RunFacts, before: RunFacts, sets: Mapping[str, Mapping[str, str]]) -> list[str]:
    if (now.environment, now.variables) == (before.environment, before.variables):
        return []
    mine, old = sets.get(now.environment), sets.get(before.environment)
    if mine is None or old is None:
        return []
    mine, old = {**mine, **dict(now.variables)}, {**old, **dict(before.variables)}
    return (
        [f"{name} changed" for name in sorted({*mine} & {*old}) if mine[name] != old[name]]
        + [f"{name} added" for name in sorted({*mine} - {*old})]
        + [f"{name} removed" for name in sorted({*old} - {*mine})]
    )


def _interpreter(now: str, before: str) -> str:
    if not now or not before or now == before:
        return ""
    version, earlier = (_VERSION.fullmatch(text) for text in (now, before))
    if version and earlier and version[2] != earlier[2]:
        return f"Python {earlier[2]} → {version[2]}"
    return _instead("interpreter", version[1] if version else now, earlier[1] if earlier else before)


def _code(now: Code | None, before: Code | None) -> str:
    if now is None or before is None:
        return ""
    known = bool(now.digest and before.digest)
    changed = known and (now.digest, now.size) != (before.digest, before.size)
    moved = f"commit {before.commit[:7]} → {now.commit[:7]}" if now.commit and before.commit != now.commit else ""
    if not before.commit:
        moved = ""
    name = now.path.rpartition("/")[2]
    if changed:
        return f"code: {name} has changed since" + (f" ({moved})" if moved else "")
    return f"code: {moved}" + (f" ({name} itself has not changed)" if known else "") if moved else ""


def _gpus(names: tuple[str, ...]) -> str:
    counted = Counter(names)
    return ", ".join(name if number == 1 else f"{number} × {name}" for name, number in sorted(counted.items()))


def _packages(now: str, before: str, sets: Mapping[str, Mapping[str, str]]) -> list[str]:
    mine, old = sets.get(now), sets.get(before)
    if now == before or mine is None or old is None:
        return []
    return (
        [f"{name} {old[name]} → {mine[name]}" for name in sorted({*mine} & {*old}) if mine[name] != old[name]]
        + [f"{name} added" for name in sorted({*mine} - {*old})]
        + [f"{name} removed" for name in sorted({*old} - {*mine})]
    )
