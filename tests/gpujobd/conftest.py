"""A machine with three users for many tests. ada and bob are users, eve is an administrator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpujobd.machine import Machine


@pytest.fixture(scope="session")
def shared_machine() -> Iterator[Machine]:
    with Machine() as made:
        for name in ("ada", "bob", "eve"):
            made.add_user(name, *(["lab"] if name == "ada" else []))
        made.install()
        made.start()
        yield made


@pytest.fixture
def machine(shared_machine: Machine) -> Machine:
    """The machine without jobs, and with its first configuration."""
    shared_machine.configure(shared_machine.config)
    shared_machine.clear()
    return shared_machine
