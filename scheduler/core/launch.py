"""The launch of a placed job: command line, environment, working folder, log and other streams."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.core.gpu import decimal_text
from scheduler.core.job import Job, JobSpec
from scheduler.core.log_names import errors_of

CUDA_MODES = ("physical", "local", "unset", "auto", "none")
CONDA_MODES = ("auto", "direct", "activate", "run")


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way to run a Python script: the words between interpreter and script. ``{gpus}`` is the number of GPUs."""

    words: tuple[str, ...]
    adds_cuda: bool = True  # False: an existing `--cuda` is replaced, but none is added


LAUNCHERS: dict[str, Launcher] = {
    "python": Launcher(("-u",)),
    "torchrun": Launcher(("-m", "torch.distributed.run", "--standalone", "--nproc_per_node={gpus}"), adds_cuda=False),
}


# Stands in a command for the ids of the GPUs until the node of a cluster knows them. No word can contain a NUL.
GPU_PLACEHOLDER = "\0gpus\0"
AS_WRITTEN = frozenset({"ts"})  # sources whose commands run unchanged, without filling in {gpus}
# {gpus}, {share} and the same in double braces, but not after a $: ${gpus} is a shell variable.
_BLANK = re.compile(r"(?<!\$)(?:\{\{(gpus|share)\}\}|(?<!\$\{)\{(gpus|share)\})")

NO_GPU = {"ts": "-1"}  # source → CUDA_VISIBLE_DEVICES of its jobs without GPUs; all other sources: empty


@dataclass(frozen=True, slots=True)
class Found:
    """The program and environment of a job that is about to start, as found on disk."""

    program: str  # path of the script's interpreter, the script itself, or the command's program
    runs_by_itself: bool = False  # a script that is not Python and is executed directly
    prefix: str = ""  # folder of the conda or virtual environment; empty: none
    environment: Mapping[str, str | None] = field(default_factory=dict)  # variables of the environment; None: unset
    wrapper: tuple[str, ...] = ()  # words before the command that run it in the environment
    interpreter: str = ""  # path, with the version if known: "/opt/x/bin/python (3.11.7)"


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a job besides its log.

    ``errors``: separate file for stderr; empty: stderr goes to the log. ``gzip``: program that packs the log; empty:
    the log is not packed. ``caller``: pid, start time (clock ticks) and socket path of the process whose descriptors
    the job uses as its streams; None: the job does not use the streams of another process.
    """

    errors: str = ""
    gzip: str = ""
    caller: tuple[int, int, str] | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Data with which a runner starts an attempt; ``key`` is the attempt's key, such as ``12.1``.

    ``environment``: variable → value, applied to the base environment; None unsets the variable. ``log``: path of the
    log; empty: the output is discarded.
    """

    key: str
    argv: tuple[str, ...]
    environment: Mapping[str, str | None]
    cwd: str
    log: str
    env_file: str = ""  # file with the whole environment in place of the daemon's (NUL-separated, 0600)
    umask: int | None = None
    words: tuple[str, ...] = ()  # the command as shown to people: ``argv`` without the wrapper
    streams: Streams = Streams()
    node: str = ""  # node of a cluster that must run it; empty: any that is allowed
    ordinals: Mapping[int, int | str] = field(
        default_factory=dict
    )  # as in `launch_of`, for an agent that completes the launch


def launch_of(
    job: Job,
    found: Found,
    *,
    mode: str,
    state_file: str,
    cwd: str,
    ordinals: Mapping[int, int | str] | None = None,
    placeholder: str = "",
) -> Launch:
    """Return the Launch of a placed job. ``mode``: physical, local, unset or none (docs/gpus.md, What a job sees).

    ``ordinals``: GPU id → the driver's current number, for GPUs whose number has changed since the daemon started, and
    the UUID of each MIG instance. CUDA_VISIBLE_DEVICES and ``--cuda`` use the driver's numbers, GPUJOB_GPUS the
    scheduler's ids. A job on a MIG instance always gets its UUID in CUDA_VISIBLE_DEVICES, and 0 as ``--cuda``. ``placeholder``:
    a text in place of the ids of the GPUs if an engine chooses them; the node replaces it by the ids.
    """
    if placeholder and job.need.count:
        return _launch(job, found, mode, state_file, cwd, placeholder, placeholder, job.need.count)
    moved = ordinals or {}
    names = [moved.get(gpu, gpu) for gpu in job.gpus]
    if any(isinstance(name, str) for name in names) and mode != "none":
        mode = "local"
    physical = ",".join(map(str, sorted(names, key=lambda name: (isinstance(name, str), name))))
    return _launch(job, found, mode, state_file, cwd, physical, ",".join(map(str, job.gpus)), len(job.gpus))


