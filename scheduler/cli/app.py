"""Declaration of the command line: every verb with its options, help texts and completions."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Optional

import typer

from scheduler import __version__
from scheduler.cli import completions, machine_verbs
from scheduler.cli.arguments import (
    ConfigFile,
    EndedJobs,
    Gpus,
    HeldJobs,
    Jobs,
    Json,
    LiveJobs,
    OneJob,
    PausedGpus,
    PendingJobs,
    SessionJob,
    StateFile,
    which,
    words,
)  # fmt: skip
from scheduler.cli.verbs import Common, Verbs
from scheduler.core.config import OPTIONS
from scheduler.core.errors import UsageError, did_you_mean, flag
from scheduler.core.job_options import BOOLEAN, EDITABLE, JOB_OPTIONS, SUBMIT_OPTIONS, VARIABLES, JobOption
from scheduler.system.terminal_text import charset, shown

app = typer.Typer(
    name="gpujob",
    cls=Verbs,
    help="Run jobs on the GPUs of this server: each line appended to the jobs file is a job.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
    no_args_is_help=False,
)

machine_verbs.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gpujob {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main_options(
    ctx: typer.Context,
    state_file: StateFile = None,
    config: ConfigFile = None,
    json: Json = False,
    system: Annotated[bool, typer.Option("--system", help="Use the scheduler of all users of this machine.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run jobs on the GPUs of this server: each line appended to the jobs file is a job."""
    Common.state_file, Common.config, Common.system = state_file, config, system
    if ctx.invoked_subcommand is None:
        from scheduler.cli import show

        raise typer.Exit(show.status(json=json, **which(state_file, config)))
    if json:
        raise UsageError("--json belongs after the verb", do=f"write gpujob {ctx.invoked_subcommand} --json")


def _parameter(name: str, kind: Any, default: Any, declared: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )  # fmt: skip


