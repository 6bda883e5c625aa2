"""The settings: name, default, limits, meaning. `gpujob run` has other defaults (`intake/settings.py: DISPATCHER`)."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from scheduler.core.errors import LONGEST_SHOWN, SchedulerError, UsageError, nearest, said
from scheduler.core.fair_shares import HALF_LIFE_S
from scheduler.core.gpu import HIGHEST_GPU_ID, parse_gpu_ids
from scheduler.core.launch import CONDA_MODES, CUDA_MODES
from scheduler.core.own_classes import OwnClass, read_own_classes, written_own_classes
from scheduler.core.retention import Keep, keep_finished, keep_logs
from scheduler.core.runner_kinds import ENGINES
from scheduler.core.units import seconds_of

LARGEST = 10**9  # largest number of a setting: about 30 years in seconds, far below the largest integer of SQLite
HIGHEST_PORT = 65535
LONGEST_LIST = 4000  # characters in a list of GPUs
_HOURS = re.compile(r"([01]?\d|2[0-4])-([01]?\d|2[0-4])", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Strings that need no quotes in YAML, except those in _NOT_BARE.
_BARE = re.compile(r"[A-Za-z/][\w/.+@=-]*", re.ASCII)
_NOT_BARE = frozenset("true false yes no on off y n null".split())


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise UsageError(f"must be a text, not {said(value)}")
    try:
        text = str(value)
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{said(value)} is not UTF-8", do="use another folder or name") from None
    except ValueError:  # Python does not convert an int of thousands of digits
        raise UsageError(f"must be a text, not {said(value)}") from None
    if "\0" in text:
        raise UsageError("contains a NUL character", do="remove it")
    return text


def _path(value: Any) -> str:
    text = _text(value)
    if not text:
        raise UsageError("must name a file or folder")
    return text


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise UsageError(f"must be a duration, not {said(value)}", do="write 30, 30s or 5m")
    try:
        number = _spelled_seconds(value) if isinstance(value, str) else float(value)
    except OverflowError:
        number = float("inf")
    if not 0 <= number < LARGEST:
        raise UsageError(
            f"must be a duration of 0 or more (at most 30 years), not {said(value)}", do="write 30, 30s or 5m"
        )
    return number


def _spelled_seconds(text: str) -> float:
    plain = text.strip()  # `float` rejects some blanks that `strip` removes, such as \x1f
    return float(plain) if _NUMBER.fullmatch(plain) else seconds_of(text)


def _whole(low: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        try:
            if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
                raise ValueError
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"must be a whole number, not {said(value)}") from None
        if number < low:
            raise UsageError(f"must be {low} or more, not {said(number)}")
        if number > LARGEST:
            raise UsageError(f"must be {LARGEST} or less, not {said(number)}")
        return number

    return read


def _port(value: Any) -> int:
    number = _whole(0)(value)
    if number > HIGHEST_PORT:
        raise UsageError(f"must be {HIGHEST_PORT} or less, not {said(number)}", do="write 4004, or 0 for any free port")
    return number


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except OverflowError:
        number = float("inf")
    except (TypeError, ValueError):
        raise UsageError(f"must be a number, not {said(value)}") from None
    if not 0 <= number < LARGEST:
        raise UsageError(f"must be 0 or more (at most {LARGEST}), not {said(value)}")
    return number


def _share(value: Any) -> float:
    percent = isinstance(value, str) and value.strip().endswith("%")
    try:
        number = _number(value.strip()[:-1]) / 100 if percent else _number(value)
    except UsageError:
        number = 2.0
    if number > 1:
        raise UsageError(f"must be a share between 0 and 1, not {said(value)}", do="write 0.8 for 80 %")
    return number


def _interval(value: Any) -> float:
    number = _seconds(value)
    if 0 < number < 0.05:
        raise UsageError(f"must be 0.05 s or more, not {said(value)}", do="0 turns readings off")
    return number


def _often(value: Any) -> float:
    number = _seconds(value)
    if number < 0.05:
        raise UsageError(f"must be 0.05 s or more, not {said(value)}", do="write 30, 30s or 5m")
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    word = value.lower() if isinstance(value, str) else repr(value) if isinstance(value, float) else said(value)
    if word in words:
        return words[word]
    raise UsageError(f"must be true or false, not {said(value)}")


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value in choices:
            return str(value)
        near = nearest(value, choices) if isinstance(value, str) else ""
        do = f"did you mean {near}?" if near else ""
        raise UsageError(f"must be one of {', '.join(choices)}, not {said(value)}", do=do)

    return read


def _gpu_count(value: Any) -> int | None:
    if value in (None, "", "auto"):
        return None
    number = _whole(0)(value)
    if number > HIGHEST_GPU_ID:
        raise UsageError(f"must be {HIGHEST_GPU_ID} or less, not {number}")
    return number


def _gpu_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        # YAML reads an item such as 0-3 as a string.
        return parse_gpu_ids(",".join(item if isinstance(item, str) else str(_whole(0)(item)) for item in value))
    if isinstance(value, int) and not isinstance(value, bool):
        return parse_gpu_ids(str(_whole(0)(value)))
    if not isinstance(value, str) or len(value) > LONGEST_LIST:
        raise UsageError(f"{said(value)} is not a GPU list", do="write 2 or 0,2 or 0-3 or [0, 2]")
    return parse_gpu_ids(value)


def _arguments(value: Any) -> str:
    text = _text(value)
    try:
        shlex.split(text)
    except ValueError:
        raise UsageError(f"has an open quote: {said(value)}", do="write --partition=gpu --qos=low") from None
    return text


def _names(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        value = ",".join(map(_text, value))
    return ",".join(name.strip() for name in _text(value).split(",") if name.strip())


def _hours(value: Any) -> str:
    text = "".join(_text(value).split())
    first, _, last = text.partition("-")
    if text and (not _HOURS.fullmatch(text) or int(first) in (int(last), 24)):
        raise UsageError(f"must be two hours of the day, not {said(value)}", do="write 8-20, or 22-6 for the night")
    return text


def _keeping(read: Callable[[str], Keep]) -> Callable[[Any], str]:
    def words(value: Any) -> str:
        text = " ".join(_text(value).replace(",", " ").split())
        read(text)
        return text

    return words


def _option(
    default: Any,
    read: Callable[[Any], Any],
    meaning: str,
    metavar: str,
    *,
    reload: bool = False,
    path: bool = False,
    section: str = "",
) -> Any:
    """Return the dataclass field of a setting.

    ``read``: returns the typed value, or raises UsageError; ``metavar``: name of the value in help texts, empty for a
    setting with two flags such as ``--web`` and ``--no-web``; ``reload``: a change needs no restart; ``path``: the
    value is a path; ``section``: the heading above this setting in the example file.
    """
    row = {"read": read, "help": meaning, "metavar": metavar, "reload": reload, "path": path, "section": section}
    return field(default=default, metadata=row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a scheduler. Durations are in seconds; `intake/settings.py` makes the paths absolute."""

    # fmt: off
    state_file: str = _option(
        "gpu_scheduler_state.json", _path,
        "the state file; each scheduler has its own, with the state folder .gpujob/ beside it", "PATH",
        path=True, section="files",
    )
    jobs_file: str = _option("jobs.txt", _text, "the watched jobs file; empty: watch none", "PATH", path=True)
    commands_file: str = _option("", _text, "a watched file of shell commands, one per line; empty: none", "PATH", path=True)
    llm_config: str = _option(
        "llm_config.json", _text, "model table: for each model name, the GPUs that its jobs need; read again when it changes", "PATH", path=True
    )
    log_dir: str = _option("gpu_scheduler_logs", _path, "folder of the job logs; made private (0700)", "PATH", path=True)
    log_file: str = _option(
        "gpu_scheduler.log", _text, "the main log (rotated at 10 MB; the last 5 old files are kept); empty: none", "PATH", path=True
    )
    journal: str = _option(
        "", _text, "a copy of all jobs with the history of their status, one line of JSON per job (JSONL); empty: none", "PATH", path=True
    )

    gpus: int | None = _option(
        None, _gpu_count, "manage GPUs 0..N-1; without a driver: declare N GPUs; empty: all GPUs that the driver shows", "N", reload=True, section="which GPUs"
    )
    gpu_ids: tuple[int, ...] | None = _option(
        None, _gpu_ids, "manage only these GPUs, for example [0, 2] or 0-3; empty: the setting gpus decides", "LIST", reload=True
    )
    without_gpus: bool = _option(
        False, _flag, "start even if the driver shows no GPU, or if a GPU of gpus or gpu_ids is missing; jobs that need no GPU run", "BOOL"
    )
    cpu_slots: int | None = _option(
        None, _gpu_count,
        "number of slots for jobs without GPUs (such a job takes one slot, or N slots with slots=N); "
        "empty: one slot per CPU core", "N", reload=True
    )

    mem_threshold: float = _option(
        0.8, _share, "a GPU gets no new job while foreign processes use at least this share of its memory", "SHARE",
        reload=True, section="when a GPU gets no new job",
    )
    load_threshold: float = _option(
        0.8, _share,
        "a GPU gets no new job while foreign processes keep it at least this busy; "
        "two such readings in a row block it, three lower readings in a row unblock it",
        "SHARE", reload=True,
    )
    whole_gpu_tolerance: float = _option(
        0.02, _share, "a whole GPU is allocated only while foreign processes use at most this share of its memory", "SHARE", reload=True
    )
    gpu_interval: float = _option(
        5.0, _interval,
        "time between two readings of the GPUs; a GPU that was not read for three intervals gets no new job; "
        "0: GPUs are never read, and the GPUs of --gpus N are allocated without readings",
        "S", reload=True,
    )
    poll_interval: float = _option(
        0.0, _interval,
        "check the files and the GPUs at least this often, whatever the other intervals are; "
        "0: only the other intervals apply (default of gpujob run: 60)", "S",
        reload=True,
    )
    min_free_mem_mb: int = _option(
        0, _whole(0),
        "a job that asks for no share books this many MiB of GPU memory, on the GPU with the most free memory; "
        "0: such a job books a share of a GPU (default of gpujob run: 6000)", "MIB",
    )
    settle: float = _option(
        120.0, _seconds,
        "for this long after the start of a job, new processes of the same user on its GPU count as the job's; with min_free_mem_mb, a default booking ends when the memory of the job has not grown for this long", "S", reload=True,
    )
    release: float = _option(
        30.0, _seconds, "for this long after the end of a job, memory that is not released yet does not count as foreign", "S", reload=True
    )
    hold_on_errors: bool = _option(
        True, _flag,
        "a GPU gets no new job after it reported an uncorrected memory error, or an XID that is not an application's, until gpujob resume",
        "BOOL", reload=True,
    )
    on_trespass: str = _option(
        "flag", _one_of("flag", "kill"),
        "what happens to a job that uses a GPU which it was not given: flag (it is reported) or kill (it is also ended, and has failed)",
        "ACTION", reload=True,
    )

    screen: bool = _option(
        False, _flag, "run each job in a GNU screen session of its own (gpujob screens lists them)", "", section="how jobs run"
    )
    cuda_ids: str = _option(
        "physical", _one_of(*CUDA_MODES),
        "which GPU ids jobs get in --cuda and CUDA_VISIBLE_DEVICES: physical, local, unset, auto, or none "
        "(no --cuda is added)", "MODE",
        reload=True,
    )
    python: str = _option(
        "", _text, "interpreter for .py scripts without an environment; empty: python, then python3, from PATH", "PATH"
    )
    conda_mode: str = _option(
        "auto", _one_of(*CONDA_MODES),
        "how a job enters its conda environment: direct (the python of the environment, with the variables set), "
        "activate (the activation scripts of the environment are sourced first), run (conda run); "
        "auto: activate if the environment has activation scripts, else direct", "MODE", reload=True,
    )
    activation_limit: float = _option(
        60.0, _seconds, "a job fails if the activation of its conda environment takes longer than this", "S",
        reload=True
    )

    engine: str = _option(
        "local", _one_of("local", *ENGINES),
        "where jobs run: local (this machine), slurm, or ray; nodes must share the folder of the state file (docs/clusters.md)", "ENGINE", section="cluster",
    )
    engine_interval: float = _option(2.0, _often, "the engine is asked for the states of all jobs this often", "S", reload=True)
    release_ahead: int = _option(
        16, _whole(1),
        "with Slurm: number of jobs that may wait in Slurm's queue although they do not fit now; all other jobs wait in gpujob's queue",
        "N", reload=True,
    )
    nice_step: int = _option(
        100, _whole(0), "with Slurm: --nice of a job is its priority times this number; 0: no --nice", "N", reload=True
    )
    sbatch_args: str = _option(
        "", _arguments, "with Slurm: further arguments of sbatch, such as --partition=gpu --account=lab, quoted as in a shell", "ARGS", reload=True
    )
    engine_ignore_gpu_ids: bool = _option(
        False, _flag, "with an engine: jobs that name GPU ids may run on any GPU (default: such jobs are refused)", "BOOL"
    )
    engine_url: str = _option("http://127.0.0.1:8265", _text, "with Ray: address of the dashboard of its head node", "URL")
    engine_token_file: str = _option(
        "", _text, "with Ray: private file with the token; empty: the variable RAY_AUTH_TOKEN or the file RAY_AUTH_TOKEN_PATH, or no token", "PATH", path=True
    )
    insecure_engine: bool = _option(
        False, _flag, "with Ray: accept an address on another machine without a token or without https", "BOOL"
    )

    order: str = _option(
        "fifo", _one_of("fifo", "short"), "order of jobs with equal priority: fifo, or short (short jobs before long ones)", "RULE", section="order"
    )
    max_overtakes: int = _option(
        10, _whole(0), "after later jobs have overtaken a waiting job this often, GPUs are reserved for it; with backfill: only where its start cannot be expected; 0: nothing is ever reserved", "N", reload=True
    )
    backfill: bool = _option(
        True, _flag,
        "reserve GPUs until the expected start of a job that waits long, and let shorter jobs use them; "
        "false: only max_overtakes counts", "BOOL", reload=True
    )
    aging: float = _option(
        0.0, _number, "hours of waiting that count as one priority level; 0: waiting does not count", "HOURS"
    )

    share_bookings: bool = _option(
        True, _flag,
        "tell other schedulers of this machine which GPUs are booked, and use none that they have booked", "BOOL",
        reload=True, section="sharing with other users",
    )
    ignore_users: str = _option(
        "", _names, "users, separated by commas, whose bookings and locks do not count", "USERS", reload=True
    )
    fair_half_life: float = _option(
        HALF_LIFE_S, _often, "GPU time that a user has used counts half after this time", "S", reload=True
    )
    keep_free: int = _option(
        0, _whole(0), "jobs leave this number of GPUs to people without a scheduler", "N", reload=True
    )
    keep_free_hours: str = _option(
        "", _hours, "hours of the day at which keep_free applies, such as 8-20; empty: always", "HOURS", reload=True
    )

    max_assign_attempts: int = _option(
        5, _whole(1), "a job fails after this number of failed tries to start it", "N",
        reload=True, section="tries and endings"
    )
    assign_retry_wait: float = _option(
        5.0, _seconds, "wait after the first failed start; doubles each time, at most 10 min", "S", reload=True
    )
    oom_retries: int = _option(
        2, _whole(0), "how often a job that ran out of GPU memory is run again, with a larger share or alone; 0: never", "N", reload=True
    )
    learn: bool = _option(
        False, _flag,
        "models that are not in the model table get the need that their earlier runs suggest, or one guessed from the size in "
        "their name, instead of default_requirement (docs/needs.md)", "BOOL", reload=True
    )
    kill_grace: float = _option(15.0, _seconds, "time between SIGTERM and SIGKILL", "S", reload=True)
    failure_classes: tuple[OwnClass, ...] | None = _option(
        None, read_own_classes,
        "your own classes of failures: name → text (a part of a line of the log, or several, with * for any characters), "
        "hint, after (exit codes); docs/failures.md; as an option: JSON", "JSON", reload=True
    )

    keep_logs: str = _option(
        "", _keeping(keep_logs), "how long logs of ended jobs are kept: up to an age (30d), a total size (20G) or both; empty: for ever", "LIMITS",
        reload=True, section="what is kept",
    )
    keep_finished: str = _option(
        "", _keeping(keep_finished), "how long ended jobs are kept in the store: up to a number (10000), an age (90d) or both; empty: for ever", "LIMITS", reload=True
    )
    history: bool = _option(
        True, _flag,
        "store readings of GPUs and jobs for the curves of the web page: means over 10 s for a day, means over 5 min for 90 days; "
        "at most about 150 MB", "BOOL"
    )
    save_list: str = _option(
        "", _text, "when SIGTERM ends the scheduler, it writes this shell script, which submits the remaining jobs again (with ts); empty: none", "PATH", path=True
    )

    monitor_interval: float = _option(
        30.0, _often, "safety net: check the jobs file at least this often", "S",
        reload=True, section="noticing changes (normally by events; these intervals are safety nets)",
    )
    state_interval: float = _option(20.0, _often, "safety net: check the state file at least this often", "S", reload=True)
    watch: str = _option(
        "auto", _one_of("auto", "inotify", "poll"), "how changed files are noticed; poll is for network folders", "HOW"
    )
    trust_group: bool = _option(
        False, _flag,
        "accept files that other members of the file's group may write "
        "(for the config file itself: only with start --trust-group true)", "BOOL"
    )

    web: bool = _option(False, _flag, "also serve the web page, as `gpujob web` does", "", section="web page")
    web_port: int = _option(4004, _port, "port of the web page on 127.0.0.1; 0: any free port", "N")
    # fmt: on

    def policy_values(self) -> dict[str, Any]:
        """Return name → value of all settings."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


OPTIONS: dict[str, Any] = {f.name: f for f in fields(Config)}
RELOADABLE = frozenset(name for name, f in OPTIONS.items() if f.metadata["reload"])
PATHS = frozenset(name for name, f in OPTIONS.items() if f.metadata["path"])
TEXTS = frozenset(name for name, f in OPTIONS.items() if f.metadata["read"] in (_text, _path))


def defaults() -> dict[str, Any]:
    """Return name → default of all settings."""
    return {name: (None if f.default is MISSING else f.default) for name, f in OPTIONS.items()}


def read_option(name: str, value: Any, where: str, *, named: bool = False) -> Any:
    """Return the typed value of one setting. Raises UsageError if the key is unknown or the value is wrong.

    The error names ``where`` and the key, and says what to write. ``where``: the place of the setting, such as a file
    and line. ``named``: ``where`` already names the setting, so the message does not repeat the key.
    """
    option = OPTIONS.get(name)
    if option is None:
        near = nearest(name, OPTIONS)
        do = f"did you mean {near}?" if near else f"known: {', '.join(sorted(OPTIONS))}"
        raise UsageError(f"unknown key {name[:LONGEST_SHOWN]!r}", where=where, do=do)
    try:
        return option.metadata["read"](value)
    except SchedulerError as error:
        what = error.what if named else f"{name}: {error.what}"
        raise UsageError(what, where=where, do=error.do) from None


def config_from(values: Mapping[str, Any]) -> Config:
    """Return a Config from typed values; a missing setting gets its default."""
    return Config(**dict(values))


def written(value: Any) -> str:
    """Return a setting's value as one line of YAML. A config file with this line gives the same value again."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value == int(value) else repr(value)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
        return written_own_classes(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(str, value))}]"
    if not isinstance(value, str):
        return str(value)
    if _BARE.fullmatch(value) and value.lower() not in _NOT_BARE:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() or c == " " else f"\\U{ord(c):08x}" for c in quoted)
