"""Tests of the quick `dataclass`: classes made by it behave like classes made by the standard one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core import quick_dataclass as quick
from scheduler.core.gpu import Gpu, ResourceRequest
from scheduler.core.job import Event, Failure, Holding, Job, JobSpec, Process, Reason
from scheduler.core.model_table import ModelTable
from scheduler.store.paths import Places

QUICK = (Event, Failure, Gpu, Holding, Job, JobSpec, ModelTable, ResourceRequest, Places, Process, Reason)
HOW: tuple[dict[str, bool], ...] = (
    {},
    {"frozen": True},
    {"kw_only": True},
    {"frozen": True, "kw_only": True},
    {"frozen": True, "order": True},
)


def _both(maker: Callable[[Any, Any], Any], **how: bool) -> tuple[Any, Any]:
    """Return the same class made by the quick and by the standard decorator."""
    return (
        maker(quick.dataclass(slots=True, **how), quick.field),
        maker(dataclasses.dataclass(slots=True, **how), dataclasses.field),
    )


def _body(dataclass: Any, field: Any) -> Any:
    @dataclass
    class Point:
        """A point."""

        x: int
        y: str = "north"
        z: list[int] = field(default_factory=list)

        @property
        def both(self) -> str:
            return f"{self.x}{self.y}"

        @classmethod
        def origin(cls) -> Any:
            return cls(x=0)

    return Point


def _said(do: Callable[[], Any]) -> Any:
    """Return the value of ``do``, or the type of its error; for a frozen class also the error's message."""
    try:
        return do()
    except dataclasses.FrozenInstanceError as error:
        return type(error), str(error)
    except (TypeError, AttributeError) as error:
        return type(error)


def _behaviour(cls: Any) -> dict[str, Any]:
    one, same, other = cls(x=1), cls(x=1, z=[]), cls(x=2, y="south", z=[3])
    return {
        "repr": repr(one).rpartition("Point(")[2],
        "equal": [one == same, one == other, one != other, one == 1, one == (1, "north", [])],
        "made anew": one.z is not same.z,
        "property": one.both,
        "classmethod": cls.origin().x,
        "names": (cls.__doc__, cls.__name__, cls.__qualname__.rpartition(".")[2], cls.__module__),
        "places": (cls.__match_args__, cls.__slots__, hasattr(one, "__dict__")),
        "hash": _said(lambda: hash(one)),
        "less": _said(lambda: one < other),
        "not less": _said(lambda: one >= other),
        "another kind": _said(lambda: one < 3),
        "set": _said(lambda: setattr(one, "x", 5)),
        "refuses unknown": _said(lambda: setattr(same, "new", 5)) is not None,  # its message varies by Python version
        "deleted": _said(lambda: delattr(other, "x")),
        "one place": _said(lambda: repr(cls(1)).rpartition("Point(")[2]),
        "all places": _said(lambda: cls(1, "w", [4]).y),
        "none": _said(lambda: cls()),
        "unknown": _said(lambda: cls(x=1, w=2)),
    }


@pytest.mark.parametrize("how", HOW, ids=str)
def test_objects_behave_alike(how: dict[str, bool]) -> None:
    found, standard = map(_behaviour, _both(_body, **how))
    assert found == standard


@pytest.mark.parametrize("how", HOW, ids=str)
def test_the_standard_library_knows_them(how: dict[str, bool]) -> None:
    found = []
    for cls in _both(_body, **how):
        one = cls(x=1, z=[7])
        changed = dataclasses.replace(one, y="east")
        found.append(
            (
                dataclasses.is_dataclass(cls),
                dataclasses.asdict(one),
                dataclasses.astuple(changed),
                [(f.name, f.type, f.default, f.default_factory, f.kw_only) for f in dataclasses.fields(cls)],
                [f.name for f in dataclasses.fields(one)],
            )
        )
    assert found[0] == found[1]


@given(x=st.integers(), y=st.text(), z=st.lists(st.integers()), w=st.integers())
def test_replace(x: int, y: str, z: list[int], w: int) -> None:
    cls, _ = _both(_body, frozen=True)
    one = cls(x, y, z)
    assert quick.replace(one) == one and quick.replace(one) is not one
    assert quick.replace(one, x=w) == dataclasses.replace(one, x=w) == cls(w, y, z)
    assert quick.replace(one, z=[]).y == y
    with pytest.raises(TypeError):
        quick.replace(one, other=1)


@given(a=st.tuples(st.integers(), st.integers()), b=st.tuples(st.integers(), st.integers()))
def test_order_and_hash_are_those_of_the_fields(a: tuple[int, int], b: tuple[int, int]) -> None:
    one, other = ResourceRequest(*a), ResourceRequest(*b)
    assert (one < other, one <= other, one > other, one >= other) == (a < b, a <= b, a > b, a >= b)
    assert (one == other) == (a == b) and hash(one) == hash(a)


@pytest.mark.parametrize("cls", QUICK, ids=lambda cls: str(cls.__name__))
def test_each_class_of_ours_is_as_the_standard_one_would_make_it(cls: Any) -> None:
    """Fields have the same names, order and defaults, and frozen classes stay frozen."""
    names = tuple(cls.__annotations__)
    assert tuple(f.name for f in dataclasses.fields(cls)) == names == cls.__slots__
    required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    one, same = (cls(**dict.fromkeys(required, 1)) for _ in range(2))
    assert one == same and repr(one) == repr(same)
    for f in dataclasses.fields(cls):
        if f.default is not dataclasses.MISSING:
            assert getattr(one, f.name) == f.default
    if cls is Job:
        one.state = one.state
        assert _said(lambda: hash(one)) is TypeError
    else:
        assert _said(lambda: setattr(one, names[0], 1))[0] is dataclasses.FrozenInstanceError
        assert _said(lambda: delattr(one, names[0]))[0] is dataclasses.FrozenInstanceError


def test_what_it_does_not_do_is_refused() -> None:
    with pytest.raises(TypeError, match="slots"):
        quick.dataclass(slots=False)

    class WithAfter:
        x: int

        def __post_init__(self) -> None:
            raise AssertionError

    class Below(Reason):
        y: int

    class InWrongOrder:
        x: int = 1
        y: int

    for cls in (WithAfter, Below):
        with pytest.raises(TypeError, match="no quick dataclass"):
            quick.dataclass(slots=True)(cls)
    with pytest.raises(TypeError, match="'y' follows default"):
        quick.dataclass(slots=True)(InWrongOrder)


def test_a_copy_of_an_object_is_equal_where_it_can_be_had() -> None:
    job = Job(1, JobSpec(arguments=("true",)), ResourceRequest(0, 0))
    assert copy.copy(job) == job