def _launch(
    job: Job, found: Found, mode: str, state_file: str, cwd: str, physical: str, gpus: str, number: int
) -> Launch:
    """Return the Launch. ``physical``, ``gpus``: the driver's and the scheduler's ids; ``number``: how many GPUs."""
    share = decimal_text(job.need.parts if job.need.count else 0)
    environment: dict[str, str | None] = dict(found.environment)
    environment.update(
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
        CUDA_VISIBLE_DEVICES=None if mode == "unset" and number else physical or NO_GPU.get(job.spec.source, ""),
        GPUJOB_ID=str(job.id),
        GPUJOB_ATTEMPT=str(job.attempt),
        GPUJOB_GPUS=gpus,
        GPUJOB_SHARE=share,
        GPUJOB_STATE_FILE=state_file,
    )
    if job.spec.variables:
        given = dict(item.split("=", 1) for item in job.spec.variables)
        environment = {**given, **environment}
    arguments = job.spec.arguments
    argv: tuple[str, ...]
    if not job.spec.is_script:
        words = arguments if job.spec.source in AS_WRITTEN else filled(arguments, physical, share)
        argv = (found.program, *words[1:])
    elif found.runs_by_itself:
        argv = (found.program, *arguments)
    else:
        if number and mode != "none":
            ids = ",".join(map(str, range(number))) if mode == "local" else physical
            arguments = with_cuda(arguments, ids, add=LAUNCHERS[job.spec.launch].adds_cuda)
        argv = script_words(job.spec, found.program, arguments, number)
    return Launch(
        key=job.attempt_key,
        argv=(*found.wrapper, *argv),
        environment=environment,
        cwd=job.spec.cwd or cwd,
        log=job.log,
        env_file=job.spec.env_file,
        umask=job.spec.umask,
        words=argv,
        streams=_streams(job),
    )


def _streams(job: Job) -> Streams:
    pid, ticks, path = job.spec.caller.split(" ", 2) if job.spec.caller else ("", "", "")
    return Streams(
        errors=errors_of(job.log) if job.spec.stderr_apart and job.log else "",
        gzip="gzip" if job.spec.gzip and job.log else "",
        caller=(int(pid), int(ticks), path) if pid else None,
    )


def filled(words: Sequence[str], gpus: str, share: str) -> tuple[str, ...]:
    """Return the words with ``{gpus}`` and ``{share}`` replaced by ``gpus`` and ``share``.

    ``{{gpus}}`` becomes ``{gpus}``, and ``{{share}}`` becomes ``{share}``. ``${gpus}`` and ``${share}`` are shell
    variables and stay unchanged. The values hold only letters, digits, commas, dashes and a point, so they need no
    quoting.
    """
    values = {"gpus": gpus, "share": share}
    return tuple(
        _BLANK.sub(lambda found: values[found[2]] if found[2] else f"{{{found[1]}}}", word) if "{" in word else word
        for word in words
    )


def script_words(spec: JobSpec, python: str, arguments: Sequence[str], gpus: int) -> tuple[str, ...]:
    """Return the command line of a Python script on ``gpus`` GPUs. torchrun starts one process for each GPU."""
    words = (word.format(gpus=max(1, gpus)) for word in LAUNCHERS[spec.launch].words)
    return (python, *words, spec.script, *arguments)


def with_cuda(arguments: Sequence[str], ids: str, *, add: bool = True) -> tuple[str, ...]:
    """Return ``arguments`` with ``ids`` as the value of each ``--cuda``.

    ``add``: if there is no ``--cuda``, add ``--cuda IDS``. A word that begins with ``--`` is never the value of
    ``--cuda``. Words after a bare ``--`` stay unchanged.
    """
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    out: list[str] = []
    seen = False
    position = 0
    while position < end:
        word = arguments[position]
        position += 1
        if word == "--cuda":
            out += [word, ids]
            seen = True
            if position < end and not arguments[position].startswith("--"):
                position += 1
        elif word.startswith("--cuda="):
            out.append(f"--cuda={ids}")
            seen = True
        else:
            out.append(word)
    if add and not seen:
        out += ["--cuda", ids]
    return (*out, *arguments[end:])
