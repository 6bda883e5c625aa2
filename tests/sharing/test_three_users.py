"""Schedulers of three real users on one machine: no GPU is given away twice, whatever is killed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sharing.conftest import Person, most_of_a_gpu
from tests.stories.harness import wait_for

NEEDS = ("0.25", "0.5", "0.5", "1", "2", "4")
LIMIT_S = 600.0
HELD = "#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.05; done\n"


def test_two_users_meet_on_one_gpu(people: list[Person]) -> None:
    one, two, _ = people
    one.start("--gpus", "1")
    two.start("--gpus", "1")
    one.append(one.line("first", 3.0, "1"))
    wait_for(lambda: "1 running" in one.gpujob("status")[1], "the first job")
    two.append(two.line("second", 0.0, "0.5"))
    wait_for(lambda: "booked-outside" in two.gpujob("why", "1")[1], "the reason")
    told = two.gpujob("why", "1")[1]
    assert f"GPU 0 is booked by user {one.user.name}" in told, told
    status = two.gpujob("status")[1]
    assert "FOREIGN" in status and f"booked by user {one.user.name}" in status, status
    who = two.gpujob("who")[1]
    assert one.user.name in who and "first" not in who, "no command of another user is shown"
    wait_for(lambda: len(two.ledger()) == 1, "the second job", 30.0)
    assert most_of_a_gpu(people) == 1.0


def test_bookings_outlive_a_killed_scheduler(people: list[Person]) -> None:
    one, two, _ = people
    one.start("--gpus", "1")
    one.append(one.line("first", 2.0, "1"))
    wait_for(lambda: "1 running" in one.gpujob("status")[1], "the first job")
    one.kill()
    two.start("--gpus", "1")
    two.append(two.line("second", 0.0, "1"))
    wait_for(lambda: "booked-outside" in two.gpujob("why", "1")[1], "the reason")
    wait_for(lambda: len(two.ledger()) == 1, "the second job", 30.0)
    assert most_of_a_gpu(people) == 1.0 and len(one.ledger()) == 1


def test_nobody_sees_or_changes_what_belongs_to_another_user(people: list[Person]) -> None:
    """The bookings of a user name no command, and no other user can change them, nor see or change the jobs."""
    one, two, _ = people
    one.start("--gpus", "1")
    one.folder.chmod(0o755)
    one.append(one.line("secret-word", 3.0, "1"))
    wait_for(lambda: "1 running" in one.gpujob("status")[1], "the job")
    for words in ("status", "show 1", "why 1", "logs 1", "cancel 1", "hold 1", "edit 1 --label x", "pause 0", "reset"):
        code, told = two.user.gpujob(one.folder, *words.split(), GPUJOB_BOOKINGS_FOLDER=str(one.bookings))
        assert code == 1 and "secret-word" not in told and f"belongs to user {one.user.name}" in told, (words, told)
    for words in ("status", "who", "report --by user"):
        code, told = two.gpujob(*words.split())
        assert "secret-word" not in told and "job.sh" not in told and str(one.folder) not in told, (words, told)
    [file] = one.bookings.iterdir()
    text = file.read_bytes()
    assert b"secret-word" not in text and b"job.sh" not in text and os.fsencode(one.folder) not in text
    assert two.user.can(file.read_bytes)
    assert not two.user.can(lambda: os.close(os.open(file, os.O_WRONLY)))
    assert not two.user.can(file.unlink) and not two.user.can(lambda: file.rename(file.with_name("x")))
    wait_for(lambda: len(one.ledger()) == 1, "the end of the job", 30.0)


@contextlib.contextmanager
def on_a_small_disk(person: Person, image: Path) -> Iterator[None]:
    """Mount a small disk in place of the user's folder, with the same files."""
    files = {path.name: path.read_bytes() for path in person.folder.iterdir()}
    found = person.folder.stat()
    with image.open("wb") as stream:
        stream.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    words = ["mount", "-o", "loop,errors=remount-ro", image, person.folder]
    done = subprocess.run(words, capture_output=True)
    if done.returncode:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs the right to mount: {done.stderr!r}")
    try:
        person.folder.chmod(0o700)
        for name, data in files.items():
            (person.folder / name).write_bytes(data)
            (person.folder / name).chmod(0o700)
        for path in (person.folder, *person.folder.iterdir()):
            os.chown(path, found.st_uid, found.st_gid)
        yield
    finally:
        subprocess.run(["umount", "-l", person.folder], check=True)


@pytest.mark.parametrize("killed", [False, True], ids=["scheduler lives", "scheduler killed"])
@pytest.mark.parametrize("fault", ["full", "read-only", "gone"])
def test_the_folder_of_a_neighbour_fails(people: list[Person], tmp_path: Path, fault: str, killed: bool) -> None:
    """A running job keeps its GPU whatever happens to the folder of its scheduler, and other users are not disturbed."""
    one, two, _ = people
    gate = one.bookings / "gate"  # in a folder that all users may read
    with on_a_small_disk(one, tmp_path / "image"):
        script = one.folder / "job.sh"
        script.write_text(HELD.format(gate=gate))
        one.start("--gpus", "1")
        one.append("0,job.sh,,first;gpus=1")
        wait_for(lambda: "1 running" in one.gpujob("status")[1], "the first job")
        if fault == "full":
            with contextlib.suppress(OSError), (one.folder / "filler").open("wb") as stream:
                while True:
                    stream.write(bytes(4096))
                    stream.flush()
        elif fault == "read-only":
            subprocess.run(["mount", "-o", "remount,abort", one.folder], capture_output=True)
        else:
            for path in one.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if killed:
            one.kill()
        two.start("--gpus", "1")
        two.append(two.line("second", 0.0, "0.5"))
        wait_for(lambda: "booked-outside" in two.gpujob("why", "1")[1], "the reason")
        assert f"GPU 0 is booked by user {one.user.name}" in two.gpujob("why", "1")[1]
        assert not two.ledger()
        gate.touch()
        wait_for(lambda: len(two.ledger()) == 1, "the second job", 30.0)
        one.daemons.pop().end()


@pytest.mark.parametrize("jobs", [120, pytest.param(1000, marks=pytest.mark.long)])
def test_no_gpu_is_given_away_twice_while_schedulers_are_killed(people: list[Person], jobs: int) -> None:
    """P1: Jobs of three users, random starts and SIGKILLs of their schedulers: no job is lost, and none runs twice."""
    dice = random.Random(jobs)
    for person in people:
        person.start()
    for number in range(jobs):
        person = dice.choice(people)
        person.append(person.line(f"k{number}", dice.choice((0.0, 0.02, 0.1)), dice.choice(NEEDS)))
    end = time.monotonic() + LIMIT_S
    kills = 0
    while any(len(person.ledger()) < len(person.keys) for person in people):
        assert time.monotonic() < end, [(len(person.ledger()), len(person.keys)) for person in people]
        time.sleep(dice.uniform(0.2, 1.5))
        person = dice.choice(people)
        person.kill()
        kills += 1
        person.start()
    for person in people:
        ran = [key for key, *_ in person.ledger()]
        assert sorted(ran) == sorted(person.keys)
        wait_for(lambda person=person: f"{len(person.keys)} done" in person.gpujob("status")[1], "all jobs done")  # type: ignore[misc]
    most = most_of_a_gpu(people)
    print(f"{jobs} jobs, {kills} SIGKILLs, at most {most:g} of a GPU at once")
    assert most <= 1.0
    assert kills > 3
