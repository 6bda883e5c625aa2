"""Computes the states that a disk may have after a power cut, from the recorded operations on a folder.

By the strictest reading of POSIX, data is durable only after a sync of its file, and a name only after a sync of the
folder that contains it. Any part of the unsynced operations may have reached the disk, in any order. A write may be
torn at multiples of 512 bytes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.breaking.tracing import Call, bytes_of, calls, unhex

CALLS = (
    "openat,write,pwrite64,ftruncate,rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,rmdir,fsync,fdatasync,mmap"
)  # fmt: skip
SECTOR, PAGE = 512, 4096
ROOT = 0
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_OPENED = re.compile(r"<((?:\\.|[^>\\])*)>")


@dataclass(frozen=True, slots=True)
class Op:
    """A change of the data of a file, or of a name in a folder.

    ``name``: the changed name; empty for a change of data. ``child``: the name's new inode; None: the name is removed.
    """

    inode: int  # the inode of the file or folder
    name: str = ""
    child: int | None = None
    offset: int = 0  # -1: the file is truncated to ``size``
    data: bytes = b""
    size: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in the recording: just before a sync, just after a sync, or the writing of a line of output.

    ``done``, ``syncs``: how many operations and how many syncs happened before this moment. ``told``: the label of the
    file to which the line was written (`Recording.read` gets the labels). ``words``: the words of the line. If no line
    was written, ``told`` and ``words`` are empty.
    """

    done: int
    syncs: int
    told: str = ""
    words: tuple[str, ...] = ()


