"""`{gpus}` and `{share}` in commands: a job runs with the values, and the store keeps the command as written."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.stories.harness import Scheduler, wait_for
from tests.stories.spooler import Spooler

SAY = 'printf "%s|" "$@"; echo "$CUDA_VISIBLE_DEVICES|$GPUJOB_SHARE"'


def test_placeholders_of_submitted_commands_are_filled(scheduler: Callable[..., Scheduler]) -> None:
    s = scheduler(gpus=2).start()
    words = ["--d={gpus}", "{share}", "${gpus}", "{{gpus}}", "{print $1}", '{"a": {}}']
    s.cli("submit", "--gpus", "0.5", "--allowed", "1", "--wait", "--", "sh", "-c", SAY, "sh", *words)
    assert s.log(1).splitlines()[-1] == '--d=1|0.5|${gpus}|{gpus}|{print $1}|{"a": {}}|1|0.5'
    s.cli("submit", "--gpus", "2", "--cuda", "local", "--wait", "--", "sh", "-c", "echo [{gpus}] [{share}]")
    assert s.log(2).splitlines()[-1] == "[0,1] [1]"
    s.cli("submit", "--cpu", "--wait", "--", "sh", "-c", "echo [{gpus}] [{share}]")
    assert s.log(3).splitlines()[-1] == "[] [0]"
    job = s.job(1)
    assert job["command"][1:] == ["-c", SAY, "sh", "--d=1", "0.5", "${gpus}", "{gpus}", *words[4:]]
    assert job["arguments"] == ["sh", "-c", SAY, "sh", *words]
    shown = s.cli("show", "1").stdout
    assert "--d=1" in shown and "as written" in shown and "--d={gpus}" in shown
    s.cli("submit", "--cpu", "--wait", "--", "echo", "{}")
    assert "as written" not in s.cli("show", "4").stdout
    assert "{gpus}" in s.cli("jobs").stdout and "[0,1]" not in s.cli("jobs").stdout


def test_placeholders_are_filled_in_a_commands_file_and_not_for_scripts(scheduler: Callable[..., Scheduler]) -> None:
    s = scheduler(gpus=2, commands_file="commands.txt")
    out = s.folder / "out.txt"
    script = s.folder / "say.py"
    script.write_text(f"import sys\nopen({str(s.folder / 'script.txt')!r}, 'w').write(' '.join(sys.argv[1:]))\n")
    (s.folder / "commands.txt").write_text(f"echo {{gpus}} {{share}} $CUDA_VISIBLE_DEVICES > {out}\n")
    s.append(f"0,{script},,--d {{gpus}},1")
    s.start()
    s.wait_ended(2)
    gpus, share, visible = out.read_text().split()
    assert gpus == visible in ("0", "1") and share == "1"
    assert (s.folder / "script.txt").read_text() == "--d {gpus} --cuda 1"


def test_placeholders_of_a_retry_have_the_new_gpu(scheduler: Callable[..., Scheduler]) -> None:
    s = scheduler(gpus=2).start()
    s.cli("pause", "1")
    s.cli("submit", "--gpus", "1", "--wait", "--", "sh", "-c", "echo on {gpus}; exit 3", code=3)
    assert "on 0" in s.log(1) and "on 0" in s.job(1)["command"][2]
    s.cli("resume", "1")
    s.cli("pause", "0")
    s.cli("queue", "pause")
    s.cli("retry", "1")
    waiting = json.loads(s.cli("show", "1", "--json").stdout)
    assert waiting["state"] == "pending" and waiting["command"][2] == "echo on {gpus}; exit 3"
    s.cli("queue", "resume")
    wait_for(lambda: s.rows("SELECT 1 FROM jobs WHERE id=1 AND attempt=2 AND state='failed'"), "the second attempt")
    assert "on 1" in s.log(1) and "on 1" in s.job(1)["command"][2]
    assert s.job(1)["arguments"][2] == "echo on {gpus}; exit 3"


def test_placeholders_in_ts_jobs_are_not_replaced(spooler: Callable[..., Spooler]) -> None:
    """`ts`, like the original `ts`, does not replace `{gpus}` in commands."""
    s = spooler()
    s.add("sh", "-c", "echo '{gpus} {{share}}'")
    assert s.ended(0) == 0
    assert s.run("-c", "0").stdout == "{gpus} {{share}}\n"
