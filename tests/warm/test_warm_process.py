"""Tests of commands that run in forks of the warm process: results, inherited properties, signals, and failures."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.warm import client
from tests.stories.harness import alive, stopped, wait_for
from tests.warm.conftest import Caller

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# An --info-command that ends when the file `go` exists, or when the folder of a test that killed its parent is removed.
STAYS = "echo $PPID > began; while [ -e began ] && [ ! -e go ]; do sleep 0.01; done; echo ended"


def forked(caller: Caller, **more: Any) -> bool:
    """Run a command of this caller, and return whether it ran in a fork of the warm process."""
    return bool(seen(caller, **more)["forked"])


def seen(caller: Caller, **more: Any) -> dict[str, Any]:
    """Run `submit` with an info command that writes facts about its process to a file. Return these facts."""
    ran = caller.run("submit", "--info-command", caller.probe, "--", "true", **more)
    assert ran.returncode == 0, ran
    found: dict[str, Any] = json.loads((caller.folder / "WORLD").read_text())
    return found


# -- the same results ---------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_first_command_starts_the_warm_process_and_the_next_one_uses_it(caller: Caller) -> None:
    caller.warm()
    assert forked(caller)
    assert not forked(caller, env={**caller.environ, "GPUJOB_WARM": "0"})


@pytest.mark.parametrize(
    "words",
    [
        ["status"], ["jobs", "--json"], ["why", "1"], ["why", "99"], ["show", "1", "--json"], ["--help"], ["start", "--help"], ["config", "show"], ["config", "check"],
        ["stauts"], ["submit"], ["logs", "1"], ["report", "--csv"], ["ts", "-h"], ["track", "status"], ["screens"], ["wait", "99"], ["attach", "1"],
        ["start", "--gpus", "x"], ["web", "--port", "x"], ["--version"], [],
    ],
)  # fmt: skip
def test_a_forked_command_prints_and_returns_the_same_as_an_ordinary_one(shared: Caller, words: list[str]) -> None:
    one, other = shared.run(*words), shared.ordinary(*words)
    assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)


@pytest.mark.parametrize("words", [["wait", "1"], ["logs", "-f", "1"], ["status", "--watch"], ["submit", "-f", "true"]])
def test_a_command_run_again_outside_its_fork_prints_its_notes_once(shared: Caller, words: list[str]) -> None:
    """Some commands run first in a fork and then again in the process of the caller. They print each note only once.

    The note in this test is that of an unreadable file.
    """
    folder = shared.folder / "unreadable"
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("a: [")
    if not (folder / "gpu_scheduler_state.json").exists():
        shared.run("submit", "true", cwd=folder)
    with (folder / "errors").open("wb") as errors:
        process = shared.begin(*words, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
    if words[0] in ("status", "submit"):  # they go on until Ctrl-C
        wait_for(lambda: "no scheduler is running" in (folder / "errors").read_text(), "the note")
        process.send_signal(signal.SIGINT)
    process.wait(60)
    notes = (folder / "errors").read_text().splitlines()
    assert "continuing with default settings" in notes[0]
    assert len(set(notes)) == len(notes)


@pytest.mark.parametrize(
    "words", [["submit", "-f", "--info-command", "echo once >> ran", "true"], ["ts", "-f", "true"]]
)
def test_a_command_run_again_outside_its_fork_runs_its_info_command_once(caller: Caller, words: list[str]) -> None:
    caller.warm()
    caller.run("ts", "true")  # starts the server; to start it, `ts` leaves the fork at its beginning
    ran = caller.folder / "ran"
    ran.unlink(missing_ok=True)
    process = caller.begin(*words, env={**caller.environ, "TS_ENV": "echo once >> ran"})
    assert process.stdout is not None
    if words[0] == "submit":
        process.stdout.readline()  # the job's id
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert ran.read_text() == "once\n"


def test_completions_come_from_the_warm_process(shared: Caller) -> None:
    environ = {**shared.environ, "_GPUJOB_COMPLETE": "complete_bash", "COMP_WORDS": "gpujob\nsta", "COMP_CWORD": "1"}
    assert shared.run(env=environ).stdout == shared.ordinary(env=environ).stdout != b""


def test_s4_2_a_command_imports_only_the_client_before_its_fork(caller: Caller) -> None:
    """S4.2: Before a command runs in a fork, the caller's process has imported only the client, and no slow module."""
    caller.environ["PYTHONPROFILEIMPORTTIME"] = "1"
    caller.run("submit", "--", "true")
    caller.run("ts", "true")
    wait_for(caller.servers, "a warm process")
    for words in (["status"], ["submit", "--", "true"], ["ts", "-l"], ["--help"]):
        imported = [line.rpartition("|")[2].strip() for line in caller.run(*words).stderr.decode().splitlines()]
        last = imported.index("scheduler.entrypoint")
        assert [name for name in imported[:last] if "scheduler" in name] == [
            "scheduler",
            "scheduler.warm",
            "scheduler.warm.client",
        ]
        assert not {"re", "enum", "typing", "socket", "signal"} & set(imported[:last])
        assert not [name for name in imported[last + 1 :] if name.startswith("scheduler.")], f"imported by {words}"


