"""Files that another user could write are not read: with two real users, who try it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scheduler.faces import front

TAKEN = "the main log cannot be opened"  # what `start` says here when it has taken all files
pytestmark = pytest.mark.skipif(
    os.getuid() != 0 and not os.environ.get("CI"), reason="users are made by root (in CI: always)"
)


START = ("start", "--gpus", "1", "--log-file", "/no such folder/log")
FILES = {
    "config.yaml": "cuda_ids: local\n",
    "llm_config.json": '{"models": {"a": 0.5}}\n',
    "jobs.txt": "# none yet\n",
}


@dataclass
class User:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    def do(self, act: Callable[[], Any]) -> int:
        """Do it as this user, in a process of its own; its exit code."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        code = 99
        try:
            os.setgroups([self.gid, *self.groups])
            os.setresgid(self.gid, self.gid, self.gid)
            os.setresuid(self.uid, self.uid, self.uid)
            code = int(act() or 0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            raise
        finally:
            os._exit(code)

    def gpujob(self, folder: Path, *words: str, **environ: str) -> tuple[int, str]:
        """The command as this user, in this folder: exit code and all it says."""
        with tempfile.TemporaryFile() as out:

            def run() -> int:
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(PATH=os.defpath, HOME=str(folder), XDG_RUNTIME_DIR=str(folder), **environ)
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
                code = front.main(list(words))
                sys.stdout.flush()
                sys.stderr.flush()
                return code

            code = self.do(run)
            out.seek(0)
            return code, out.read().decode()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All modules are loaded before the user is changed: interpreter and checkout may be root's alone."""
    folder = tmp_path_factory.mktemp("loaded")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (START, ("start", "--gpus=x"), ("config", "check"), ("status",)):
            front.main(list(words))


@pytest.fixture(scope="module")
def users(loaded: None) -> Iterator[tuple[User, User]]:
    """Me and another one; both are in a third group."""
    names = [f"gj{os.getpid() % 100_000}{letter}" for letter in "abg"]
    made = []
    try:
        subprocess.run(["groupadd", names[2]], check=True)
        group = int(subprocess.check_output(["getent", "group", names[2]]).split(b":")[2])
        for name in names[:2]:
            subprocess.run(["useradd", "-M", "-U", "-G", names[2], name], check=True)
            uid, gid = (int(subprocess.check_output(["id", which, name])) for which in ("-u", "-g"))
            made.append(User(name, uid, gid, (group,)))
        yield made[0], made[1]
    finally:
        for user in made:
            subprocess.run(["userdel", user.name], check=True)
        subprocess.run(["groupdel", names[2]], check=False)


@pytest.fixture
def place(users: tuple[User, User]) -> Iterator[Path]:
    """A folder of the first user that everybody may look into."""
    me, _ = users
    folder = Path(tempfile.mkdtemp(prefix="gj-owners-", dir="/tmp"))
    os.chown(folder, me.uid, me.gid)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def belongs(path: Path, user: User, mode: int = 0o644, group: int = -1) -> Path:
    os.chown(path, user.uid, user.gid if group < 0 else group, follow_symlinks=False)
    if not path.is_symlink():
        path.chmod(mode)
    return path


def write(path: Path, user: User, mode: int = 0o644, group: int = -1) -> Path:
    path.write_text(FILES[path.name])
    return belongs(path, user, mode, group)


def start(me: User, folder: Path, *words: str, **environ: str) -> str:
    """What `start` says: it is refused, or it takes all files and then finds no place for its log. One line, exit 1."""
    code, said = me.gpujob(folder, *START, *words, **environ)
    assert (code, said.count("\n")) == (1, 1), said
    return said


@pytest.mark.parametrize("name", FILES)
def test_c37_s13_files_that_another_could_write_are_refused(users: tuple[User, User], place: Path, name: str) -> None:
    """C37, S13, P9: config, jobs file and model table alike; exit 1, one line, and the command that mends it."""
    me, other = users
    shared = me.groups[0]
    path = place / name
    for mode, group, owner, says in (
        (0o644, -1, me, ""),
        (0o600, -1, me, ""),
        (0o666, -1, me, f"everybody may write it: chmod o-w {path}"),
        (0o646, -1, me, f"everybody may write it: chmod o-w {path}"),
        (0o664, -1, me, ""),  # a group of one
        (0o664, shared, me, f"its group may write it: chmod g-w {path}"),
        (0o644, shared, me, ""),
        (0o644, -1, other, f"it belongs to user {other.uid}: chown it to yourself: {path}"),
        (0o644, -1, User("root", 0, 0), ""),
    ):
        write(path, owner, mode, group)
        said = start(me, place)
        assert said.startswith(f"gpujob: {path}: not read: {says}") if says else TAKEN in said, said
    write(path, me, 0o664, shared)
    assert TAKEN in start(me, place, GPUJOB_SET_TRUST_GROUP="true")


@pytest.mark.parametrize("name", FILES)
def test_s13_nor_may_their_folder_or_a_link_on_the_way_be_anothers(
    users: tuple[User, User], place: Path, name: str
) -> None:
    """S13, C37: the folder of the file, the folder of a link to it, the link itself."""
    me, other = users
    inside = place / "in"
    inside.mkdir()
    belongs(inside, me, 0o755)
    write(inside / name, me)
    assert TAKEN in start(me, inside)
    for mode, group, says in (
        (0o777, -1, "everybody may write it: chmod o-w"),
        (0o775, me.groups[0], "its group may write it: chmod g-w"),
    ):
        belongs(inside, me, mode, group)
        said = start(me, inside)
        assert f"of its folder, {says} {inside}" in said, said
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
    assert f"of its folder, everybody may write it: chmod o-w {links}" in start(me, links)
    belongs(links, me, 0o755)
    belongs(link, other)
    assert f"the link {link} belongs to user {other.uid}" in start(me, links)
    belongs(link, me)
    belongs(inside, other, 0o755)
    assert f"of its folder, it belongs to user {other.uid}" in start(me, links)
    write(place / name, other)
    link.unlink()
    link.symlink_to(place / name)
    belongs(link, me)
    assert f"it belongs to user {other.uid}" in start(me, links)


def test_s13_another_cannot_vouch_for_the_group(users: tuple[User, User], place: Path) -> None:
    """S13: whoever may write the config may write `trust_group: true` into it: of itself it is not believed."""
    me, other = users
    path = write(place / "config.yaml", me, 0o664, me.groups[0])

    def slip_in() -> None:
        with path.open("a") as stream:
            stream.write("trust_group: true\npython: /tmp/theirs\n")

    assert other.do(slip_in) == 0 and "theirs" in path.read_text()
    said = start(me, place)
    assert f"chmod g-w {path} (or GPUJOB_SET_TRUST_GROUP=true, or start --trust-group true)" in said
    assert me.gpujob(place, "config", "check")[0] == 1
    code, said = me.gpujob(place, "status")
    assert code == 0 and said.count("going on without") == 1
    assert TAKEN in start(me, place, "--trust-group", "true")


def test_s13_an_access_list_counts_as_a_group(users: tuple[User, User], place: Path) -> None:
    """S13: `setfacl -m u:b:rw` shows only as a group that may write."""
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
    assert f"its access list may let others write it: setfacl -b {path}" in said


def test_a_config_that_may_not_be_read_is_one_error(users: tuple[User, User], place: Path) -> None:
    """P3: exit 2; other verbs go on."""
    me, other = users
    path = write(place / "config.yaml", other, 0o600)
    code, said = me.gpujob(place, "start")
    assert (code, said) == (2, f"gpujob: {path}: cannot be read: Permission denied\n")
    assert me.gpujob(place, "status")[0] == 0
