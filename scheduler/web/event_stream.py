"""Server-sent events: one watcher thread looks for changes in the store and sends them to all open streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler.client.client import SchedulerClient
from scheduler.client.overview import News
from scheduler.core.errors import SchedulerError
from scheduler.core.secrets import without_secrets
from scheduler.system.terminal_text import safe
from scheduler.views.render import gpu_json, job_json
from scheduler.web.routes import Ask, NotNow

EVERY_S = 0.2
PING_S = 15
MOST_STREAMS = 64
MOST_QUEUED = 1000  # events that may wait in one stream
AGAIN_MS = 2000  # the time that a browser waits before it reconnects
FIRST_LOOK_S = 5.0
SLOW_S = 30.0  # a stream is closed if its client reads nothing for this time

Told = tuple[str, str]  # name of the event, its data as one line of JSON


class _Listener:
    """The queue of events for one stream. Any thread may add events. Only one event loop reads them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: deque[Told] = deque()
        self._over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()

    def tell(self, told: Iterable[Told]) -> None:
        """Add events to the queue.

        If the queue then has more than `MOST_QUEUED` events, all of them are dropped. The client gets the event
        ``again`` instead, and the stream ends.
        """
        with self._lock:
            if self._over:
                return
            self._told.extend(told)
            if len(self._told) > MOST_QUEUED:
                self._told.clear()
                self._told.append(("again", "{}"))
                self._over = True
            self._rouse()

    def end(self) -> None:
        """End the stream after the events in the queue have been sent."""
        with self._lock:
            self._over = True
            self._rouse()

    def _rouse(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the stream with it
                self._loop.call_soon_threadsafe(self._wake.set)

    async def next(self) -> Told | None:
        """Wait for the next event and return it; None at the end of the stream."""
        while True:
            with self._lock:
                self._loop = asyncio.get_running_loop()
                self._wake.clear()
                if self._told:
                    return self._told.popleft()
                if self._over:
                    return None
            await self._wake.wait()


class Hub:
    """All event streams of the server, and the watcher thread, which runs while any stream is open."""

    def __init__(self, client: SchedulerClient) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._listeners: set[_Listener] = set()
        self._standing: dict[str, str] = {}  # kind (not job) → data of its last event; sent first in a new stream
        self._watcher: threading.Thread | None = None
        self._wake = threading.Event()
        self._begun = threading.Event()  # set after the watcher has read the store for the first time
        self._closed = False

    def close(self) -> None:
        """End all streams and refuse new ones; called when the server stops."""
        with self._lock:
            self._closed = True
        self.end_all()
        self._wake.set()

    def end_all(self) -> None:
        """End all open streams. New streams are still accepted."""
        with self._lock:
            for one in self._listeners:
                one.end()

    def join(self) -> _Listener:
        """Add a stream and return its queue. Raises NotNow if too many streams are open or the server is stopping.

        Waits until the watcher has read the store for the first time, but at most `FIRST_LOOK_S` seconds.
        """
        listener = _Listener()
        with self._lock:
            if self._closed or len(self._listeners) >= MOST_STREAMS:
                raise NotNow(f"cannot open another event stream: {MOST_STREAMS} are open", do="close another page")
            listener.tell(self._standing.items())
            self._listeners.add(listener)
            if self._watcher is None:
                self._begun = threading.Event()
                self._watcher = threading.Thread(target=self._watch, args=(self._begun,), name="watcher", daemon=True)
                self._watcher.start()
            begun = self._begun
        begun.wait(FIRST_LOOK_S)
        return listener

    def leave(self, listener: _Listener) -> None:
        """Remove a stream."""
        with self._lock:
            self._listeners.discard(listener)

    def _watch(self, begun: threading.Event) -> None:
        """Send changes to all streams until no stream is left. Sets ``begun`` after the first read of the store."""
        watch = self.client.changes()
        trouble = ""
        try:
            while True:
                try:
                    news = watch.look()
                    if trouble and news.alive is None:  # unchanged, but the last event was an error
                        news.alive = self.client.alive()
                    told, trouble = _events_of(news), ""
                except (SchedulerError, OSError) as error:
                    told = (
                        []
                        if str(error) == trouble
                        else [("scheduler", _line({"alive": False, "trouble": _said(error)}))]
                    )
                    trouble = str(error)
                with self._lock:
                    self._standing.update((name, data) for name, data in told if name != "job")
                    for one in self._listeners if told else ():
                        one.tell(told)
                    begun.set()
                    if self._closed or not self._listeners:
                        self._watcher, self._standing = None, {}
                        return
                self._wake.wait(EVERY_S)
        except Exception:  # a defect: the streams end, and the pages reconnect
            logging.getLogger(__name__).exception("the watcher ended")
            with self._lock:
                self._watcher, self._standing = None, {}
                for one in self._listeners:
                    one.end()
        finally:
            begun.set()
            watch.close()


def _said(error: Exception) -> str:
    return safe(without_secrets(str(error)))


def _line(value: Any) -> str:
    return json.dumps(value)  # ASCII only, so that no character ends the line


def _events_of(news: News) -> list[Told]:
    told: list[Told] = []
    if news.alive is not None:
        told.append(("scheduler", _line({"alive": news.alive})))
    told += [("job", _line(job_json(job, reason))) for job, reason in news.jobs]
    if news.gpus is not None:
        told.append(("gpus", _line({"gpus": [gpu_json(gpu) for gpu in news.gpus]})))
    if news.queue is not None:
        paused, counts = news.queue
        told.append(("queue", _line({"paused": paused, "counts": dict(counts)})))
    return told


class _Events(EventSourceResponse):
    """A response that streams events. When it ends, with or without an error, its stream is removed from the hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub, self._listener = hub, hub.join()
        super().__init__(
            _stream(self._listener), ping=PING_S, sep="\n", send_timeout=SLOW_S, ping_message_factory=_ping
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._listener.end()
            self._hub.leave(self._listener)


def events(ask: Ask) -> Response:
    """Return a stream of changes. Raises NotNow if too many streams are open."""
    hub: Hub = ask.request.app.state.hub
    return _Events(hub)


def _ping() -> ServerSentEvent:
    return ServerSentEvent(comment="ping", sep="\n")


async def _stream(listener: _Listener) -> AsyncIterator[ServerSentEvent]:
    numbers = itertools.count(1)  # event ids; not used to resume: a new stream begins with the current state
    yield ServerSentEvent(comment="gpujob", retry=AGAIN_MS, sep="\n")
    while (told := await listener.next()) is not None:
        event, data = told
        yield ServerSentEvent(data, event=event, id=str(next(numbers)), sep="\n")