def _with(*rows: inspect.Parameter) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces the ``**`` parameter of a verb's function by the parameters ``rows``.

    The parameters ``rows`` come after the verb's arguments and before its own options.
    """

    def declare(verb: Callable[..., None]) -> Callable[..., None]:
        own = [
            one for one in inspect.signature(verb, eval_str=True).parameters.values() if one.kind is not one.VAR_KEYWORD
        ]
        arguments = sum(1 for one in own if one.kind is one.POSITIONAL_OR_KEYWORD)
        both = [*own[:arguments], *rows, *own[arguments:]]
        verb.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=one.KEYWORD_ONLY) for one in both], return_annotation=None
        )
        verb.__annotations__ = {one.name: one.annotation for one in both}
        return verb

    return declare


def _setting(name: str, help: str = "") -> inspect.Parameter:
    """Return the Typer option for a setting, for `start` and `run`. ``help``: replaces the help text of the setting."""
    row = OPTIONS[name]
    text = str(row.metadata["help"])
    usual = "" if row.default in (None, "", False) else f" [{row.default}]"
    text = help or f"{text[0].upper()}{text[1:]}.{usual}"
    metavar = row.metadata["metavar"]
    if not metavar:
        both = f"{flag(name)}/{flag(f'no_{name}')}"
        return _parameter(name, Optional[bool], None, typer.Option(both, help=text, show_default=False))
    option = typer.Option(
        flag(name), metavar=metavar, help=text, show_default=False, autocompletion=completions.setting(name)
    )  # fmt: skip
    return _parameter(name, Optional[str], None, option)


def _job_option(option: JobOption, *, edit: bool = False) -> inspect.Parameter:
    """Return the Typer option for a row of `JOB_OPTIONS`, for `submit`, `add` and `edit`.

    ``edit``: the option is for `edit`. There a missing text option has the value None; an empty text means the default.
    """
    complete = getattr(completions, option.completion) if option.completion else None
    declared = typer.Option(
        option.flag, metavar=option.metavar or None, help=option.help, show_default=False, autocompletion=complete
    )  # fmt: skip
    if option.kind == VARIABLES:
        return _parameter(option.name, Optional[list[str]], None, declared)
    if option.kind == BOOLEAN:
        return _parameter(option.name, bool, False, declared)
    return _parameter(option.name, Optional[str] if edit else str, None if edit else "", declared)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


@app.command("start")
@_with(*(_setting(name) for name in OPTIONS if name != "state_file"))
def start(
    *,
    drain: Annotated[
        bool, typer.Option("--drain", help="End when nothing is left to do; exit 1 if any job failed.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background; return once the scheduler is ready.")
    ] = False,
    state_file: StateFile = None,
    config: ConfigFile = None,
    **settings: Any,
) -> None:
    """Run the scheduler: watch the jobs file, run its lines on the GPUs, print what happens."""
    from scheduler.cli.serve import start as serve

    code = serve(drain=drain, detach=detach, **which(state_file, config), **_given(settings))
    raise typer.Exit(code)


# Settings that `run` takes → help text for `run`; empty: the setting's own help text.
OF_RUN = {
    "commands_file": "File with one shell command per line [commands.txt].",
    "gpus": "", "gpu_ids": "", "min_free_mem_mb": "", "poll_interval": "",
    "log_dir": "Folder of the job logs [logs].",
    "jobs_file": "Journal of the jobs, in JSON Lines [jobs.jsonl].",
    "screen": "", "kill_grace": "", "oom_retries": "", "python": "",
}  # fmt: skip


@app.command("run")
@_with(*(_setting(name, help) for name, help in OF_RUN.items()))
def run_commands(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="File of commands, like --commands-file.")] = "",
    *,
    again: Annotated[
        bool, typer.Option("--again", help="Run all commands of the file again, also those that have ended.")
    ] = False,
    state_file: StateFile = None,
    config: ConfigFile = None,
    **settings: Any,
) -> None:
    """Run a file of shell commands on the GPUs until all have ended; call it again to continue after a stop."""
    from scheduler.cli.run import run as dispatch

    if file and settings["commands_file"]:
        raise UsageError("the commands file is named twice", where="run", do="leave one of them out")
    raise typer.Exit(dispatch(file, again=again, **which(state_file, config), **_given(settings)))


@app.command("add")
@_with(_job_option(JOB_OPTIONS["conda"]), _job_option(JOB_OPTIONS["priority"]))
def add(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python script, or any executable file.")],
    *,
    args: Annotated[str, typer.Option("--args", metavar="TEXT", help="Arguments of the script.")] = "",
    gpus: Annotated[str, words("--gpus", "LIST", "Allowed GPUs: 0,2 or 0-3.", completions.gpu_list, "--allowed")] = "",
    pairs: Annotated[
        Optional[list[str]],
        words("--set", "K=V", "Option for which add has no flag: gpus=0.5, time=4h, label=x…", completions.line_key),
    ] = None,
    output_file: Annotated[
        str, typer.Option("--output-file", metavar="PATH", help="Jobs file to append to; -: only print the line.")
    ] = "",
    state_file: StateFile = None,
    config: ConfigFile = None,
    **columns: Any,
) -> None:
    """Append one line to the jobs file and print it."""
    from scheduler.cli import add as adding

    code = adding.add(
        script, args=args, gpus=gpus, pairs=tuple(pairs or ()), output_file=output_file, **which(state_file, config), **columns
    )  # fmt: skip
    raise typer.Exit(code)


@app.command("submit", context_settings={"allow_interspersed_args": False})
@_with(*map(_job_option, SUBMIT_OPTIONS))
def submit(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="The command and its arguments.")],
    *,
    info_command: Annotated[
        str, typer.Option("--info-command", metavar="TEXT", help="Shell command whose output becomes the --info.")
    ] = "",
    foreground: Annotated[
        bool,
        typer.Option("-f", "--foreground", help="Wait until the job ends; the job reads the input of this command."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job ends, and exit with its exit code.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say where and when the job would start; submit nothing.")
    ] = False,
    state_file: StateFile = None,
    config: ConfigFile = None,
    **options: Any,
) -> None:
    """Queue a command with the current folder and environment, and print the job's id."""
    from scheduler.cli import add as adding

    options["env"] = tuple(options["env"] or ())
    code = adding.submit(
        command, info_command=info_command, foreground=foreground, wait=wait, dry_run=dry_run,
        **which(state_file, config), **options,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command(
    "ts",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def ts(ctx: typer.Context) -> None:
    """The command line of GPU Task Spooler (gpujob ts -h), also available through a link named ts or tsp."""
    raise typer.Exit(ctx.obj["ts"](ctx.args))


@app.command(
    "track",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def track(ctx: typer.Context) -> None:
    """Run commands one after another, and see after a crash how far they got (gpujob track -h)."""
    raise typer.Exit(ctx.obj["track"](ctx.args))


@app.command("status")
def status(
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")] = False,
    every: Annotated[str, typer.Argument(metavar="[S]", help="Seconds between repetitions, with --watch [2].")] = "",
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Show GPUs, running jobs, waiting jobs with their reasons, the last ended jobs, and refused lines."""
    from scheduler.cli import show

    if every and not watch:
        raise UsageError(f"{every} belongs after --watch", do=f"write gpujob status --watch {every}")
    raise typer.Exit(show.status(json=json, watch=every if watch else None, **which(state_file, config)))


@app.command("jobs")
def jobs(
    state: Annotated[
        str, words("--state", "STATES", "Only jobs in these states, comma-separated.", completions.state_list)
    ] = "",
    last: Annotated[str, typer.Option("-n", "--last", metavar="N", help="Only the newest N jobs.")] = "",
    json: Json = False,
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """List all jobs."""
    from scheduler.cli import show

    raise typer.Exit(show.jobs(state=state, last=last, json=json, **which(state_file, config)))


@app.command("show")
def show_job(jobs: Jobs, json: Json = False, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """Show all facts about jobs and their event histories."""
    from scheduler.cli import show

    raise typer.Exit(show.show(jobs, json=json, **which(state_file, config)))


@app.command("report")
def report(
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the jobs as CSV, for spreadsheets.")] = False,
    since: Annotated[
        str, typer.Option("--since", metavar="WHEN", help="Only from this time on: 7d (7 days ago), 2026-11-15.")
    ] = "",
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="Only jobs with this label.")] = "",
    by: Annotated[str, typer.Option("--by", metavar="user", help="Show the use of all users of this machine.")] = "",
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Show waiting times, run times and GPU use by job, label and GPU."""
    from scheduler.cli.report import report as reporting

    raise typer.Exit(reporting(json=json, csv=csv, since=since, label=label, by=by, **which(state_file, config)))


@app.command("why")
def why(job: OneJob, json: Json = False, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """Show why a job waits, when it will start and what would start it now, or how it ended."""
    from scheduler.cli import show

    raise typer.Exit(show.why(job, json=json, **which(state_file, config)))


@app.command("plan")
def plan(
    json: Json = False,
    svg: Annotated[bool, typer.Option("--svg", help="Print the timeline as a picture (SVG).")] = False,
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Show when jobs are expected to start and end."""
    from scheduler.cli.plan import plan as planning

    raise typer.Exit(planning(json=json, svg=svg, **which(state_file, config)))


@app.command("logs")
def logs(
    job: OneJob,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the log until the job ends.")] = False,
    lines: Annotated[str, typer.Option("-n", "--lines", metavar="N", help="Only the last N lines.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Print the bytes unchanged; refused on a terminal.")] = False,
    grep: Annotated[
        Optional[str],
        typer.Option(
            "--grep",
            metavar="PATTERN",
            help="Only lines that match this Python regular expression; exit code 1 if no line matches.",
        ),
    ] = None,
    attempt: Annotated[
        str, typer.Option("--attempt", metavar="N", help="Number of the attempt whose log to show [the last].")
    ] = "",
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Show the output of a job as a terminal would show it: only the last state of a progress bar."""
    from scheduler.cli import logs as logs_of

    found = which(state_file, config)
    code = logs_of.logs(job, follow=follow, lines=lines, raw=raw, grep=grep, attempt=attempt, **found)
    raise typer.Exit(code)


@app.command("cancel")
def cancel(jobs: LiveJobs, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """Cancel jobs: waiting jobs leave the queue, and all processes of running jobs are ended."""
    from scheduler.cli import control

    raise typer.Exit(control.cancel(jobs, **which(state_file, config)))


@app.command("retry")
def retry(jobs: EndedJobs, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """Run ended jobs again: same id, new attempt, new log."""
    from scheduler.cli import control

    raise typer.Exit(control.retry(jobs, **which(state_file, config)))


@app.command("hold")
def hold(jobs: PendingJobs, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """Hold waiting jobs: they do not start until they are released."""
    from scheduler.cli import control

    raise typer.Exit(control.hold(jobs, **which(state_file, config)))


@app.command("release")
def release(jobs: HeldJobs, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """Release held jobs, so that they can start."""
    from scheduler.cli import control

    raise typer.Exit(control.release(jobs, **which(state_file, config)))


@app.command("first")
def first(jobs: PendingJobs, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """Move waiting jobs to the front of the queue, in the given order, whatever their priority."""
    from scheduler.cli import control

    raise typer.Exit(control.first(jobs, **which(state_file, config)))


@app.command("swap")
def swap(jobs: PendingJobs, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """Exchange the places of two waiting jobs."""
    from scheduler.cli import control

    raise typer.Exit(control.swap(jobs, **which(state_file, config)))


@app.command("edit")
@_with(*(_job_option(option, edit=True) for option in EDITABLE.values()))
def edit(jobs: PendingJobs, *, state_file: StateFile = None, config: ConfigFile = None, **options: Any) -> None:
    """Change waiting jobs; an empty value restores an option's default (--time '')."""
    from scheduler.cli import control

    raise typer.Exit(control.edit(jobs, _given(options), **which(state_file, config)))


@app.command("wait")
def wait(
    jobs: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[JOB…]", help="Jobs to wait for [all].", autocompletion=completions.live_job),
    ] = None,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="SPAN", help="Stop waiting after this long (exit code 124).")
    ] = "",
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Wait until jobs have ended; exit with the exit code of the job, or for several jobs with 1 if any failed."""
    from scheduler.cli import control

    raise typer.Exit(control.wait(jobs or [], timeout=timeout, **which(state_file, config)))


@app.command("pause")
def pause(gpus: Gpus, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """Pause GPUs: they get no new jobs, and running jobs continue."""
    from scheduler.cli import control

    raise typer.Exit(control.pause(gpus, **which(state_file, config)))


@app.command("resume")
def resume(
    gpus: PausedGpus,
    force: Annotated[
        bool, typer.Option("--force", help="Start jobs despite the foreign processes and memory on the GPUs.")
    ] = False,
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Resume paused GPUs."""
    from scheduler.cli import control

    raise typer.Exit(control.resume(gpus, force=force, **which(state_file, config)))


@app.command("queue")
def queue(
    what: Annotated[str, typer.Argument(metavar="pause|resume", autocompletion=completions.queue_word)],
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Pause or resume the whole queue."""
    from scheduler.cli import control

    raise typer.Exit(control.queue(what, **which(state_file, config)))


@app.command("screens")
def screens(json: Json = False, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """List the screen sessions of running jobs, each with the command that attaches to it."""
    from scheduler.cli import sessions

    raise typer.Exit(sessions.screens(json=json, **which(state_file, config)))


@app.command("attach")
def attach(job: SessionJob, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """Attach this terminal to a job's screen session; Ctrl-a d detaches it, and the job continues."""
    from scheduler.cli import sessions

    raise typer.Exit(sessions.attach(job, **which(state_file, config)))


config_app = typer.Typer(help="Show or check the settings.", no_args_is_help=False)
app.add_typer(config_app, name="config")


@config_app.callback(invoke_without_command=True)
def config_alone(ctx: typer.Context) -> None:
    """Show or check the settings."""
    if ctx.invoked_subcommand is None:
        config_show()


@config_app.command("show")
def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="Also print where each value comes from.")] = False,
    json: Json = False,
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Print every setting as a line of a config file."""
    from scheduler.cli import config as configuring

    raise typer.Exit(configuring.show(origin=origin, json=json, **which(state_file, config)))


@config_app.command("check")
def config_check(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="Check only this file [all files].")] = "",
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Print every mistake in the settings, with file and line."""
    from scheduler.cli import config as configuring

    raise typer.Exit(configuring.check(file, **which(state_file, config)))


@app.command("reset")
def reset(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Forget ended jobs and refused lines; all other jobs and all logs stay."""
    from scheduler.cli import control

    raise typer.Exit(control.reset(yes=yes, **which(state_file, config)))


@app.command("recover")
def recover(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")] = False,
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Rebuild a damaged store from what can be read, or adopt a moved or copied state folder."""
    from scheduler.cli import control

    raise typer.Exit(control.recover(dry_run=dry_run, **which(state_file, config)))


@app.command("doctor")
def doctor(json: Json = False, state_file: StateFile = None, config: ConfigFile = None) -> None:
    """Print problems of this machine and this scheduler, with the commands that fix them; changes nothing."""
    from scheduler.cli.doctor import doctor as examine

    raise typer.Exit(examine(json=json, **which(state_file, config)))


@app.command("web")
def web_page(
    ctx: typer.Context,
    port: Annotated[str, typer.Option("--port", metavar="N", help="Port of the web page; 0: any free port.")] = "4004",
    host: Annotated[
        str,
        typer.Option("--host", metavar="ADDRESS", help="Address of the page; beyond this machine, use TLS or a proxy."),
    ] = "127.0.0.1",
    tls_cert: Annotated[str, typer.Option("--tls-cert", metavar="PATH", help="Certificate (PEM), for HTTPS.")] = "",
    tls_key: Annotated[str, typer.Option("--tls-key", metavar="PATH", help="Key of the certificate (PEM).")] = "",
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="Declare that only your own TLS proxy can reach this address.")
    ] = False,
    names: Annotated[
        Optional[list[str]],
        typer.Option("--name", metavar="NAME", help="Host name under which the proxy is reached (repeatable)."),
    ] = None,
    state_file: StateFile = None,
    config: ConfigFile = None,
) -> None:
    """Serve the web page and the HTTP API of this scheduler; prints the address and how to sign in."""
    code = ctx.obj["web"](port=port, host=host, tls_cert=tls_cert, tls_key=tls_key, behind_proxy=behind_proxy,
                 names=tuple(names or ()), **which(state_file, config))  # fmt: skip
    raise typer.Exit(code)


@app.command("demo")
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder with logs and state.")] = False,
) -> None:
    """Run the example jobs and show what happens; on a machine without GPUs, two GPUs are simulated."""
    from scheduler.cli.demo import demo as run

    raise typer.Exit(run(keep=keep))


@app.command("help")
def help_of(
    ctx: typer.Context,
    verb: Annotated[
        Optional[str], typer.Argument(metavar="[VERB]", help="A verb.", autocompletion=completions.verbs)
    ] = None,
) -> None:
    """Show the help of gpujob or of one verb."""
    outer = ctx.find_root()
    if verb is None:
        print(outer.get_help())
        return
    name, command, _ = outer.command.resolve_command(outer, [verb])  # type: ignore[attr-defined]
    with command.make_context(name, [], parent=outer, resilient_parsing=True) as inner:
        print(command.get_help(inner))


@app.command("version")
def version_of() -> None:
    """Print the version."""
    print(f"gpujob {__version__}")


def run(words: list[str], interfaces: Mapping[str, Callable[..., int]] = MappingProxyType({})) -> int:
    """Run the command line and return the exit code. Raises Typer's own errors for a wrong command line.

    ``interfaces``: functions of the verbs that other packages implement (`ts`, `track`, `web`), by verb.
    """
    command = _declared(words)
    if charset() == "ascii":  # Click treats an ASCII stdout as a misconfiguration and writes UTF-8
        for one in (command, *command.commands.values()):
            one.get_help = _in_ascii(one.get_help)
    try:
        code = command.main(args=words, prog_name="gpujob", standalone_mode=False, obj=interfaces)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # Click turns a closed pipe into exit code 1
            raise end.__context__ from None
        raise
    return code if isinstance(code, int) else 0


@functools.cache
def all_verbs() -> Any:
    """Return the Click command with all verbs, built once."""
    return typer.main.get_command(app)


def _declared(words: list[str]) -> Any:
    """Return the Click command for ``words``. Usually the command has only one verb, the first of ``words``.

    The reason is that building all verbs takes longer than most verbs run. `help` needs all verbs, because it describes
    other verbs.
    """
    if all_verbs.cache_info().currsize:
        return all_verbs()
    one = [command for command in app.registered_commands if words and command.name == words[0] != "help"]
    meant = copy.copy(app)
    if one:
        meant.registered_commands, meant.registered_groups = one, []
    return typer.main.get_command(meant)


def _in_ascii(get_help: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda ctx: shown(get_help(ctx))


def usage_text(error: Exception) -> str | None:
    """Return one line of text for a usage error of Typer or Click; None for any other error.

    An unknown option gets our own text: the texts of Typer and Click differ from version to version.
    """
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "gpujob"
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and isinstance(option, str):
        known = [name for param in ctx.command.params for name in (*param.opts, *param.secondary_opts)] if ctx else []
        text = f"no option {option}{did_you_mean(option, [*known, '--help'])}"
    else:
        text = " ".join(str(message()).split()).rstrip(".")
    return f"{text}{'' if text.endswith('?') else ';'} see {path} --help"
