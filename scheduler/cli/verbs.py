"""The Typer group of all verbs, with hints for unknown verbs."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from scheduler.core.errors import UsageError, did_you_mean

# Verb in other programs → what to use here.
ELSEWHERE = {
    **dict.fromkeys(
        ("stop", "quit", "shutdown", "exit"),
        "to end the scheduler: kill PID (shown by gpujob status); its jobs continue",
    ),
    **dict.fromkeys(
        ("kill", "rm", "delete", "remove", "scancel", "qdel"),
        "gpujob cancel JOB ends a job, gpujob reset forgets ended jobs",
    ),
    **dict.fromkeys(("ps", "top", "ls", "list", "queue-list", "squeue", "qstat"), "did you mean status, or jobs?"),
    **dict.fromkeys(("sbatch", "qsub"), "did you mean submit?"),
    **dict.fromkeys(("tail", "log", "output", "cat"), "did you mean logs?"),
    **dict.fromkeys(("restart", "rerun", "requeue"), "did you mean retry JOB, or start?"),
}


class Verbs(TyperGroup):
    """The Typer group of all verbs. For an unknown verb, the error names the verb that the user probably meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that ``args`` name, as Click expects it. Raises UsageError for an unknown verb."""
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            meant = ELSEWHERE.get(args[0])
            near = f"; {meant}" if meant else did_you_mean(args[0], self.list_commands(ctx))
            raise UsageError(f"unknown verb {args[0]!r}{near}", do="see gpujob --help")
        return super().resolve_command(ctx, args)
