"""HTTP client that floods the page at a fixed rate: `python -m benchmarks.flooding PORT RATE SECONDS CONNECTIONS`.

It sends requests without waiting for answers. It reads the token from stdin and prints a JSON object. ``sent``: number
of requests. ``answered``: answers by status code. ``seconds``: how long it sent requests. ``whole_s``: seconds from
the first request until the last answer, or until the client no longer waits for missing answers. ``worst_s``: time of
the slowest answer in seconds.
"""

from __future__ import annotations

import asyncio
import collections
import json
import sys
import time

STEP_S = 0.02
LAST_S = 10.0  # the longest wait for missing answers after the last request


async def _read(
    reader: asyncio.StreamReader, due: collections.deque[float], found: dict[str, int], worst: list[float]
) -> None:
    while True:
        line = await reader.readline()
        if not line:
            return
        length = 0
        while (head := await reader.readline()).strip():
            name, _, value = head.partition(b": ")
            length = int(value) if name.lower() == b"content-length" else length
        await reader.readexactly(length)
        code = line.split()[1].decode()
        found[code] = found.get(code, 0) + 1
        worst[0] = max(worst[0], time.monotonic() - due.popleft())


async def flood(port: int, token: str, rate: float, seconds: float, connections: int) -> dict[str, object]:
    """Send ``rate`` requests per second for ``seconds`` seconds; return the object that the module prints.

    The requests are distributed evenly over the connections. If the server no longer reads from one of the connections
    and the send buffer of this connection is full, all further requests are delayed.
    """
    request = f"GET /api/status HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    found: dict[str, int] = {}
    worst = [0.0]
    ways = []
    for _ in range(connections):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        due: collections.deque[float] = collections.deque()
        ways.append((writer, due, asyncio.create_task(_read(reader, due, found, worst))))
    begun = time.monotonic()
    sent = 0
    while (passed := time.monotonic() - begun) < seconds:
        while sent < rate * passed:
            writer, due, _ = ways[sent % connections]
            due.append(time.monotonic())
            writer.write(request)
            sent += 1
        for writer, _, _ in ways:
            await writer.drain()
        await asyncio.sleep(STEP_S)
    took = time.monotonic() - begun
    until = time.monotonic() + LAST_S
    while sum(found.values()) < sent and time.monotonic() < until:
        await asyncio.sleep(STEP_S)
    whole = time.monotonic() - begun
    for writer, _, reading in ways:
        reading.cancel()
        writer.close()
    return {"sent": sent, "answered": found, "seconds": took, "whole_s": whole, "worst_s": worst[0]}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(flood(int(sys.argv[1]), sys.stdin.readline().strip(), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))))  # fmt: skip
