"""A machine with three users for the tests of a module. ada and bob are users, eve is an administrator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpujobd.machine import Machine


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine() as made:
        for name in ("ada", "bob", "eve"):
            made.add_user(name, *(["lab"] if name == "ada" else []))
        made.install()
        made.start()
        yield made
