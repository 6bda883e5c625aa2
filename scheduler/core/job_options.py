"""The options of a job. The row of an option has its name, the function that reads its text, and its places of use.

A row defines the option of `gpujob submit` and `gpujob edit`, the key of a line in the jobs file, the key of the HTTP
API, the field of the form on the web page, the shell completion, and rows of tables in the documents
(`docs/make_tables.py`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.core.allowed import Allowed, allowed_text, parse_allowed
from scheduler.core.errors import Refused, SchedulerError, UsageError, flag, nearest
from scheduler.core.gpu import ResourceRequest, gpu_ids_text, parse_gpu_ids
from scheduler.core.job import JobSpec
from scheduler.core.launch import CUDA_MODES, LAUNCHERS
from scheduler.core.log_names import check_log_name, is_packed
from scheduler.core.topology import LINK_WORDS
from scheduler.core.units import mib_of, seconds_of

PRIORITIES = range(-(10**9), 10**9 + 1)
LONGEST_LABEL = 200
MOST_CPUS = 4096
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

# Kinds of options: the type of the value in JSON.
TEXT = "text"  # a text or a number
PATH = "path"  # a text; the interface that reads the option resolves relative paths
BOOLEAN = "boolean"  # true or false; on the command line a flag without a value
JOBS = "jobs"  # a list of job ids, or that list as text
GPUS = "gpus"  # a list of GPU ids, or that list as text; never empty
VARIABLES = "variables"  # an object; on the command line NAME=VALUE, as often as needed

Named = Callable[[str], str]  # an option's name → its name where the user gave it


@dataclass(frozen=True, slots=True)
class FormField:
    """The field for an option in the form on the web page."""

    label: str
    hint: str = ""
    placeholder: str = "none"
    number: bool = False  # sent as a JSON number
    keyboard: str = ""  # HTML's inputmode


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOption:
    """One option of a job.

    ``field``: the field of JobSpec that the option sets. ``read``: returns the value of this field for a text; raises
    UsageError if the text is wrong, and Refused if the value is not possible. ``sets``: used only if
    ``field`` is empty. If ``sets`` is (KEY, TEXT), the option has the same effect as ``;KEY=TEXT`` on a line of the
    jobs file. ``key``: name of the option on a line of the jobs file; empty if the option is not allowed there.
    """

    name: str
    help: str
    metavar: str = ""
    kind: str = TEXT
    field: str = ""
    read: Callable[[str], object] = str
    sets: tuple[str, str] = ("", "")
    key: str = ""
    example: str = ""  # value shown in the table of keys in the documents
    meaning: str = ""  # text for that table, longer than ``help``
    submit: bool = True  # an option of `submit`, and a key of the HTTP API
    edit: bool = False
    completion: str = ""  # name of a completion in `cli/completions.py`
    form: FormField | None = None

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return flag(self.name)


def job_ids(text: str) -> tuple[int, ...]:
    """Read job ids separated by commas, plus signs or spaces; return them without duplicates. Raises UsageError."""
    pieces = [piece for piece in re.split(r"[,+\s]+", text) if piece]
    if not pieces or not all(re.fullmatch(r"[0-9]{1,15}", piece) for piece in pieces):
        raise UsageError(f"{text!r} is not a list of job ids", do="write 12 or 12,13")
    return tuple(dict.fromkeys(int(piece) for piece in pieces))


def priority_of(text: str) -> int:
    """Read a priority: a whole number in `PRIORITIES`. Raises UsageError."""
    plain = text.strip()
    if not re.fullmatch(r"[+-]?[0-9]{1,30}", plain):
        raise UsageError(f"the priority must be a whole number, not {text[:40]!r}")
    if int(plain) not in PRIORITIES:
        raise UsageError(
            f"the priority {plain} is out of range", do=f"write a number from {PRIORITIES[0]} to {PRIORITIES[-1]}"
        )
    return int(plain)


def _allowed(text: str) -> Allowed:
    return None if text.strip() == "any" else parse_allowed(text)


def _named_gpus(text: str) -> tuple[int, ...]:
    ids = parse_gpu_ids(text.replace("+", ","))
    if ids is None:
        raise UsageError("no GPU is named", do="write 0 or 0,3")
    return ids


def _count(text: str) -> int:
    if re.fullmatch(r"[0-9]{7,}", text):
        raise UsageError(f"{text[:40]} is too large", do="write at most 999999")
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise UsageError(f"{text!r} is not a whole number", do="write 0, 1, 2…")
    return int(text)


def _cpus(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) or not 0.01 <= float(text) <= MOST_CPUS:
        raise UsageError(f"{text[:40]!r} is not a number of CPUs", do="write 8 or 0.5")
    return float(text)


def _slots(text: str) -> int:
    slots = _count(text)
    if not slots:
        raise UsageError("a job takes at least one slot", do="write 1, 2…")
    return slots


def _need(text: str) -> str:
    ResourceRequest.parse(text)
    return text.strip()


def _label(text: str) -> str:
    if not text or _CONTROL.search(text) or len(text) > LONGEST_LABEL:
        raise UsageError(f"a label must have 1 to {LONGEST_LABEL} characters, and no control characters")
    return text


def _one_of(choices: Collection[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise UsageError(f"unknown value {text[:40]!r}", do=f"known: {', '.join(choices)}")
        return text

    return read


def _is(word: str, *others: str) -> Callable[[str], bool]:
    read = _one_of((word, *others))
    return lambda text: read(text) == word


def _log_name(text: str) -> str:
    check_log_name(text)
    if is_packed(text):
        raise UsageError(
            "a log name must not end in .gz", do="leave .gz out; the option gzip=yes compresses the log and adds .gz"
        )
    return text


def _one_line(text: str) -> str:
    if not text or _CONTROL.search(text):
        raise UsageError("the text is empty or contains control characters", do="write one line of text")
    return text


def _variables(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError:
        raise UsageError("a quote is not closed", do="quote as in a shell: A=1 B='two words'") from None
    for item in words:
        if not re.match(r"[^=\0]+=", item):
            raise UsageError(f"{item.partition('=')[0][:40]!r} is not NAME=VALUE", do="write A=1 B='two words'")
    return words


JOB_OPTIONS: dict[str, JobOption] = {
    option.name: option
    for option in (
        JobOption(
            name="gpus", metavar="NEED", field="gpus", read=_need, edit=True, completion="need", key="gpus", example="0.5",
            help="Share of a GPU, number of GPUs, or MIG instance: 0.5, 1, 2, 2x0.5 or mig-1g.10gb; default: from the model table.",
            meaning="need: `0`, `0.5`, `1`, `2`, `2x0.5` (half of each of two GPUs), `mig-1g.10gb` (a MIG instance); 1.5 is rounded up to 2 whole GPUs, with a note",
            form=FormField("GPUs", "0.5 for half of one, 2 for two, 0 for none", "1", keyboard="decimal"),
        ),
        JobOption(
            name="allowed", metavar="LIST", kind=GPUS, field="allowed", read=_allowed, edit=True, completion="gpu_list",
            help="GPUs it may run on: 0,2 or 0-3; default: any.",
            form=FormField("Allowed GPUs", "0-3 or 0,2", "any"),
        ),
        JobOption(
            name="priority", metavar="N", field="priority", read=priority_of, edit=True,
            help="A lower number starts first; default: 0.",
            form=FormField("Priority", "lower comes first", "0", number=True),
        ),
        JobOption(
            name="label", metavar="TEXT", field="label", read=_label, edit=True, key="label", example="base",
            help="A name for the job.", meaning="a name for people and for commands",
            form=FormField("Label"),
        ),
        JobOption(
            name="after", metavar="IDS", kind=JOBS, field="after", read=job_ids, edit=True, completion="job_list",
            key="after", example="12",
            help="Start when these jobs have ended.",
            meaning='start when job 12 has ended; several: `after="12,13"`',
            form=FormField("After the end of", "ids such as 12,13; whatever their outcome"),
        ),
        JobOption(
            name="after_ok", metavar="IDS", kind=JOBS, field="after_ok", read=job_ids, edit=True, completion="job_list",
            key="after_ok", example="12",
            help="Start when these jobs have succeeded.",
            meaning="start when job 12 has succeeded; if it does not succeed, this job is skipped",
            form=FormField("After success of", "ids; skipped if one of them fails"),
        ),
        JobOption(
            name="vram", metavar="SIZE", field="vram_mib", read=mib_of, edit=True, key="vram", example="18G",
            help="GPU memory that it needs on each GPU: 18G.",
            meaning="memory it needs on each GPU (ignored on GPUs of unknown size); its share of a GPU is at least the part "
            "of a GPU that this memory is",
            form=FormField("GPU memory", "needed on each GPU: 18G", "any"),
        ),
        JobOption(
            name="link", metavar="HOW", field="link", read=_one_of(LINK_WORDS), edit=True, completion="link", key="link", example="nvlink",
            help="Start only on GPUs that are joined at least so: nvlink, pcie (one switch) or numa (one CPU).",
            meaning="start a job for several GPUs only on GPUs that are all joined by NVLink; `pcie`: by the same PCIe switch "
            "or better; `numa`: by the same CPU or better. Without it, better joined GPUs are only preferred",
            form=FormField("Link", "between its GPUs: nvlink, pcie or numa", "any"),
        ),
        JobOption(
            name="mem", metavar="SIZE", field="mem_mib", read=mib_of, edit=True, key="mem", example="64G",
            help="Most memory of the machine that it may use: 64G (in the scheduler of all users).",
            meaning="most memory of the machine that it may use; a limit only in the scheduler of all users, where cgroups are delegated to it",
            form=FormField("Memory", "of the machine, at most: 64G", "any"),
        ),
        JobOption(
            name="cpus", metavar="N", field="cpus", read=_cpus, edit=True, key="cpus", example="8",
            help="Most CPUs that it may use: 8 or 0.5 (in the scheduler of all users).",
            meaning="most CPUs that it may use; a limit only in the scheduler of all users, where cgroups are delegated to it",
            form=FormField("CPUs", "at most: 8", "any"),
        ),
        JobOption(
            name="time", metavar="SPAN", field="time_limit_s", read=seconds_of, edit=True, key="time", example="4h",
            help="End it after this long: 90, 30m, 4h.",
            meaning="end it after this long: SIGTERM, and after `kill_grace` SIGKILL",
            form=FormField("Time limit", "4h, 30m, 1-12:00:00"),
        ),
        JobOption(
            name="retries", metavar="N", field="retries", read=_count, edit=True, key="retries", example="2",
            help="Run it again up to N times if it fails.",
            meaning="run it again up to twice if it fails",
            form=FormField("Retries", "", "0", number=True),
        ),
        JobOption(
            name="cwd", metavar="PATH", kind=PATH, field="cwd", edit=True, key="cwd", example="/data/x",
            help="Working folder; default: the submitter's current folder; over HTTP: the folder of the jobs file.",
            meaning="working folder; default: the one in which the scheduler was started",
            form=FormField("Folder", "", ""),
        ),
        JobOption(
            name="env", metavar="K=V", kind=VARIABLES, field="variables", read=_variables, key="env", example="\"A=1 B='x y'\"",
            help="Set an environment variable.", meaning="environment variables, added to the environment of the job",
        ),
        JobOption(
            name="conda", metavar="ENV", kind=PATH, field="conda_env", completion="environment",
            help="Conda or virtual environment: name or folder.",
            form=FormField("Environment", "conda or virtual: name or folder"),
        ),
        JobOption(
            name="cuda", metavar="MODE", field="cuda", read=_one_of(CUDA_MODES), edit=True, completion="cuda_mode",
            key="cuda", example="local",
            help="Overrides the setting cuda_ids: physical, local, unset, auto, or none (no --cuda is added).",
            meaning="overrides the setting `cuda_ids` for this job",
        ),
        JobOption(
            name="launch", metavar="HOW", field="launch", read=_one_of(LAUNCHERS), edit=True, completion="launcher",
            key="launch", example="torchrun",
            help="Launcher of a command that is a Python script: python or torchrun.",
            meaning="run the `.py` script as `python -m torch.distributed.run --standalone --nproc_per_node=N SCRIPT "
            "ARGS`, with the environment's python (N: number of its GPUs, 1 if it has none); a `--cuda` in ARGS gets "
            "the ids of these GPUs, but no `--cuda` is added. Default: `python`",
        ),
        JobOption(name="cpu", kind=BOOLEAN, sets=("gpus", "0"), help="Needs no GPU."),
        JobOption(
            name="slots", metavar="N", field="slots", read=_slots, key="slots", example="2",
            help="Slots that it takes if it needs no GPU.",
            meaning="slots that it takes if it needs no GPU (the setting `cpu_slots` says how many slots there are)",
        ),
        JobOption(
            name="on", metavar="LIST", kind=GPUS, field="on", read=_named_gpus, completion="gpu_list", key="on", example="0",
            help="Run on exactly these GPUs, beside everything that runs there: 0,3.",
            meaning='run on exactly these GPUs, beside everything that runs there (several: `on="0,3"` or `on=0+3`): it does not wait for room, nothing there '
            "is booked, and no other job is placed there until it ends",
        ),
        JobOption(
            name="output", field="output", read=_one_of(("log", "none")), submit=False, key="output", example="none",
            help="Discard its output.", meaning="discard its output",
        ),
        JobOption(
            name="stderr", field="stderr_apart", read=_is("apart", "log"), submit=False, key="stderr", example="apart",
            help="Write stderr to a separate file.",
            meaning="write stderr to a separate file: the log's name and `.e`",
        ),
        JobOption(name="no_output", kind=BOOLEAN, sets=("output", "none"), help="Discard its output."),
        JobOption(
            name="stderr_apart", kind=BOOLEAN, sets=("stderr", "apart"),
            help="Write stderr to a separate file: the log's name and .e.",
        ),
        JobOption(
            name="gzip", kind=BOOLEAN, field="gzip", read=_is("yes", "no"), key="gzip", example="yes",
            help="Compress the log.", meaning="compress the log (`.gz`)",
        ),
        JobOption(
            name="log_dir", metavar="PATH", kind=PATH, field="log_dir", key="log_dir", example="/data/logs",
            help="Folder of its log.",
            meaning="folder of its log; `keep_logs` removes only logs in the config's `log_dir`",
        ),
        JobOption(
            name="log_name", metavar="NAME", field="log_name", read=_log_name, key="log_name", example="run.log",
            help="Name of its log.",
            meaning="its log is `run.log`, or `run_2.log` if `run.log` exists already; the log of the second attempt "
            "is `run_a2.log`; `keep_logs` never removes these logs",
        ),
        JobOption(
            name="on_finish", metavar="PROGRAM", field="on_finish", read=_one_line, key="on_finish", example="notify.sh",
            help="Program to call at the end of the job, with id, error level, log and command.",
            meaning="a program to call at the end of the job (a name in the job's PATH, or a path: `./notify.sh`). It "
            "runs in the job's folder and environment; its arguments are id, error level (exit code, or -1), log (or "
            "nothing) and command; its output goes to `.gpujob/on_finish.log`. It is called once, after the last "
            "attempt, but not for a job that never started",
        ),
        JobOption(
            name="mail", metavar="WHO", field="mail_to", read=_one_line, key="mail", example="me@example.org",
            help="Mail its output to this address at the end of the job.",
            meaning="mail its output to this address at the end of the job (with `sendmail`)",
        ),
        JobOption(
            name="hold", kind=BOOLEAN, field="hold", read=_is("yes", "no"),
            help="Hold it: it waits for gpujob release.",
        ),
        JobOption(
            name="info", metavar="TEXT", field="info", key="info", example='"commit 1a2b3c"',
            help="A note that show prints.", meaning="a note that `show` prints",
        ),
    )
}  # fmt: skip
LINE_KEYS = {option.key: option for option in JOB_OPTIONS.values() if option.key}
SUBMIT_OPTIONS = tuple(option for option in JOB_OPTIONS.values() if option.submit)
EDITABLE = {option.field: option for option in JOB_OPTIONS.values() if option.edit}
PATH_FIELDS = frozenset(option.field for option in JOB_OPTIONS.values() if option.kind == PATH)


def as_on_a_line(key: str) -> str:
    """Return a key as it is shown in messages about a line of the jobs file: ``;key=``."""
    return f";{key}="


def read_line_keys(pairs: Collection[tuple[str, str]], named: Named = as_on_a_line) -> dict[str, Any]:
    """Return fields of JobSpec from the (key, text) pairs of a line. ``named``: returns a key's name in messages.

    Raises UsageError for an unknown or repeated key or a wrong text, and Refused for a value that is not possible.
    """
    values: dict[str, Any] = {}
    for key, text in pairs:
        if key not in LINE_KEYS:
            near = nearest(key, LINE_KEYS)
            do = f"did you mean {named(near)}?" if near else f"known: {', '.join(LINE_KEYS)}"
            quote = " (quote the field if it belongs to the arguments)" if named is as_on_a_line else ""
            raise UsageError(f"unknown option {named(key)}", do=f"{do}{quote}")
        if LINE_KEYS[key].field in values:
            raise UsageError(f"{named(key)} is given twice", do="give it once")
        _read_into(values, LINE_KEYS[key], text, named(key))
    return values


def read_options(texts: Mapping[str, str], named: Named = flag) -> dict[str, Any]:
    """Return fields of JobSpec from options. An option with an empty text counts as not given.

    ``texts``: option name → text. ``named``: returns an option's name in messages. Raises UsageError for a wrong text
    or for options that exclude each other, and Refused for a value that is not possible.
    """
    if texts.get("cpu") and texts.get("gpus"):
        raise UsageError(f"{named('cpu')} and {named('gpus')} exclude each other", do="leave one of them out")
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if text:
            option = JOB_OPTIONS[name]
            check_utf8(text, named(name))
            key, word = option.sets
            _read_into(values, LINE_KEYS[key] if key else option, word or text, named(name))
    return values


def check_utf8(text: str, where: str) -> None:
    """Raise UsageError if a text is not valid UTF-8, because the store cannot hold it. ``where``: place of the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("must be valid UTF-8", where=where) from None


