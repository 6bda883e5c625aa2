"""Settings of a real scheduler: precedence, changes while it runs, and mistakes."""

from __future__ import annotations

import json
import os

import pytest

from tests.stories.harness import wait_for
from tests.stories.machine import machine

__all__ = ["machine"]

STAYS = "; the previous settings stay in force"


def edit(path, text):
    """Replace the file at ``path`` atomically, as an editor does."""
    aside = path.with_name("aside")
    aside.write_text(text)
    aside.chmod(0o600)
    aside.replace(path)


def said(s, text, times=1):
    return wait_for(lambda: s.said().count(text) >= times, f"{text!r} in\n{s.said()}")


def set_gpus(s, config, before, after, times=1):
    """Change the number of GPUs in the config; wait until the output has ``times`` reports of this change."""
    edit(config, f"gpus: {after}\n")
    said(s, f"gpus {before} -> {after}", times)


def records(s, word):
    """Return the messages of the main log that contain ``word``, without time and level."""
    return [
        line.split(" ", 3)[-1] for line in (s.folder / "gpu_scheduler.log").read_text().splitlines() if word in line
    ]


# -- precedence -------------------------------------------------------------------------------------------


def test_s3_1_flag_over_environment_over_file_over_default(scheduler):
    """S3.1, contract 2: An option overrides a variable, a variable the config file, and the file the default.

    `config show` names the origin of the value.
    """
    s = scheduler()
    config, origin = s.folder / "config.yaml", {}
    for number, (words, environ, text, cuda) in enumerate(
        (
            ((), {}, "", ["--cuda", "1"]),
            ((), {}, "# mine\ncuda_ids: local\n", ["--cuda", "0"]),
            ((), {"GPUJOB_SET_CUDA_IDS": "none"}, "# mine\ncuda_ids: local\n", []),
            (("--cuda-ids", "unset"), {"GPUJOB_SET_CUDA_IDS": "none"}, "# mine\ncuda_ids: local\n", ["--cuda", "1"]),
        ),
        1,
    ):
        config.write_text(text)
        s.start(*words, **environ)
        s.append(s.line(f"a{number}", gpus="1"))
        s.wait_state(number, "done")
        command = s.job(number)["command"]
        assert command[command.index("0.0") + 1 :] == cuda
        shown = json.loads(s.cli("config", "show", "--json").stdout)["settings"]["cuda_ids"]
        origin[number] = shown["running"]["origin"]
        assert s.stop() == 0
    assert origin == {1: "default", 2: f"{config}:2", 3: "GPUJOB_SET_CUDA_IDS", 4: "command line"}


def test_config_show_shows_differences_to_the_running_scheduler(scheduler):
    """Contract 2, 6: `config show` shows the values that the next `start` would use.

    If the running scheduler uses a different value of a setting, `config show` shows both values.
    """
    s = scheduler()
    config = s.folder / "config.yaml"
    config.write_text("order: fifo\nkill_grace: 3\n")
    s.start("--mem-threshold", "0.7")
    lines = {line.partition(":")[0]: line for line in s.cli("config", "show").stdout.splitlines()}
    assert lines["mem_threshold"].endswith("# the running scheduler uses 0.7 (command line)")
    assert lines["gpus"].endswith("# the running scheduler uses 2 (command line)")
    assert lines["kill_grace"] == "kill_grace: 3"
    edit(config, "kill_grace: 4\norder: short\n")
    said(s, "config reloaded: kill_grace 3 -> 4; order needs a restart of the scheduler")

    def settings():
        return json.loads(s.cli("config", "show", "--json").stdout)["settings"]

    new = {"value": 4, "origin": f"{config}:1"}
    wait_for(lambda: settings()["kill_grace"]["running"] == new, "the settings, which are stored after the message")
    shown = settings()
    assert shown["order"]["value"] == "short" and shown["order"]["running"] == {
        "value": "fifo",
        "origin": f"{config}:1",
    }
    s.stop()
    assert "running scheduler" not in s.cli("config", "show").stdout


