"""From a placed job to what is executed: words, environment, folder, log."""

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
    """A way to run a Python script: words between interpreter and script, ``{gpus}`` being the number of GPUs."""

    words: tuple[str, ...]
    adds_cuda: bool = True  # False: `--cuda` is replaced where it stands, but not added


LAUNCHERS: dict[str, Launcher] = {
    "python": Launcher(("-u",)),
    "torchrun": Launcher(("-m", "torch.distributed.run", "--standalone", "--nproc_per_node={gpus}"), adds_cuda=False),
}


AS_WRITTEN = frozenset({"ts"})  # sources whose commands are run to the letter
_BLANK = re.compile(r"(?<!\$)(?:\{\{(gpus|share)\}\}|(?<!\$\{)\{(gpus|share)\})")

NO_GPU = {"ts": "-1"}  # what jobs without GPUs see in CUDA_VISIBLE_DEVICES, by their source; else nothing


@dataclass(frozen=True, slots=True)
class Found:
    """What the hands found on disk for a job about to start."""

    program: str  # interpreter of a script, or the command's program, as a path
    runs_by_itself: bool = False  # a script that is not Python
    prefix: str = ""  # of the conda or virtual environment
    environment: Mapping[str, str | None] = field(default_factory=dict)  # what the environment sets, None: takes away
    wrapper: tuple[str, ...] = ()  # words before the command that take it into the environment
    interpreter: str = ""  # with its version, as far as files tell: "/opt/x/bin/python (3.11.7)"


@dataclass(frozen=True, slots=True)
class Streams:
    """Where a job reads and writes, beside its log.

    ``errors``: a file of its own for what goes to stderr; ``gzip``: the program that packs the log, empty: none;
    ``caller``: pid, ticks and socket of the process that gives it descriptors in place of these.
    """

    errors: str = ""
    gzip: str = ""
    caller: tuple[int, int, str] | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """All that a runner needs. ``environment`` is laid over the base one; None takes a variable away.

    An empty ``log``: what the job writes is kept nowhere.
    """

    key: str
    argv: tuple[str, ...]
    environment: Mapping[str, str | None]
    cwd: str
    log: str
    env_file: str = ""  # whole environment instead of the daemon's (NUL-separated, 0600)
    umask: int | None = None
    words: tuple[str, ...] = ()  # the command alone, as people are shown it: ``argv`` without the wrapper
    streams: Streams = Streams()


def launch_of(
    job: Job, found: Found, *, mode: str, state_file: str, cwd: str, ordinals: Mapping[int, int] | None = None
) -> Launch:
    """Words and environment of an attempt. ``mode``: physical, local, unset or none, by the table in docs/formats.md.

    ``ordinals``: GPU → the driver's number for it, where a GPU has vanished or come back since the daemon started;
    CUDA goes by the driver's numbers, GPUJOB_GPUS by ours.
    """
    moved = ordinals or {}
    share = decimal_text(job.need.parts if job.need.count else 0)
    physical = ",".join(map(str, sorted(moved.get(gpu, gpu) for gpu in job.gpus)))
    environment: dict[str, str | None] = dict(found.environment)
    environment.update(
        CUDA_DEVICE_ORDER="PCI_BUS_ID",
        CUDA_VISIBLE_DEVICES=None if mode == "unset" and job.gpus else physical or NO_GPU.get(job.spec.source, ""),
        GPUJOB_ID=str(job.id),
        GPUJOB_ATTEMPT=str(job.attempt),
        GPUJOB_GPUS=",".join(map(str, job.gpus)),
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
        if job.gpus and mode != "none":
            ids = ",".join(str(n) for n in range(len(job.gpus))) if mode == "local" else physical
            arguments = with_cuda(arguments, ids, add=LAUNCHERS[job.spec.launch].adds_cuda)
        argv = script_words(job.spec, found.program, arguments, len(job.gpus))
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
    """The words of a command with ``{gpus}`` and ``{share}`` filled in; ``{{gpus}}`` and ``{{share}}`` lose a pair of braces.

    What stands behind a ``$`` is a variable of the shell's. Only digits, commas and a point come in, so no quoting changes.
    """
    values = {"gpus": gpus, "share": share}
    return tuple(
        _BLANK.sub(lambda found: values[found[2]] if found[2] else f"{{{found[1]}}}", word) if "{" in word else word
        for word in words
    )


def script_words(spec: JobSpec, python: str, arguments: Sequence[str], gpus: int) -> tuple[str, ...]:
    """The command of a Python script with these arguments on so many GPUs; torchrun starts one process a GPU."""
    words = (word.format(gpus=max(1, gpus)) for word in LAUNCHERS[spec.launch].words)
    return (python, *words, spec.script, *arguments)


def with_cuda(arguments: Sequence[str], ids: str, *, add: bool = True) -> tuple[str, ...]:
    """``arguments`` with every ``--cuda X`` and ``--cuda=X`` replaced, else ``--cuda IDS`` added if ``add``.

    A following word that begins with ``--`` is not its value; what stands after a bare ``--`` is left alone.
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