def _read_into(values: dict[str, Any], option: JobOption, text: str, called: str) -> None:
    try:
        values[option.field] = option.read(text)
    except SchedulerError as error:
        raise type(error)(f"{called}: {error.what}", do=error.do) from None


def changed_fields(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of JobSpec that `edit` changes, with their new values.

    ``texts``: option name → text; an empty text resets the field to its default. Raises the errors of `read_options`.
    """
    defaults = JobSpec()
    given = read_options(texts)
    return {
        option.field: given[option.field] if option.field in given else getattr(defaults, option.field)
        for option in map(JOB_OPTIONS.__getitem__, texts)
    }


def allowed_gpus(values: Mapping[str, Any]) -> Allowed:
    """Return the GPUs that a job may use: the value of ``on``, or of ``allowed`` if ``on`` is not given; None: any GPU.

    ``values``: field of JobSpec → value. Raises Refused if ``on`` and ``allowed`` name different GPUs, or if both
    ``on`` and ``gpus`` are given.
    """
    on: tuple[int, ...] | None = values.get("on")
    allowed: Allowed = values.get("allowed")
    if on is None:
        return allowed
    if values.get("gpus"):
        raise Refused("on= and gpus= exclude each other", do="leave one of them out")
    if allowed not in (None, on):
        raise Refused(
            f"on= names GPU {gpu_ids_text(on)}, but the list of allowed GPUs names GPU {allowed_text(allowed)}",
            do="leave one of them out",
        )
    return on


def check_launch(spec: JobSpec) -> None:
    """Raise Refused if the launcher of the job cannot run its script."""
    if spec.launch != "python" and not spec.script.endswith(".py"):
        name = spec.script.rsplit("/", 1)[-1]
        raise Refused(
            f"{spec.launch} runs only Python scripts, and {name} does not end in .py",
            do="name the .py file, or leave launch out",
        )