@dataclass(slots=True)
class Recording:
    """All operations below ``root``.

    ``synced[n]`` says which sync made operation n durable: 1 is the first sync. None: no sync made it durable.
    """

    root: Path
    ops: list[Op] = field(default_factory=list)
    synced: list[int | None] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)  # names of files with a shared writable mapping
    folders: set[int] = field(default_factory=lambda: {ROOT})
    syncs: int = 0
    _names: dict[str, int] = field(default_factory=lambda: {"": ROOT})
    _sizes: dict[int, int] = field(default_factory=dict)
    _next: int = 1

    def read(self, log: Path, ignored: Iterable[str], seen: dict[str, str]) -> Recording:
        """Read a log of strace (-f -y -xx); return self.

        ``ignored``: names in ``root`` that are no part of the recorded disk. ``seen``: name of an output file → label
        of this file. A line written to such a file is recorded as a moment with this label (`Moment.told`), and not as
        an operation.
        """
        skip = frozenset(ignored)
        for call in calls(log):
            if not call.failed:
                self._take(call, skip, seen)
        return self

    # -- reading a recording ------------------------------------------------------------------------------

    def _inside(self, path: str, skip: frozenset[str]) -> str | None:
        root = f"{self.root}/"
        if path == str(self.root):
            return ""
        inside = path[len(root) :] if path.startswith(root) else None
        return None if inside is None or inside.split("/")[0] in skip or inside.endswith("-shm") else inside

    def _take(self, call: Call, skip: frozenset[str], seen: dict[str, str]) -> None:
        strings = [match[1] for match in _STRING.finditer(call.args)]
        if call.name in ("write", "pwrite64"):
            name = Path(call.fd_path).name
            if name in seen and call.fd_path.startswith(f"{self.root}/"):
                for line in bytes_of(strings[0]).decode(errors="replace").splitlines():
                    self.moments.append(Moment(len(self.ops), self.syncs, seen[name], tuple(line.split())))
                return
            inside = self._inside(call.fd_path, skip)
            if inside in self._names:
                data = bytes_of(strings[0])[: call.result]
                inode = self._names[inside]
                end = self._sizes[inode]
                offset = int(call.args.rsplit(", ", 1)[1]) if call.name == "pwrite64" else end
                self._do(Op(inode, offset=offset, data=data))
                self._sizes[inode] = max(end, offset + len(data))
        elif call.name == "ftruncate":
            inside = self._inside(call.fd_path, skip)
            if inside in self._names:
                self._cut(self._names[inside], int(call.args.rsplit(", ", 1)[1]))
        elif call.name == "mmap":
            if (
                "MAP_SHARED" in call.args
                and "PROT_WRITE" in call.args
                and (found := re.search(r"\d+<([^>]*)>", call.args))
            ):
                self.shared.add(Path(unhex(found[1])).name)
        elif call.name in ("fsync", "fdatasync"):
            inside = self._inside(call.fd_path, skip)
            if inside in self._names:
                self._sync(self._names[inside])
        elif call.name == "openat":
            found = _OPENED.search(call.more)
            inside = self._inside(unhex(found[1]), skip) if found else None
            if inside is not None and "O_CREAT" in call.args and inside not in self._names:
                self._sizes[self._next] = 0
                self._enter(inside, self._new())
            elif inside in self._names and "O_TRUNC" in call.args:
                self._cut(self._names[inside], 0)
        else:
            self._rename(call, [self._inside(self._whole(unhex(text)), skip) for text in strings])

    def _whole(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.root}/{path}"

    def _rename(self, call: Call, names: list[str | None]) -> None:
        first = names[0]
        if first is None:
            return
        if call.name.startswith("mkdir"):
            inode = self._new()
            self.folders.add(inode)
            self._enter(first, inode)
        elif call.name in ("unlink", "unlinkat", "rmdir"):
            if first in self._names:
                self._enter(first, None)
        elif len(names) > 1 and (second := names[1]) is not None:
            inode = self._names[first]
            if call.name.startswith("link"):
                self._enter(second, inode)
            elif "RENAME_EXCHANGE" in call.args:
                other = self._names[second]
                self._enter(second, inode)
                self._enter(first, other)
            else:
                self._enter(second, inode)
                self._enter(first, None)

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def _enter(self, inside: str, child: int | None) -> None:
        folder, _, name = inside.rpartition("/")
        self._do(Op(self._names[folder], name, child))
        if child is None:
            del self._names[inside]
        else:
            self._names[inside] = child

    def _cut(self, inode: int, size: int) -> None:
        self._do(Op(inode, offset=-1, size=size))
        self._sizes[inode] = size

    def _do(self, op: Op) -> None:
        self.ops.append(op)
        self.synced.append(None)

    def _sync(self, inode: int) -> None:
        self.moments.append(Moment(len(self.ops), self.syncs))
        self.syncs += 1
        for number, op in enumerate(self.ops):
            if op.inode == inode and self.synced[number] is None:
                self.synced[number] = self.syncs
        self.moments.append(Moment(len(self.ops), self.syncs))

    def describe(self, state: State) -> str:
        """Return a description of a state, for messages."""
        names = {inode: name for name, inode in self._names.items()}

        def words(number: int) -> str:
            op = self.ops[number]
            place = names.get(op.inode, f"#{op.inode}")
            return f"{number} {place}/{op.name}" if op.name else f"{number} {place}[{op.offset}:+{len(op.data)}]"

        gone = sorted(state.dropped)
        shown = ", ".join(words(n) for n in gone[:4] + gone[4:][-4:])
        torn = f", {words(state.torn[0])} torn to {state.torn[1]}:{state.torn[2]}" if state.torn[0] >= 0 else ""
        told = [" ".join((m.told, *m.words)) for m in self.moments if m.told and m.done <= state.moment.done]
        where = f"after {state.moment.done} operations, {state.moment.syncs} syncs"
        return f"{state.kind} {where} ({told[-1] if told else 'nothing told'}), {len(gone)} dropped ({shown}){torn}"

    # -- possible states ----------------------------------------------------------------------------------

    def unsure(self, moment: Moment) -> list[int]:
        """Return the indices (in ``ops``) of the operations that are not durable at this moment.

        These operations happened before the moment, but no sync before the moment made them durable.
        """
        return [n for n in range(moment.done) if (sync := self.synced[n]) is None or sync > moment.syncs]

    def tree(self, kept: Iterable[Op]) -> dict[str, bytes | None]:
        """Return the files that these operations create on an empty disk: path → contents (None: a folder)."""
        data: dict[int, bytearray] = {}
        entries: dict[int, dict[str, int]] = {}
        for op in kept:
            if op.name:
                names = entries.setdefault(op.inode, {})
                if op.child is None:
                    names.pop(op.name, None)
                else:
                    names[op.name] = op.child
                continue
            held = data.setdefault(op.inode, bytearray())
            if op.offset < 0:
                held[:] = held[: op.size].ljust(op.size, b"\0")
            else:
                held.extend(bytes(max(0, op.offset - len(held))))
                held[op.offset : op.offset + len(op.data)] = op.data
        found: dict[str, bytes | None] = {}

        def walk(folder: int, above: str) -> None:
            for name, inode in entries.get(folder, {}).items():
                path = f"{above}{name}"
                if inode in self.folders:
                    found[path] = None
                    walk(inode, f"{path}/")
                else:
                    found[path] = bytes(data.get(inode, b""))

        walk(ROOT, "")
        return found


