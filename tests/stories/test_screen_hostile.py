"""Screen mode in unusual environments: odd folders, removed folders, large environments, payloads."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.stories.test_payloads import DO, PAYLOADS, SEES, no_mark, saw


@pytest.mark.parametrize("folder", ["a b'\"$HOME;%n^C ä\\x", "y" * 200 + "/" + "z" * 150], ids=["odd", "long"])
def test_the_folder_name_may_have_any_characters(screens, tmp_path, folder):
    """A scheduler's folder may have blanks, quotes, characters that screenrc expands, or a path of 350 characters."""
    place = tmp_path / folder
    place.mkdir(parents=True)
    s = screens(gpus=1, folder=place)
    s.script_of("work", "echo mine; exit 3")
    s.append("0,work")
    s.start()
    s.wait_ended(1)
    assert s.job(1)["exit_code"] == 3, s.job(1)
    s.wait_no_session()  # screen, which writes the log, may end after the job
    assert s.log(1) == "mine\n"


def test_removed_folders_are_created_again(screens):
    """If folders of a running scheduler are removed, it creates them again, and the next job runs."""
    s = screens(gpus=1, assign_retry_wait="0.2")
    s.append(s.line("a"))
    s.start()
    s.wait_ended(1)
    s.wait_no_session()
    house = s.folder / ".gpujob"
    subprocess.run(
        ["rm", "-r", str(house / "attempts"), str(house / "sessions"), str(s.folder / "gpu_scheduler_logs")], check=True
    )
    s.append(s.line("b", code=4))
    s.wait_ended(2)
    assert s.job(2)["exit_code"] == 4 and s.starts("b") == 1


def test_a_job_in_a_session_gets_a_large_and_odd_environment(screens):
    """A job gets an environment of 300 KB with values that are not UTF-8, without HOME, locale or a known TERM."""
    s = screens(gpus=1)
    s.script_of("work", 'echo ${#A} ${#B} "$LANG" "$HOME"; printf %s "$ODD" | od -An -tx1; echo ä')
    s.append("0,work")
    for name in ("HOME", "LANG", "LC_ALL", "TERM"):
        s.environ.pop(name, None)
    s.environ["ODD"] = os.fsdecode(b"\xff\n%n$X")
    s.start(A="a" * 100_000, B="b" * 100_000, C="c" * 100_000, TERM="no-such-terminal")
    s.wait_state(1, "done")
    s.wait_no_session()
    assert s.log(1) == "100000 100000  \n ff 0a 25 6e 24 58\nä\n"


def test_s12_payloads_reach_a_job_in_a_session_unchanged(screens):
    """S12, S11: A job in a session gets the exact bytes of its arguments: neither a shell nor screen expands them."""
    s = screens(gpus=1, cpu_slots=4)
    script = s.folder / "sees.sh"
    script.write_text(SEES.format(folder=s.folder))
    script.chmod(0o755)
    s.start()
    s.cli("submit", "--cpu", "--env", f"PAYLOAD=;{DO}`{DO}`$({DO})", "--", str(script), *PAYLOADS)
    s.wait_ended(1)
    assert s.job(1)["state"] == "done" and saw(s) == {1: [os.fsencode(text) for text in PAYLOADS]}
    no_mark(s)
