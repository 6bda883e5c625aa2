"""Detects which watched files have changed, by inotify or by polling. It does not read the files."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Iterable

from scheduler.system.filesystems import FileSystem, file_system

IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE = 0x2, 0x4, 0x8
IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x40, 0x80, 0x100, 0x200
IN_DELETE_SELF, IN_MOVE_SELF, IN_IGNORED, IN_Q_OVERFLOW = 0x400, 0x800, 0x8000, 0x4000
_OF_FILE = IN_MODIFY | IN_CLOSE_WRITE | IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF
_OF_FOLDER = IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF
_HEAD = struct.Struct("iIII")
POLL_S = 1.0


class InotifyWatcher:
    """Watcher that uses inotify. It also detects that an editor replaced a file by a new version.

    The file itself is watched for writes. The folder of the file, and the folder of a link to the file, are watched
    only for names that appear or disappear. So writes to other files in a folder cause no events. The class does not
    use watchdog: without watchdog, a write is detected after 0.04 instead of 0.36 ms, and no extra thread is needed
    (docs/performance.md). Raises OSError if inotify cannot be used.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._files: dict[str, set[str]] = {}  # watched path → paths to report
        self._names: dict[str, dict[str, set[str]]] = {}  # watched folder → name in it → paths to report
        self._of: dict[int, str] = {}
        self._paths: list[str] = []
        self._folder = (
            "",
            "",
            -1,
        )  # a folder that is watched as a whole, the name in it that does not count, its watch

    def watch(self, paths: Iterable[str]) -> None:
        """Watch these files instead of the files of the last call."""
        self._paths = list(dict.fromkeys(paths))
        self.rearm()

    def watch_folder(self, path: str, but: str) -> None:
        """Report ``path`` when a file in this folder is written, created or removed, except the file ``but``.

        Replaces the folder of the last call; an empty path: no folder.
        """
        if self._folder[2] >= 0:
            self._libc.inotify_rm_watch(self.fd, self._folder[2])
        mask = IN_MODIFY | IN_CREATE | IN_DELETE | IN_MOVED_TO
        watch = self._libc.inotify_add_watch(self.fd, os.fsencode(path), mask) if path else -1
        self._folder = (path, but, watch)

    def rearm(self) -> None:
        """Renew the watches, so that they apply to the files and folders that are at the paths now.

        This is necessary after a file was renamed or a folder was created. For safety, the daemon also calls this
        method at regular intervals.
        """
        wanted: dict[str, tuple[int, set[str]]] = {}
        self._names = {}
        for path in self._paths:
            real = os.path.realpath(path)
            for place in {path, real}:
                folder, name = os.path.split(place)
                _, reports = wanted.setdefault(folder or "/", (_OF_FOLDER, set()))
                reports.add(path)
                self._names.setdefault(folder or "/", {}).setdefault(name, set()).add(path)
            if os.path.exists(real):
                wanted.setdefault(real, (_OF_FILE, set()))[1].add(path)
        current: dict[str, int] = {}
        for place, (mask, _) in wanted.items():
            watch = self._libc.inotify_add_watch(self.fd, os.fsencode(place), mask)
            if watch >= 0:
                self._of[watch] = place
                current[place] = watch
        for watch, place in list(self._of.items()):
            if current.get(place) != watch:  # replaced, moved away, or no longer to be watched
                self._libc.inotify_rm_watch(self.fd, watch)
                self._of.pop(watch, None)
        self._files = {place: names for place, (_, names) in wanted.items()}

    def changed(self) -> set[str]:
        """Return the watched paths that have changed since the last call."""
        found: set[str] = set()
        renew = False
        while True:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                break
            position = 0
            while position < len(data):
                watch, mask, _, length = _HEAD.unpack_from(data, position)
                name = os.fsdecode(data[position + _HEAD.size : position + _HEAD.size + length].rstrip(b"\0"))
                position += _HEAD.size + length
                if mask & IN_Q_OVERFLOW:
                    found.update(self._paths)
                    continue
                if watch == self._folder[2]:
                    if name != self._folder[1] and not mask & IN_IGNORED:
                        found.add(self._folder[0])
                    continue
                if mask & IN_IGNORED:
                    renew = renew or self._of.pop(watch, None) is not None
                    continue
                place = self._of.get(watch)
                if place is None:
                    continue
                reports = self._files.get(place, set())
                if name:
                    hit = self._names.get(place, {}).get(name, set())
                    found |= hit
                    renew = renew or bool(hit)
                else:
                    found |= reports
                    renew = renew or bool(mask & (IN_DELETE_SELF | IN_MOVE_SELF))
        if renew:
            self.rearm()
        return found

    def close(self) -> None:
        """Stop watching."""
        os.close(self.fd)


