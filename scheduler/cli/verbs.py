"""The Typer group of all verbs, with hints for unknown verbs."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup, TyperOption

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


class Common:
    """Options given before the verb. ``system``: also given after it."""

    state_file: str | None = None
    config: str | None = None
    system: bool = False


def _ask_system(_ctx: object, _param: object, wanted: bool) -> None:
    Common.system = Common.system or wanted


class Verbs(TyperGroup):
    """The Typer group of all verbs. For an unknown verb, the error names the verb that the user probably meant."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a verb. Each verb that uses a scheduler gets the option ``--system``."""
        found = super().get_command(ctx, cmd_name)
        names = [one.name for one in found.params] if found is not None else []
        if found is not None and "state_file" in names and "system" not in names:
            option = TyperOption(
                param_decls=["--system"], is_flag=True, default=False, expose_value=False, callback=_ask_system,
                help="Use the scheduler of all users of this machine.",
            )  # fmt: skip
            found.params.insert(names.index("state_file"), option)
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that ``args`` name, as Click expects it. Raises UsageError for an unknown verb."""
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            meant = ELSEWHERE.get(args[0])
            near = f"; {meant}" if meant else did_you_mean(args[0], self.list_commands(ctx))
            raise UsageError(f"unknown verb {args[0]!r}{near}", do="see gpujob --help")
        return super().resolve_command(ctx, args)
