"""A look at a store in the moment in which a daemon that was just started makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.desk import Desk
from scheduler.store.database import NothingYet
from scheduler.store.office import Office
from scheduler.store.places import Places


def test_a_store_that_is_being_made_is_empty_and_one_that_nobody_makes_is_trouble(tmp_path: Path) -> None:
    """`demo`, and everyone who asks right after a start."""
    places = Places(str(tmp_path / "state.json"))
    places.make()
    Path(places.store).touch()
    desk = Desk(places.state_file)
    with pytest.raises(NothingYet):
        desk.overview()
    office = Office(places)
    office.take({"pid": 1})
    try:
        view = desk.overview()
        assert view.alive and view.jobs == [] and desk.jobs() == ([], {})
    finally:
        office.leave()