# -- changes while it runs --------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_changed_threshold_applies_to_the_running_scheduler(machine):
    """Contract 2: If a setting is changed in the config file, the running scheduler uses the new value."""
    m = machine().cards("GPU-a")
    m.s.folder.joinpath("config.yaml").write_text("mem_threshold: 0.3\n")
    m.use("GPU-a", m.foreign_process(), 30_000)
    m.s.start()
    m.add("a", need="0.1")
    m.waits(1, "foreign")
    edit(m.s.folder / "config.yaml", "mem_threshold: 0.9\n")
    m.running("a")
    wait_for(lambda: records(m.s, "config reloaded"), "the record, which is written at the end of the pass")
    assert records(m.s, "config reloaded") == ["config reloaded: mem_threshold 0.3 -> 0.9"]


def test_s2_6_gpus_can_be_added_and_removed_at_run_time(scheduler):
    """S2.6: GPUs can be added and removed at run time; a job on a removed GPU continues, no new job starts there."""
    s = scheduler(None)
    config = s.folder / "config.yaml"
    config.write_text("gpus: 1\n")
    for key in "abc":
        s.hold(key)
    s.append(s.line("a"), s.line("b"), s.line("d", gpus="1"))
    s.start()
    s.wait_state(1, "running")
    wait_for(lambda: [line["reason"] for line in s.status()["refused"]], "the third is refused")
    assert s.states()[2] == "pending" and "GPU 1 is not managed here" in s.status()["refused"][0]["reason"]
    edit(config, "gpus: 2\n")
    s.wait_state(2, "running")
    said(s, "gpus 1 -> 2")
    wait_for(lambda: s.states().get(3) == "pending", "what was refused is a job now")
    assert [(gpu["index"], gpu["jobs"]) for gpu in s.status()["gpus"]] == [(0, [1]), (1, [2])]
    s.cli("cancel", "3")
    set_gpus(s, config, 2, 1)
    s.append(s.line("c"))
    wait_for(lambda: s.states().get(4) == "pending", "it waits")
    assert [(gpu["index"], gpu["jobs"]) for gpu in s.status()["gpus"]] == [(0, [1])] and s.states()[2] == "running"
    s.release("b")
    s.wait_state(2, "done")
    assert s.job(4)["reason_code"] == "no-room"
    s.release("a")
    s.wait_state(4, "running")
    assert s.job(4)["gpus"] == [0]


def test_s2_6_a_gpu_that_is_removed_and_added_again_is_still_paused(scheduler):
    """S2.6: If a paused GPU is removed and added again, it is still paused.

    This holds even if another GPU was paused and the scheduler was restarted in the meantime. A removed GPU can be
    resumed by `resume` or by an edit of the state file.
    """
    s = scheduler(None)
    config = s.folder / "config.yaml"
    config.write_text("gpus: 2\n")
    s.start()
    s.cli("pause", "1")
    set_gpus(s, config, 2, 1)
    assert "paused now: 0,1" in s.cli("pause", "0").stdout
    assert s.cli("status", "--json").stdout.count('"PAUSED"') == 1
    state_file = s.folder / "gpu_scheduler_state.json"
    wait_for(lambda: json.loads(state_file.read_text())["paused_gpus"] == [0, 1], "the file shows both")
    s.stop()
    before = json.loads(state_file.read_text())["revision"]
    s.start()
    wait_for(lambda: json.loads(state_file.read_text())["revision"] > before, "the next one's picture")
    set_gpus(s, config, 1, 2)
    wait_for(lambda: [gpu["paused"] for gpu in s.status()["gpus"]] == [True, True], "both are paused")
    set_gpus(s, config, 2, 1, 2)
    assert "GPU 1 resumed (paused now: 0)" in s.cli("resume", "1").stdout, "for when it is given back"
    assert "GPU 1 is not managed here" in s.cli("pause", "1", code=6).stderr
    set_gpus(s, config, 1, 2, 2)
    s.cli("pause", "1")
    set_gpus(s, config, 2, 1, 3)
    # An edit of a version from before the pause would count as older than the pause.
    wait_for(lambda: json.loads(state_file.read_text())["paused_gpus"] == [0, 1], "the file shows the pause")
    document = json.loads(state_file.read_text())
    state_file.write_text(json.dumps({**document, "paused_gpus": [0]}))
    wait_for(lambda: "GPU 1 resumed by an edit of the state file" in s.said(), "one that is away is resumed as well")


