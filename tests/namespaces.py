"""Several hosts as network namespaces on a switch, which a test can cut off one by one (needs root and iproute2)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000


class Hosts:
    """Hosts 1 to ``number``, with the addresses 10.88.0.1, 10.88.0.2, …; each is a network namespace."""

    def __init__(self, number: int) -> None:
        self.number, self._tag = number, f"gj{os.getpid() % 100000}"

    def space(self, host: int) -> str:
        """Return the name of the namespace of a host."""
        return f"{self._tag}h{host}"

    @staticmethod
    def address(host: int) -> str:
        return f"10.88.0.{host}"

    def __enter__(self) -> Hosts:
        switch = f"{self._tag}sw"
        self._ip(f"netns add {switch}", f"-n {switch} link add br0 type bridge", f"-n {switch} link set br0 up")
        for host in range(1, self.number + 1):
            space, outside = self.space(host), f"s{host}"
            self._ip(
                f"netns add {space}",
                f"-n {space} link set lo up",
                f"-n {space} link add eth0 type veth peer name {outside} netns {switch}",
                f"-n {space} addr add {self.address(host)}/24 dev eth0",
                f"-n {space} link set eth0 up",
                f"-n {switch} link set {outside} master br0 up",
            )
        return self

    def __exit__(self, *_: object) -> None:
        for space in (*map(self.space, range(1, self.number + 1)), f"{self._tag}sw"):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def cut(self, host: int) -> None:
        """Cut a host off from all others."""
        self._ip(f"-n {self._tag}sw link set s{host} down")

    def heal(self, host: int) -> None:
        """Connect a host again."""
        self._ip(f"-n {self._tag}sw link set s{host} up")

    def enter(self, host: int) -> list[str]:
        """Return the words before a command that run it on a host. (`ip netns exec` would remount /sys.)"""
        return ["nsenter", f"--net=/run/netns/{self.space(host)}"]

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Move this thread, and the threads and processes that it starts, onto a host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net", "rb") as before, open(f"/run/netns/{self.space(host)}", "rb") as wanted:
            try:
                assert libc.setns(wanted.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
                yield
            finally:
                assert libc.setns(before.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())

    @staticmethod
    def _ip(*lines: str) -> None:
        for line in lines:
            subprocess.run(["ip", *line.split()], check=True, capture_output=True)