# -- the caller's world -------------------------------------------------------------------------------------


def _low_limits() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _one_cpu() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _signals() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})


WORLDS: dict[str, Callable[[], object]] = {
    "unchanged": lambda: None,
    "umask": lambda: os.umask(0o027),
    "limits": _low_limits,
    "nice": lambda: os.nice(5),
    "cpus": _one_cpu,
    "signals": _signals,
    "folder": lambda: os.chdir("other"),
}


@pytest.mark.parametrize("world", WORLDS)
def test_a_forked_command_has_the_process_properties_of_its_caller(shared: Caller, world: str) -> None:
    """A fork has the properties of its caller's process.

    These are the umask, limits, nice value, CPUs, signals, folder, environment and descriptors.
    """
    (shared.folder / "other").mkdir(exist_ok=True)
    environ = {**shared.environ, "SECRET": "an\udcffy\nthing", "EMPTY": "", "TZ": "Asia/Tokyo"}
    here = {"env": environ, "preexec_fn": WORLDS[world]}
    one = seen(shared, **here)
    other = seen(shared, **{**here, "env": {**environ, "GPUJOB_WARM": "0"}})
    assert (one["forked"], other["forked"]) == (True, False)
    assert one["world"] == other["world"]


def test_a_forked_command_shows_times_in_the_time_zone_of_its_caller(shared: Caller) -> None:
    for zone in ("Asia/Tokyo", "America/New_York"):
        environ = {**shared.environ, "TZ": zone}
        assert shared.run("show", "1", env=environ).stdout == shared.ordinary("show", "1", env=environ).stdout


def test_the_warm_process_keeps_no_descriptors_or_variables_of_its_first_caller(caller: Caller) -> None:
    """The warm process keeps no lock and no environment variable of the caller that started it.

    A lock would stay held, and a variable may contain a secret.
    """
    lock = caller.folder / "lock"
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        os.set_inheritable(stream.fileno(), True)
        caller.run("--version", pass_fds=[stream.fileno()], env={**caller.environ, "SECRET": "secret"})
        (pid,) = wait_for(caller.servers, "a warm process")
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert b"SECRET" not in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize("change", [{"LC_ALL": "C"}, {"PYTHONUTF8": "1"}, {"LD_BIND_NOW": "1"}])
def test_callers_with_other_startup_variables_get_another_warm_process(caller: Caller, change: dict[str, str]) -> None:
    caller.warm()
    environ = {**caller.environ, **change}
    assert not forked(caller, env=environ)
    wait_for(lambda: len(caller.servers()) == 2, "a second warm process")
    assert forked(caller, env=environ) and forked(caller)


# -- signals and ends ---------------------------------------------------------------------------------------


