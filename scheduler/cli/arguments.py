"""Arguments and options that several verbs of the command line have."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer

from scheduler.cli import completions
from scheduler.cli.verbs import Common
from scheduler.core.errors import UsageError

StateFile = Annotated[
    Optional[str], typer.Option("--state-file", metavar="PATH", help="State file of the scheduler to use.")
]
ConfigFile = Annotated[Optional[str], typer.Option("--config", metavar="PATH", help="Config file (YAML).")]
JOB_HELP = "Id (12), range (3-9), label, @ (the last job) or @~1 (the job before it)."


def jobs_argument(completion: Any) -> Any:
    """Return the declaration of the argument JOB…; ``completion`` offers jobs for it after TAB."""
    return typer.Argument(metavar="JOB…", help=JOB_HELP, autocompletion=completion)


def words(flag: str, metavar: str, help: str, completion: Any, *also: str) -> Any:
    """Return an option whose values are completed by ``completion``. ``also``: other names of the option."""
    return typer.Option(flag, *also, metavar=metavar, help=help, autocompletion=completion)


Jobs = Annotated[list[str], jobs_argument(completions.any_job)]
LiveJobs = Annotated[list[str], jobs_argument(completions.live_job)]
EndedJobs = Annotated[list[str], jobs_argument(completions.ended_job)]
HeldJobs = Annotated[list[str], jobs_argument(completions.held_job)]
PendingJobs = Annotated[list[str], jobs_argument(completions.pending_job)]
OneJob = Annotated[str, typer.Argument(metavar="JOB", help=JOB_HELP, autocompletion=completions.any_job)]
SessionJob = Annotated[str, typer.Argument(metavar="JOB", help=JOB_HELP, autocompletion=completions.session_job)]
Gpus = Annotated[
    list[str], typer.Argument(metavar="GPU…", help="GPU ids: 2, or 0-3.", autocompletion=completions.unpaused_gpu)
]
PausedGpus = Annotated[
    list[str], typer.Argument(metavar="GPU…", help="GPU ids: 2, or 0-3.", autocompletion=completions.paused_gpu)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value, for programs (write --json after the verb).")]


def which(state_file: Optional[str], config: Optional[str]) -> dict[str, Any]:
    """Return which scheduler a verb is for: the options of the verb, else those before the verb."""
    named = state_file or Common.state_file
    if Common.system:
        from scheduler.client.locate import system_socket

        if named:
            raise UsageError("--system and --state-file name two schedulers", do="leave one of them out")
        named = system_socket()
    return {"state_file": named, "config": config or Common.config}
