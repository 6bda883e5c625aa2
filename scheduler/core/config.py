"""Every setting with its default, limits and meaning, in one place."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from scheduler.core.errors import SchedulerError, UsageError
from scheduler.core.gpu import HIGHEST_GPU_ID, parse_gpu_ids
from scheduler.core.keeping import Keep, keep_finished, keep_logs
from scheduler.core.launch import CONDA_MODES, CUDA_MODES
from scheduler.core.units import seconds_of


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise UsageError(f"must be a text, not {value!r}")


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise UsageError(f"must be a duration, not {value!r}", do="write 30, 30s or 5m")
    number = seconds_of(value) if isinstance(value, str) else float(value)
    if not 0 <= number < 1e9:
        raise UsageError(f"must be a duration of 0 or more, not {value!r}", do="write 30, 30s or 5m")
    return number


def _whole(low: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        try:
            if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
                raise ValueError
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"must be a whole number, not {value!r}") from None
        if number < low:
            raise UsageError(f"must be {low} or more, not {number}")
        return number

    return read


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"must be a number, not {value!r}") from None
    if not 0 <= number < 1e9:
        raise UsageError(f"must be 0 or more, not {value!r}")
    return number


def _share(value: Any) -> float:
    if isinstance(value, str) and value.strip().endswith("%"):
        return _share(_number(value.strip()[:-1]) / 100)
    number = _number(value)
    if number > 1:
        raise UsageError(f"must be a share between 0 and 1, not {value!r}", do="write 0.8 for 80 %")
    return number


def _interval(value: Any) -> float:
    number = _seconds(value)
    if 0 < number < 0.05:
        raise UsageError(f"must be 0.05 s or more, not {value!r}", do="0 turns readings off")
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if str(value).lower() in words:
        return words[str(value).lower()]
    raise UsageError(f"must be true or false, not {value!r}")


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value in choices:
            return str(value)
        near = difflib.get_close_matches(str(value), choices, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"must be one of {', '.join(choices)}, not {value!r}", do=hint.strip())

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
        return parse_gpu_ids(",".join(str(_whole(0)(item)) for item in value))
    return parse_gpu_ids(str(value))


def _keeping(read: Callable[[str], Keep]) -> Callable[[Any], str]:
    def words(value: Any) -> str:
        text = " ".join(_text(value).replace(",", " ").split())
        read(text)
        return text

    return words


def _option(default: Any, read: Callable[[Any], Any], meaning: str, *, reload: bool = False, path: bool = False) -> Any:
    return field(default=default, metadata={"read": read, "help": meaning, "reload": reload, "path": path})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a scheduler. Durations in seconds. Paths are absolute once `intake.settings` made them so."""

    state_file: str = _option(
        "gpu_scheduler_state.json", _text, "the state file; one scheduler = one state file", path=True
    )
    jobs_file: str = _option("jobs.txt", _text, "the watched jobs file; empty: watch none", path=True)
    commands_file: str = _option("", _text, "a file of shell commands, one a line, watched as well", path=True)
    llm_config: str = _option("llm_config.json", _text, "model table: model name -> GPU need", path=True)
    log_dir: str = _option("gpu_scheduler_logs", _text, "folder of the job logs", path=True)
    log_file: str = _option(
        "gpu_scheduler.log", _text, "the main log (rotated at 10 MB, 5 kept); empty: none", path=True
    )
    gpus: int | None = _option(None, _gpu_count, "manage GPUs 0..N-1; empty: all that are seen")
    gpu_ids: tuple[int, ...] | None = _option(None, _gpu_ids, "manage just these GPUs, say [0, 2]; empty: as gpus says")
    cpu_slots: int | None = _option(None, _gpu_count, "how many jobs with need 0 run at once; empty: one per CPU core")
    screen: bool = _option(False, _flag, "run each job in a GNU screen session of its own")
    monitor_interval: float = _option(
        30.0, _seconds, "safety net: look at the jobs file at least this often", reload=True
    )
    mem_threshold: float = _option(
        0.8, _share, "a GPU gets no new job while others use this share of its memory", reload=True
    )
    load_threshold: float = _option(
        0.8, _share, "a GPU gets no new job while processes of others keep it this busy", reload=True
    )
    whole_gpu_tolerance: float = _option(
        0.02, _share, "share of memory that others may use on a GPU given out as a whole", reload=True
    )
    gpu_interval: float = _option(
        5.0,
        _interval,
        "between two readings of the GPUs; 0: never read, --gpus N are given out by booking alone",
        reload=True,
    )
    settle: float = _option(
        120.0, _seconds, "after a start, new processes of ours on its GPU count as the job's for this long", reload=True
    )
    release: float = _option(
        30.0,
        _seconds,
        "after an end, memory may take this long to come back before it counts as somebody else's",
        reload=True,
    )
    hold_on_errors: bool = _option(
        False, _flag, "give a GPU no new job once it reports an uncorrected memory error or a fatal XID", reload=True
    )
    state_interval: float = _option(
        20.0, _seconds, "safety net: look at the state file at least this often", reload=True
    )
    max_assign_attempts: int = _option(
        5, _whole(1), "tries to start a placed job before it counts as failed", reload=True
    )
    assign_retry_wait: float = _option(5.0, _seconds, "wait after the first failed try; doubles each time", reload=True)
    oom_retries: int = _option(
        2, _whole(0), "times a job that ran out of GPU memory is tried with a larger share; 0: never", reload=True
    )
    kill_grace: float = _option(15.0, _seconds, "between SIGTERM and SIGKILL", reload=True)
    cuda_ids: str = _option(
        "physical",
        _one_of(*CUDA_MODES),
        "what --cuda and CUDA_VISIBLE_DEVICES hold: physical, local, unset, auto, none",
        reload=True,
    )
    python: str = _option(
        "", _text, "interpreter for .py scripts without an environment; empty: python, then python3, of PATH"
    )
    conda_mode: str = _option(
        "auto",
        _one_of(*CONDA_MODES),
        "how a job gets into its conda environment: direct, activate, run; auto: activate if it has activation scripts",
        reload=True,
    )
    activation_limit: float = _option(
        60.0, _seconds, "time that activating a conda environment may take; then the job fails", reload=True
    )
    order: str = _option("fifo", _one_of("fifo", "short"), "equal priorities: fifo, or short jobs before long ones")
    aging: float = _option(0.0, _number, "hours of waiting that outweigh one priority level; 0: never")
    trust_group: bool = _option(False, _flag, "accept a jobs file or config that others of its group may write")
    keep_logs: str = _option(
        "",
        _keeping(keep_logs),
        "logs of ended jobs that are kept: an age (30d), a size in all (20G) or both",
        reload=True,
    )
    keep_finished: str = _option(
        "",
        _keeping(keep_finished),
        "ended jobs that are remembered: a number (10000), an age (90d) or both",
        reload=True,
    )
    watch: str = _option(
        "auto", _one_of("auto", "inotify", "poll"), "how changed files are noticed; poll is for network folders"
    )

    def policy_values(self) -> dict[str, Any]:
        """Name → value of all settings, for `config show` and tests."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


OPTIONS: dict[str, Any] = {f.name: f for f in fields(Config)}
RELOADABLE = frozenset(name for name, f in OPTIONS.items() if f.metadata["reload"])
PATHS = frozenset(name for name, f in OPTIONS.items() if f.metadata["path"])


def defaults() -> dict[str, Any]:
    """Each setting's default."""
    return {name: (None if f.default is MISSING else f.default) for name, f in OPTIONS.items()}


def read_option(name: str, value: Any, where: str) -> Any:
    """The typed value of one setting. Raises UsageError naming ``where``, the key, and what would be right."""
    option = OPTIONS.get(name)
    if option is None:
        near = difflib.get_close_matches(name, OPTIONS, 1)
        do = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(OPTIONS))}"
        raise UsageError(f"unknown key {name!r}", where=where, do=do)
    try:
        return option.metadata["read"](value)
    except SchedulerError as error:
        raise UsageError(f"{name}: {error.what}", where=where, do=error.do) from None


def config_from(values: Mapping[str, Any]) -> Config:
    """A Config from typed values (those missing take their defaults)."""
    return Config(**dict(values))