def test_c31_submit_add_edit_use_the_last_valid_model_table(scheduler):
    """C31: If the model table is broken, `submit`, `add` and `edit` use the last valid table of the running scheduler.

    While no scheduler runs, `submit` fails.
    """
    s = scheduler(gpus=1)
    table = s.folder / "llm_config.json"
    table.write_text('{"models": {"small": 0.25}}')
    s.start()
    s.cli("pause", "0")
    edit(table, '{"models": {"small": 0.5}, "odd": 1}')
    said(s, "the previous model table stays in force")
    (s.folder / "x.py").touch()
    verbs = (
        ["submit", "--", "x.py", "--llm", "small"],
        ["add", "x.py", "--args", "--llm small"],
        ["edit", "1", "--gpus", ""],
    )
    for verb in verbs:
        told = s.cli(*verb)
        assert (
            f"{table}:1: unknown key 'odd'" in told.stderr and "the previous model table stays in force" in told.stderr
        )
    wait_for(lambda: len(s.states()) == 2, "both are queued")
    assert [s.job(number)["need"] for number in (1, 2)] == [0.25, 0.25]
    broken = table.read_text()
    table.unlink()
    told = s.cli("submit", "--", "x.py", "--llm", "small")
    assert "no such model table; the previous model table stays in force" in told.stderr and s.job(3)["need"] == 0.25
    edit(table, broken)
    s.kill()
    assert f"{table}:1: unknown key 'odd'" in s.cli("submit", "--", "x.py", "--llm", "small", code=2).stderr


def test_a_start_applies_a_changed_model_table_to_waiting_jobs(scheduler):
    """S3.13: A model table that changed while no scheduler ran applies to waiting jobs at the next start."""
    s = scheduler(gpus=1)
    table = s.folder / "llm_config.json"
    table.write_text('{"models": {"small": 1}}')
    s.start()
    s.cli("pause", "0")
    s.append(s.line("a", more="--llm small"))
    wait_for(lambda: s.states().get(1) == "pending", "it waits")
    s.kill()
    edit(table, '{"models": {"small": 0.25}}')
    s.start()
    assert s.job(1)["need"] == 0.25


@pytest.mark.smoke
def test_c31_a_changed_model_table_applies_to_waiting_jobs_and_a_broken_one_does_not(scheduler):
    """C31, S3.13: A changed table applies to waiting jobs; a broken, removed or unsafe table changes nothing."""
    s = scheduler(gpus=1)
    table = s.folder / "llm_config.json"
    table.write_text('{"models": {"small": 1.0}}')
    for key in ("a", "b", "c"):
        s.hold(key)
    s.append(s.line("a") + ";gpus=0.5", s.line("b", more="--llm small"))
    s.start()
    s.wait_state(1, "running")
    assert s.states()[2] == "pending"
    edit(table, '{"models": {"smal": 0.25, "small": -1}, "model": {}}')
    said(
        s,
        f"{table}:1: unknown key 'model'; did you mean models?; and 1 more mistake; the previous model table stays in force",
    )
    edit(table, '{"models": {"small": 0.25}')
    said(s, f"{table}:1:27: not JSON: Expecting ',' delimiter; the previous model table stays")
    table.unlink()
    said(s, f"{table}: no such model table; the previous model table stays")
    assert s.job(2)["need"] == 1 and s.states()[2] == "pending"
    edit(table, '{"models": {"small": 0.25}}')
    s.wait_state(2, "running")
    table.chmod(0o666)
    table.write_text('{"models": {"small": 0}}')
    said(s, f"{table}: not read: all users may write to it: chmod o-w {table}; the previous model table stays")
    s.append(s.line("c", more="--llm small"))
    s.wait_state(3, "running")
    assert s.job(3)["need"] == 0.25
    s.says("the previous model table stays in force", times=4)


