"""Files that another user could write are not read; tested with real users."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.stories.harness import wait_for
from tests.stories.people import FILES, ROOT_ONLY, START, TAKEN, User, belongs, write

pytestmark = ROOT_ONLY


def start(me: User, folder: Path, *words: str, **environ: str) -> str:
    """Run a `start` that always fails, because its main log cannot be opened; return the error line.

    All other files are checked before the main log. If the scheduler refuses one of them, the error line is about that
    file.
    """
    code, said = me.gpujob(folder, *START, *words, **environ)
    assert (code, said.count("\n")) == (1, 1), said
    return said


@pytest.mark.parametrize("name", FILES)
def test_c37_s13_files_that_another_could_write_are_refused(users: tuple[User, User], place: Path, name: str) -> None:
    """C37, S13, P9: Config, jobs file and model table that others could write are refused; the error names the fix."""
    me, other = users
    shared = me.groups[0]
    path = place / name
    for mode, group, owner, says in (
        (0o644, -1, me, ""),
        (0o600, -1, me, ""),
        (0o666, -1, me, f"all users may write to it: chmod o-w {path}"),
        (0o646, -1, me, f"all users may write to it: chmod o-w {path}"),
        (0o664, -1, me, ""),  # a group without other members
        (0o664, shared, me, f"its group may write to it: chmod g-w {path}"),
        (0o644, shared, me, ""),
        (0o644, -1, other, f"it belongs to user {other.uid}: make yourself its owner (chown): {path}"),
        (0o644, -1, User("root", 0, 0), ""),
    ):
        write(path, owner, mode, group)
        said = start(me, place)
        assert said.startswith(f"gpujob: {path}: not read: {says}") if says else TAKEN in said, said
    write(path, me, 0o664, shared)
    assert TAKEN in start(me, place, GPUJOB_SET_TRUST_GROUP="true")


@pytest.mark.parametrize("name", FILES)
def test_s13_folders_and_links_that_others_could_change_are_refused(
    users: tuple[User, User], place: Path, name: str
) -> None:
    """S13, C37: A file is refused if another user owns its folder or can replace files in its folder.

    If the path is a link to the file, the same holds for the folder of the link. The file is also refused if another
    user owns the link.
    """
    me, other = users
    inside = place / "in"
    inside.mkdir()
    belongs(inside, me, 0o755)
    write(inside / name, me)
    assert TAKEN in start(me, inside)
    for mode, group, says in (
        (0o777, -1, "all users may write to it: chmod o-w"),
        (0o775, me.groups[0], "its group may write to it: chmod g-w"),
    ):
        belongs(inside, me, mode, group)
        said = start(me, inside)
        assert f"its folder is not safe: {says} {inside}" in said, said
    belongs(inside, me, 0o1777)  # sticky: others may add files, not replace this one
    assert TAKEN in start(me, inside)
    belongs(inside, me, 0o755)
    links = place / "links"
    links.mkdir()
    belongs(links, me, 0o755)
    link = links / name
    link.symlink_to(inside / name)
    belongs(link, me)
    assert TAKEN in start(me, links)
    belongs(links, me, 0o777)
    assert f"its folder is not safe: all users may write to it: chmod o-w {links}" in start(me, links)
    belongs(links, me, 0o755)
    belongs(link, other)
    assert f"the link {link} belongs to user {other.uid}" in start(me, links)
    belongs(link, me)
    belongs(inside, other, 0o755)
    assert f"its folder is not safe: it belongs to user {other.uid}" in start(me, links)
    write(place / name, other)
    link.unlink()
    link.symlink_to(place / name)
    belongs(link, me)
    assert f"it belongs to user {other.uid}" in start(me, links)


def test_s13_trust_group_in_a_group_writable_config_is_ignored(users: tuple[User, User], place: Path) -> None:
    """S13: `trust_group: true` has no effect in a config file that the group may write.

    Only the option --trust-group or the variable GPUJOB_SET_TRUST_GROUP makes the scheduler trust such a file.
    """
    me, other = users
    path = write(place / "config.yaml", me, 0o664, me.groups[0])

    def slip_in() -> None:
        with path.open("a") as stream:
            stream.write("trust_group: true\npython: /tmp/theirs\n")

    assert other.do(slip_in) == 0 and "theirs" in path.read_text()
    said = start(me, place)
    assert f"chmod g-w {path} (or set GPUJOB_SET_TRUST_GROUP=true, or start with --trust-group true)" in said
    assert me.gpujob(place, "config", "check")[0] == 1
    code, said = me.gpujob(place, "status")
    assert code == 0 and said.count("continuing with default settings") == 1
    assert TAKEN in start(me, place, "--trust-group", "true")


def test_s13_a_file_that_an_access_list_lets_others_write_is_refused(users: tuple[User, User], place: Path) -> None:
    """S13: A file whose access list lets another user write to it is refused."""
    me, other = users
    path = write(place / "config.yaml", me)
    entries = [(1, 6, -1), (2, 6, other.uid), (4, 4, -1), (16, 6, -1), (32, 4, -1)]
    packed = b"\2\0\0\0" + b"".join(
        tag.to_bytes(2, "little") + perm.to_bytes(2, "little") + (who & 0xFFFFFFFF).to_bytes(4, "little")
        for tag, perm, who in entries
    )
    try:
        os.setxattr(path, "system.posix_acl_access", packed)
    except OSError as error:
        pytest.skip(f"no access lists on this file system: {error.strerror}")
    assert other.do(lambda: path.open("a").write("# theirs\n") and 0) == 0
    said = start(me, place)
    assert f"its access list may let other users write to it: setfacl -b {path}" in said


def test_an_unreadable_config_fails_start_and_no_other_verb(users: tuple[User, User], place: Path) -> None:
    """P3: `start` fails with exit code 2 for an unreadable config; other verbs continue."""
    me, other = users
    path = write(place / "config.yaml", other, 0o600)
    code, said = me.gpujob(place, "start")
    assert (code, said) == (2, f"gpujob: {path}: cannot be read: Permission denied\n")
    assert me.gpujob(place, "status")[0] == 0


@pytest.mark.parametrize("cleaned", ["moved", "mended after the move", "edited", "moved while nobody looks"])
def test_p9_s13_c37_a_line_of_another_user_never_runs(scheduler, cleaned: str) -> None:
    """P9, S13, C37: If others may write to a jobs file, a line that another user appends to this file never runs.

    This holds even if the owner later edits the file, moves it away or makes it private.
    """
    with tempfile.TemporaryDirectory(prefix="gj-owners-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        s = scheduler(gpus=1, folder=folder)
        s.append(s.line("a"))
        s.start()
        s.wait_ended(1)
        if cleaned == "moved while nobody looks":
            s.kill()
        s.jobs_file.chmod(0o666)
        line = f"echo '{s.line('PWNED')}' >> jobs.txt"
        subprocess.run(["/bin/sh", "-c", line], cwd=folder, user=65534, group=65534, extra_groups=[], check=True)
        old = folder / "jobs $(touch PWNED).bad"
        if cleaned != "moved while nobody looks":
            wait_for(lambda: f"{s.jobs_file}: not read: all users may write to it" in s.said(), "the refusal")
        if cleaned == "edited":
            subprocess.run(["sed", "-i", "/PWNED/d", s.jobs_file], check=True)
        else:
            s.jobs_file.rename(old)
            s.jobs_file.touch(0o600)
        if cleaned == "mended after the move":
            old.chmod(0o600)
        s.jobs_file.chmod(0o600)
        s.append(s.line("c"))
        if cleaned == "moved while nobody looks":
            s.start()
        s.wait_ended(2)
        assert [s.starts(key) for key in ("a", "PWNED", "c")] == [1, 0, 1] and len(s.states()) == 2

        def told_of() -> list[str]:
            return [text for text in s.said().splitlines() if "unread lines" in text and " ignored" in text]

        told = wait_for(told_of, "the note on the lines left out")  # it is printed after the commit
        assert len(told) == 1, s.said()
        what = {
            "edited": f"{s.jobs_file}: the unread lines of the deleted file are ignored: other users could write to it",
            "mended after the move": f"{old}: its unread lines are ignored: ",
        }.get(
            cleaned,
            f"all users may write to it; chmod o-w '{old}', then copy the lines that you need into {s.jobs_file}",
        )
        assert what in told[0]
        s.end_all()