@pytest.fixture
def staying(caller: Caller) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a `submit` that runs in a fork and waits for its --info-command.

    The --info-command ends when the file `go` exists.
    """
    ignored = [number for number in ENDING if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:  # set if the tests run under nohup or in the background; the command would inherit it
        signal.signal(number, signal.SIG_DFL)
    caller.warm()
    with (caller.folder / "errors").open("wb") as errors:
        process = caller.begin(
            "submit", "--info-command", STAYS, "--", "true",
            stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
        )  # fmt: skip
    began = caller.folder / "began"
    wait_for(lambda: began.exists() and began.read_text(), "the info command")
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    yield process
    (caller.folder / "go").touch()
    process.wait(60)


def errors_of(caller: Caller) -> str:
    """Return what the `submit` of the fixture `staying` has printed on stderr."""
    return (caller.folder / "errors").read_text()


def command_of(caller: Caller) -> int:
    """Return the pid of the fork that runs the `submit` of the fixture `staying`."""
    return int((caller.folder / "began").read_text())


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_to_the_caller_ends_the_forked_command(
    caller: Caller, staying: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    pid = command_of(caller)
    assert pid != staying.pid
    staying.send_signal(number)
    assert staying.wait(60) == -number
    assert not alive(pid)


def test_ctrl_c_ends_a_forked_command_with_130(caller: Caller, staying: subprocess.Popen[bytes]) -> None:
    os.killpg(staying.pid, signal.SIGINT)
    assert staying.wait(60) == 130
    assert errors_of(caller) == ""


def test_a_killed_caller_leaves_no_forked_command_running(caller: Caller, staying: subprocess.Popen[bytes]) -> None:
    pid = command_of(caller)
    staying.kill()
    wait_for(lambda: not alive(pid), "the end of the command")
    assert forked(caller)


def test_ctrl_z_stops_a_forked_command_and_fg_continues_it(caller: Caller, staying: subprocess.Popen[bytes]) -> None:
    pid = command_of(caller)
    staying.send_signal(signal.SIGTSTP)
    wait_for(lambda: stopped(staying.pid) and stopped(pid), "both stopped")
    staying.send_signal(signal.SIGCONT)
    wait_for(lambda: not stopped(staying.pid) and not stopped(pid), "both continue")
    (caller.folder / "go").touch()
    assert staying.wait(60) == 0


def test_a_killed_forked_command_ends_its_caller_with_the_same_signal(
    caller: Caller, staying: subprocess.Popen[bytes]
) -> None:
    os.kill(command_of(caller), signal.SIGKILL)
    assert staying.wait(60) == -signal.SIGKILL


def test_a_killed_warm_process_is_reported_and_the_next_command_runs(
    caller: Caller, staying: subprocess.Popen[bytes]
) -> None:
    """If the warm process is killed, the command in its fork fails with an error that refers to `gpujob status`.

    The next command runs without a warm process, and starts a new one.
    """
    (server,) = caller.servers()
    pid = command_of(caller)
    os.kill(server, signal.SIGKILL)
    assert staying.wait(60) == 1
    assert (
        errors_of(caller)
        == "gpujob: the process of this command was killed; look at gpujob status before you repeat it\n"
    )
    wait_for(lambda: not alive(pid), "the end of the command")
    assert caller.run("status").returncode == 0
    wait_for(caller.servers, "another warm process")
    assert forked(caller)


def test_a_closed_stdout_of_a_forked_command_is_no_error(caller: Caller) -> None:
    caller.warm()
    read, write = os.pipe()
    os.close(read)
    ran = caller.run("--help", stdout=write)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (0, b"")


# -- doubtful cases -----------------------------------------------------------------------------------------


def test_a_stopped_warm_process_does_not_delay_commands(caller: Caller) -> None:
    server = caller.warm()
    os.kill(server, signal.SIGSTOP)
    wait_for(lambda: stopped(server), "a stop")
    patient, caller.command = caller.command, caller.plain
    assert not forked(caller)
    caller.command = patient
    os.kill(server, signal.SIGCONT)
    wait_for(lambda: forked(caller), "forked again")


@pytest.fixture
def copied(caller: Caller) -> Path:
    """Let the caller use a copy of the program. Return the package folder of this copy."""
    found = shutil.copytree(Path(caller.environ["PYTHONPATH"], "scheduler"), caller.folder / "lib" / "scheduler")
    caller.environ["PYTHONPATH"] = str(found.parent)
    return found


def test_a_changed_program_gets_a_new_warm_process(
    copied: Path, caller: Caller, staying: subprocess.Popen[bytes]
) -> None:
    """If a file of the program changes, new commands run the changed program. Running commands continue."""
    (before,) = caller.servers()
    init = copied / "__init__.py"
    init.write_text(init.read_text().replace("__version__ = ", "__version__ = 'new' + "))
    assert b"new" in caller.run("--version").stdout
    wait_for(lambda: caller.servers() and caller.servers() != [before], "a new warm process")
    assert b"new" in caller.run("--version").stdout
    assert alive(before) and staying.poll() is None
    (caller.folder / "go").touch()
    assert staying.wait(60) == 0
    wait_for(lambda: not alive(before), "the end of the old one")


def test_a_runtime_folder_that_other_users_can_enter_is_not_used(caller: Caller) -> None:
    caller.warm()
    (caller.runtime / "gpujob").chmod(0o755)
    assert not forked(caller)
    (caller.runtime / "gpujob").chmod(0o700)
    assert forked(caller)


def test_an_invalid_answer_on_the_socket_does_not_delay_a_command(caller: Caller) -> None:
    """If another process answers on the socket with invalid data, the command runs without the warm process."""
    os.kill(caller.warm(), signal.SIGKILL)
    caller.command = caller.plain
    (path,) = [path for path in (caller.runtime / "gpujob").iterdir() if path.suffix == ""]
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        process = caller.begin("--version")
        asked, _ = listener.accept()
        asked.sendall(b"?????")
        out, _ = process.communicate(timeout=60)
        asked.close()
    assert process.returncode == 0 and out.startswith(b"gpujob ")


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff\xff", b"\0\0\0\1x", b"\0\0\0\4abcd", b"GET / HTTP/1.1\r\n\r\n"])
def test_the_warm_process_survives_invalid_requests(caller: Caller, data: bytes) -> None:
    server = caller.warm()
    (path,) = [path for path in (caller.runtime / "gpujob").iterdir() if path.suffix == ""]
    made = client.connect(str(path))
    assert made is not None
    made.sendall(data)
    made.close()
    wait_for(lambda: forked(caller), "a forked command")
    assert caller.servers() == [server]


def test_a_command_with_a_descriptor_path_argument_runs_without_a_fork(caller: Caller) -> None:
    """A command with an argument such as ``<(…)`` does not run in a fork: the fork would not have the descriptor."""
    caller.warm()
    (caller.folder / "other.yaml").write_text("nonsense: 1\n")
    with (caller.folder / "other.yaml").open() as stream:
        fd = stream.fileno()
        ran = caller.run("--config", f"/dev/fd/{fd}", "config", "check", pass_fds=[fd])
    assert b"nonsense" in ran.stderr + ran.stdout and ran.returncode == 2


def test_an_idle_warm_process_ends_and_removes_its_socket(caller: Caller) -> None:
    caller.warm()
    caller.end()
    program = (
        "import sys; from scheduler.warm import server; from scheduler import command_line;"
        " server.IDLE_S = server.LOOK_S = 0.2; sys.argv = ['gpujob', 'warm-process']; command_line.run_process()"
    )
    environ = {
        name: value
        for name, value in caller.environ.items()
        if name.startswith(("PYTHON", "LC_", "LANG", "XDG", "PATH"))
    }
    process = subprocess.Popen([sys.executable, "-c", program], env=environ, cwd="/")
    assert process.wait(60) == 0
    assert not [path for path in (caller.runtime / "gpujob").iterdir() if path.suffix == ""]


def test_a_warm_process_whose_socket_was_removed_ends(caller: Caller) -> None:
    """The warm process ends when its runtime folder is removed.

    The system removes the runtime folder when the user's last session ends.
    """
    caller.warm()
    caller.end()
    program = (
        "import sys; from scheduler.warm import server; from scheduler import command_line;"
        " server.LOOK_S = 0.1; sys.argv = ['gpujob', 'warm-process']; command_line.run_process()"
    )
    environ = {
        name: value
        for name, value in caller.environ.items()
        if name.startswith(("PYTHON", "LC_", "LANG", "XDG", "PATH"))
    }
    process = subprocess.Popen([sys.executable, "-c", program], env=environ, cwd="/")
    wait_for(caller.servers, "it listens")
    shutil.rmtree(caller.runtime / "gpujob")
    assert process.wait(60) == 0


def test_a_job_starts_no_warm_process(caller: Caller) -> None:
    """A gpujob command that runs in a job starts no warm process.

    The warm process would outlive the job, and the GPU would stay allocated.
    """
    caller.run("--version", env={**caller.environ, "GPUJOB_ID": "1"})
    assert caller.servers() == [] and not (caller.runtime / "gpujob").exists()


def test_gpujob_warm_names_the_folder_of_the_warm_process(caller: Caller) -> None:
    """With GPUJOB_WARM=/FOLDER, commands use the warm process of this private folder."""
    folder = caller.runtime / "own"
    folder.mkdir(0o700)
    environ = {**caller.environ, "GPUJOB_WARM": str(folder)}
    caller.run("--version", env=environ)
    (path,) = wait_for(lambda: [path for path in folder.glob("warm-*") if path.is_socket()], "a warm process")
    try:
        assert not caller.servers() and forked(caller, env=environ)
    finally:
        made = client.connect(str(path))
        assert made is not None
        os.kill(client.peer_of(made)[0], signal.SIGKILL)
        made.close()