def test_config_changes_and_mistakes_are_logged_once(scheduler):
    """P3, C37: Each change of the config is logged once; a broken, removed or unsafe config changes no setting."""
    s = scheduler(gpus=1, monitor_interval=0.2)
    config = s.folder / "config.yaml"
    config.write_text("kill_grace: 3\nmonitor_interval: 9\n")
    s.start(GPUJOB_SET_OOM_RETRIES="1")
    edit(config, "kill_grace: 4\noom_retries: 7\nmonitor_interval: 8\n")  # variable and flag still take precedence
    said(s, "config reloaded")
    edit(config, "kill_graze: 4\n")
    said(s, f"{config}:1: unknown key 'kill_graze'; did you mean kill_grace?{STAYS}")
    os.utime(config)
    edit(config, "kill_grace: 4\nkill_graze: 4\n")
    said(s, f"{config}:2: unknown key 'kill_graze'; did you mean kill_grace?{STAYS}")
    config.unlink()
    said(s, f"{config}: the config file was deleted{STAYS}")
    edit(config, "kill_grace: 4\n")
    said(s, "config reloaded: no setting has changed")
    config.chmod(0o666)
    said(s, f"{config}: not read: all users may write to it: chmod o-w {config}{STAYS}")
    config.write_text("kill_grace: 5\n")
    config.chmod(0o600)
    said(s, "config reloaded: kill_grace 4 -> 5")
    edit(config, "order: short\naging: 1\nmem_threshold: 80%\n")  # in one step: an empty config is valid, too
    said(s, "config reloaded: kill_grace 5 -> 15; order, aging need a restart of the scheduler")
    edit(config, "gpu_interval: 0\norder: short\naging: 1\n")
    said(s, "config reloaded: gpu_interval needs a restart of the scheduler")
    wait_for(lambda: len(records(s, "config reloaded")) == 5, "the last one is in the main log too")
    assert records(s, "config reloaded")[0] == "config reloaded: kill_grace 3 -> 4" and len(records(s, STAYS)) == 4


# -- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "kill_graze: 3\n",
        "mem_threshold: 8\ngpus: 2\ngpus: 2\n",
        "a: [1\n",
        "state_file: gpu_scheduler_state.json\nx: 1\n",
    ],
)
def test_verbs_work_with_a_broken_config(scheduler, text):
    """P3: With a broken config, `start` fails. Other verbs name the mistake and continue without the config."""
    s = scheduler()
    s.hold("a")
    s.append(s.line("a", gpus="0"), s.line("b", gpus="0"))
    s.start()
    s.wait_state(1, "running")
    config = s.folder / "config.yaml"
    config.write_text(text)
    for words in (
        ("status",), ("jobs",), ("show", "1"), ("why", "2"), ("logs", "1"), ("pause", "1"), ("resume", "1"), ("cancel", "2"),
        ("queue", "pause"), ("queue", "resume"), ("add", str(s.script), "--output-file", "-"), ("submit", "--cpu", "--", "true"),
        ("screens",), ("retry", "2"),
    ):  # fmt: skip
        done = s.cli(*words)
        trouble = [line for line in done.stderr.splitlines() if "config.yaml" in line]
        assert len(trouble) == 1 and "continuing with default settings" in trouble[0], done.stderr
    s.stop()
    done = s.cli("pause", "1")
    assert done.stderr.count("config.yaml") == 1 and "no scheduler is running" in done.stderr
    refused = s.cli("start", code=2).stderr.splitlines()
    assert len(refused) == (2 if "gpus" in text else 1) and all(
        line.startswith(f"gpujob: {config}:") for line in refused
    )


def test_verbs_fail_with_a_broken_config_that_names_another_state_file(scheduler):
    """P3: A verb fails if the config sets `state_file` but cannot be parsed.

    Without the value of `state_file`, the verb could act on the wrong scheduler. With --state-file the verb works.
    """
    s = scheduler()
    s.start()
    (s.folder / "config.yaml").write_text("state_file: /elsewhere/state.json\na: [1\n")
    done = s.cli("cancel", "1", code=2)
    assert done.stderr.count("\n") == 1 and "--state-file" in done.stderr
    s.cli("--state-file", "gpu_scheduler_state.json", "status")


def test_gpus_and_gpu_ids_must_agree(scheduler):
    """Contract 4: --gpus and --gpu-ids must agree; `--gpus 0` is allowed, and logged."""
    s = scheduler(gpus=None)
    done = s.cli("start", "--gpus", "2", "--gpu-ids", "0", code=2)
    assert done.stderr == "gpujob: --gpus 2 and --gpu-ids 0 contradict each other; leave one of them out\n"
    (s.folder / "config.yaml").write_text("gpus: 8\n")
    s.start("--gpu-ids", "0,2", "--gpus=2")
    assert [gpu["index"] for gpu in s.status()["gpus"]] == [0, 2]
    s.stop()
    s.start("--gpus", "0")
    said(s, "no GPU is managed (gpus: 0): only jobs that need no GPU can start")
    s.append(s.line("a") + ";gpus=0", s.line("b"))
    assert s.wait_ended(1) == {1: "done"}
    said(s, "jobs.txt:2: ")