class PollingWatcher:
    """Watcher that polls every second with watchdog, for network folders or if no inotify instance is free."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if hasattr(os, "eventfd") else -1
        self._write = self.fd
        if self.fd < 0:
            self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._paths: list[str] = []
        self._found: set[str] = set()
        self._lock = threading.Lock()
        self._observer: object | None = None

    def watch(self, paths: Iterable[str]) -> None:
        """Watch these files instead of the files of the last call."""
        from watchdog.events import FileSystemEvent, FileSystemEventHandler
        from watchdog.observers.polling import PollingObserver

        self._stop()
        self._paths = list(dict.fromkeys(paths))
        watcher = self

        class Handler(FileSystemEventHandler):
            def on_any_event(self, event: FileSystemEvent) -> None:
                for place in (event.src_path, event.dest_path):
                    watcher._report(os.fsdecode(place) if place else "")

        observer = PollingObserver(timeout=POLL_S)
        for folder in self._folders():
            observer.schedule(Handler(), folder, recursive=False)
        observer.daemon = True
        observer.start()
        self._observer = observer

    def watch_folder(self, path: str, but: str) -> None:
        """Do nothing: the daemon looks into the folder of shared bookings at intervals."""

    def _report(self, place: str) -> None:
        hit = {path for path in self._paths if place in (path, os.path.realpath(path))}
        if not hit:
            return
        with self._lock:
            self._found |= hit
        try:
            os.write(self._write, b"\1\0\0\0\0\0\0\0")
        except BlockingIOError:
            return  # full: the descriptor is readable already

    def _folders(self) -> set[str]:
        """Return the existing folders of the watched paths. For a link, add the folder of the file behind the link."""
        places = {place for path in self._paths for place in (path, os.path.realpath(path))}
        return {folder for folder in map(os.path.dirname, places) if os.path.isdir(folder)}

    def rearm(self) -> None:
        """Begin to poll again if the polled folders are not exactly the existing folders of the watched paths.

        Example: watchdog stops polling when a folder is removed, and does not begin again when the folder is created.
        """
        emitters = self._observer.emitters if self._observer is not None else ()  # type: ignore[attr-defined]
        if {emitter.watch.path for emitter in emitters if emitter.is_alive()} != self._folders():
            self.watch(self._paths)

    def changed(self) -> set[str]:
        """Return the watched paths that have changed since the last call."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            return set()
        with self._lock:
            found, self._found = self._found, set()
        return found

    def _stop(self) -> None:
        observer = self._observer
        if observer is not None:
            observer.stop()  # type: ignore[attr-defined]
            observer.join(5)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Stop watching."""
        self._stop()
        os.close(self.fd)
        if self._write != self.fd:
            os.close(self._write)


def file_system_of(path: str) -> FileSystem | None:
    """Return the kind of file system that holds a path; None if the kind cannot be determined."""
    buffer = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).statfs(os.fsencode(path), buffer) != 0:
        return None
    return file_system(struct.unpack_from("q", buffer)[0])


def is_network_folder(path: str) -> bool:
    """Return whether the folder is on a shared file system such as NFS: inotify misses writes of other machines."""
    found = file_system_of(path)
    return found is not None and found.shared


def watcher(how: str, folders: Iterable[str]) -> tuple[InotifyWatcher | PollingWatcher, str]:
    """Return a watcher, and a note for the user that says why the watcher polls (empty for inotify).

    ``how``: the setting `watch` (auto, inotify or poll). Raises OSError if ``how`` is inotify and inotify cannot be
    used, or if ``how`` is auto and inotify fails with an unexpected error.
    """
    if how == "poll":
        return PollingWatcher(), "files are polled every second, because of the setting watch: poll"
    if how == "auto":
        remote = next((folder for folder in folders if is_network_folder(folder)), "")
        if remote:
            return PollingWatcher(), f"{remote} is on a network file system: its files are polled every second"
    try:
        return InotifyWatcher(), ""
    except OSError as error:
        if how == "inotify" or error.errno not in (errno.EMFILE, errno.ENOSPC, errno.ENOMEM, errno.ENOSYS):
            raise
        return PollingWatcher(), f"inotify is not available ({error.strerror}): files are polled every second"