@dataclass(frozen=True, slots=True)
class State:
    """A possible state of the disk. It has all operations before ``moment``, except the operations in ``dropped``.

    ``torn``: (n, low, high): only the bytes from low to high of the data of operation n have reached the disk. n is -1
    if no write is torn. ``kind``: how the state was chosen.
    """

    moment: Moment
    dropped: frozenset[int]
    torn: tuple[int, int, int] = (-1, 0, 0)
    kind: str = ""

    def ops(self, recording: Recording) -> Iterator[Op]:
        """Yield the operations that reached the disk, in their order."""
        number, low, high = self.torn
        for n in range(self.moment.done):
            if n == number:
                op = recording.ops[n]
                yield Op(op.inode, offset=op.offset + low, data=op.data[low:high])
            elif n not in self.dropped:
                yield recording.ops[n]


def states(recording: Recording, most: int, seed: int) -> list[State]:
    """Return up to ``most`` different states.

    Two states of each moment come first. In one of them, all operations that are not synced at this moment have reached
    the disk; in the other, none of them has. The order of all other states is random and depends on ``seed``.
    """
    dice = random.Random(seed)
    sure: list[State] = []
    drawn: list[State] = []
    for moment in _distinct(recording.moments):
        unsure = recording.unsure(moment)
        sure.append(State(moment, frozenset(unsure), kind="none of the unsynced"))
        sure.append(State(moment, frozenset(), kind="all"))
        drawn += [State(moment, frozenset({n}), kind="one dropped") for n in unsure]
        drawn += [State(moment, frozenset(unsure[n:]), kind="a prefix") for n in range(1, len(unsure))]
        drawn += [State(moment, frozenset(unsure) - {n}, kind="one kept") for n in unsure]
        for n in unsure:
            size = len(recording.ops[n].data)
            for step in (SECTOR, PAGE):
                for at in range(step, min(size, 4 * step), step):
                    drawn.append(State(moment, frozenset(), (n, 0, at), "torn"))
                    drawn.append(State(moment, frozenset(unsure) - {n}, (n, at, size), "torn"))
        for _ in range(len(unsure)):
            part = frozenset(n for n in unsure if dice.random() < 0.5)
            drawn.append(State(moment, part, kind="any part"))
    dice.shuffle(drawn)
    return _different(recording, [*sure, *drawn], most, dice)


def _distinct(moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments without repetition: of all moments with equal ``done`` and ``syncs``, only the last one.

    Such moments have the same possible disk states.
    """
    last: dict[tuple[int, int], Moment] = {}
    for moment in moments:
        last[moment.done, moment.syncs] = moment
    return list(last.values())


def _different(recording: Recording, wanted: Sequence[State], most: int, dice: random.Random) -> list[State]:
    known: set[tuple[int, frozenset[int], tuple[int, int, int]]] = set()
    out: list[State] = []
    sure = [state for state in wanted if state.kind in ("none of the unsynced", "all")]
    if len(sure) > most:  # the short form: half of the states are of these kinds
        wanted = [*dice.sample(sure, most // 2), *(state for state in wanted if state not in sure)]
    for state in wanted:
        key = (state.moment.done, state.dropped, state.torn)
        if key not in known and len(out) < most:
            known.add(key)
            out.append(state)
    return out
