"""Declaration of the verbs for the whole machine: who, needs, lease, service and system."""

from __future__ import annotations

import sys
from typing import Annotated, Optional

import typer

from scheduler.cli import completions
from scheduler.cli.arguments import ConfigFile, Json, StateFile, which
from scheduler.core.errors import Refused, UsageError


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command("who")(who)
    app.command("needs")(needs)
    app.command("service")(service)
    app.command("system")(system)
    app.command("watch")(watch)
    app.command("token")(token)
    app.command("lease", context_settings={"allow_interspersed_args": False})(lease)


def who(
    *,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON value, for programs (write --json after the verb).")
    ] = False,
) -> None:
    """Show which user has which GPU of this machine: booked, used, idle, since when."""
    from scheduler.cli.who import who as show

    raise typer.Exit(show(json=json))


def needs(
    models: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[MODEL…]", help="Only these models.", autocompletion=completions.model),
    ] = None,
    *,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Write the suggestions into the model table; a guess only if its model is named."),
    ] = False,
    json: Json = False,
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Show for each model the need in the model table, what its runs used (MAX of all, P95 of the newest), and a suggestion."""
    from scheduler.cli.needs import needs as run

    raise typer.Exit(run(models or (), apply=apply, json=json, **which(state_file, config)))


def lease(
    command: Annotated[
        Optional[list[str]], typer.Argument(metavar="[-- COMMAND…]", help="What to run; by default a shell.")
    ] = None,
    *,
    gpus: Annotated[
        str, typer.Option("-g", "--gpus", metavar="NEED", help="Number or share of GPUs: 1, 2, 0.5.")
    ] = "1",
    allowed: Annotated[str, typer.Option("--allowed", metavar="LIST", help="Allowed GPUs: 0,2 or 0-3.")] = "",
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="The lease ends after this time: 4h.")] = "",
    idle: Annotated[
        str, typer.Option("--idle", metavar="TIME", help="The lease ends after its GPUs were idle for this time: 30m.")
    ] = "",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Fail if no GPU is free.")] = False,
    pid: Annotated[
        str, typer.Option("--pid", metavar="PID", help="Book the GPUs that this process already uses.")
    ] = "",
) -> None:
    """Book GPUs for interactive work: run a shell or a command on them."""
    from scheduler.cli.lease import lease as run

    code = run(command or [], gpus=gpus, allowed=allowed, for_=for_, idle=idle, wait=not no_wait, pid=pid)
    raise typer.Exit(code)


def service(
    action: Annotated[str, typer.Argument(metavar="install|status|uninstall", help="What to do.")],
    options: Annotated[
        Optional[list[str]], typer.Argument(metavar="[-- OPTION…]", help="With install: options of gpujob start.")
    ] = None,
    *,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the systemd unit.")] = "gpujob",
    force: Annotated[bool, typer.Option("--force", help="Replace a unit that gpujob did not write.")] = False,
) -> None:
    """Run the scheduler of this folder as a systemd service of yours, without root."""
    from scheduler.cli import service as unit

    if action == "install":
        raise typer.Exit(unit.install(name, options or [], force=force))
    if options:
        raise UsageError(f"gpujob service {action} takes no options of gpujob start")
    if action == "status":
        raise typer.Exit(unit.status(name))
    if action == "uninstall":
        raise typer.Exit(unit.uninstall(name))
    raise UsageError(f"unknown action {action!r}", do="write gpujob service install, status or uninstall")


def watch(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="The jobs file [~/gpujob/jobs.txt].")] = "",
    *,
    stop: Annotated[bool, typer.Option("--stop", help="Stop reading it; its jobs continue.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Print the files that are read.")] = False,
) -> None:
    """Have the scheduler of all users read a jobs file of yours: each line appended to it is a job."""
    from scheduler.cli.watch import watch as run

    raise typer.Exit(run(file, stop=stop, listed=listed))


def token() -> None:
    """Print a new token for your page of the scheduler of all users; your previous token is no longer accepted."""
    from scheduler.client.locate import client_of, system_socket

    client = client_of(system_socket())
    settings = client.settings()
    if not settings.get("web", (False,))[0]:
        raise Refused("the scheduler of this machine has no web page", do="an administrator can turn it on: web: true")
    print(client.new_token())
    port = settings.get("web_port", (0,))[0]
    where = f"at http://127.0.0.1:{port}/; from another machine: ssh -L {port}:127.0.0.1:{port} HOST"
    if not port:
        where = "at a free port (web_port: 0), which the log of the service names: journalctl -u gpujobd"
    print(f"gpujob: the page is {where}", file=sys.stderr)
    raise typer.Exit(0)


def system(
    action: Annotated[str, typer.Argument(metavar="install|status|uninstall|run", help="What to do.")],
    *,
    root: Annotated[str, typer.Option("--root", metavar="DIR", help="With run: put all files below this folder.")] = "",
    user: Annotated[str, typer.Option("--user", metavar="NAME", help="With run: user of the scheduler.")] = "",
) -> None:
    """Run one scheduler for all users of this machine, as the service gpujobd (as root)."""
    if action == "run":
        from scheduler.gpujobd.system_run import run

        raise typer.Exit(run(root, user))
    if root or user:
        raise UsageError("--root and --user belong to gpujob system run")
    from scheduler.cli import system_service

    if action == "install":
        raise typer.Exit(system_service.install())
    if action == "status":
        raise typer.Exit(system_service.status())
    if action == "uninstall":
        raise typer.Exit(system_service.uninstall())
    raise UsageError(f"unknown action {action!r}", do="write gpujob system install, status, uninstall or run")
