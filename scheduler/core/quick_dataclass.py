"""A `dataclass` that imports fast, for commands called in loops: importing the standard one costs each call 30 ms.

It supports only the features that the modules of those commands use, and they mean the same as in the standard library.
Type checkers see the standard `dataclass`; tests compare both. The functions of `dataclasses`, such as `replace`,
`fields` and `asdict`, accept these classes too.
"""

from __future__ import annotations

from collections.abc import Callable

# In place of `typing.TYPE_CHECKING`: commands called in loops must not import `typing` (`scheduler/client/client.py`).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")


class _Factory:
    """Default of a field, as `field` returns it: ``make`` creates the default for each new object."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def field(*, default_factory: Callable[[], Any]) -> Any:
    """Return the default of a field that ``default_factory`` creates for each new object."""
    return _Factory(default_factory)


class _Fields:
    """Descriptor of `__dataclass_fields__`. `dataclasses`, slow to import, creates the value at the first access."""

    def __init__(self, namespace: dict[str, Any], kw_only: bool) -> None:
        self.namespace, self.kw_only = namespace, kw_only

    def __get__(self, _: object, owner: type) -> dict[str, Any]:
        import dataclasses

        namespace = {
            name: dataclasses.field(default_factory=value.make) if isinstance(value, _Factory) else value
            for name, value in self.namespace.items()
        }
        twin: Any = dataclasses.dataclass(kw_only=self.kw_only)(type(owner.__name__, (), namespace))
        found: dict[str, Any] = twin.__dataclass_fields__
        type.__setattr__(owner, "__dataclass_fields__", found)
        return found


def dataclass(
    *, slots: bool, frozen: bool = False, order: bool = False, kw_only: bool = False
) -> Callable[[type[T]], type[T]]:
    """Return a decorator like `dataclasses.dataclass`, always with slots, without ``InitVar`` and ``ClassVar``.

    The decorator raises TypeError for a class with bases or ``__post_init__``, and for a field without a default after
    a field with a default. Raises TypeError if ``slots`` is false.
    """
    if not slots:
        raise TypeError("a quick dataclass has slots")
    return lambda cls: _made(cls, frozen, order, kw_only)


def _made(cls: type[T], frozen: bool, order: bool, kw_only: bool) -> type[T]:
    """Return a copy of ``cls`` with slots and the generated methods."""
    namespace = dict(cls.__dict__)
    annotations: dict[str, Any] = namespace.get("__annotations__", {})
    names = tuple(annotations)
    if cls.__bases__ != (object,) or hasattr(cls, "__post_init__"):
        raise TypeError(f"{cls.__name__} is no quick dataclass")
    defaults = {name: namespace.pop(name) for name in names if name in namespace}
    namespace.pop("__dict__", None)
    namespace.pop("__weakref__", None)
    namespace["__slots__"] = names
    namespace["__match_args__"] = () if kw_only else names
    module = cls.__module__
    namespace["__dataclass_fields__"] = _Fields(
        {"__module__": module, "__annotations__": annotations, **defaults}, kw_only
    )
    namespace.update(_written(names, defaults, frozen, kw_only))
    if frozen:
        namespace["__setattr__"], namespace["__delattr__"] = _cannot_be_set, _cannot_be_deleted
    else:
        namespace["__hash__"] = None
    if order:
        namespace.update(_ORDER)
    namespace["__repr__"] = _repr
    namespace["__init__"].__annotations__ = {**annotations, "return": None}
    for name in ("__init__", "__eq__", "__hash__"):
        if namespace[name] is not None:
            namespace[name].__qualname__ = f"{cls.__qualname__}.{name}"
            namespace[name].__module__ = module
    made: Any = type(cls.__name__, (), namespace)
    made.__qualname__ = cls.__qualname__
    return made  # type: ignore[no-any-return]


def _written(names: tuple[str, ...], defaults: dict[str, Any], frozen: bool, kw_only: bool) -> dict[str, Any]:
    """Return ``__init__``, ``__eq__`` and ``__hash__`` for these fields, compiled together to save time."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_new": object()}
    takes, sets = [], []
    for name in names:
        value = f"{name}"
        if name in defaults:
            known[f"_{name}"] = default = defaults[name]
            if isinstance(default, _Factory):
                known[f"_{name}"] = default.make
                value = f"_{name}() if {name} is _new else {name}"
            takes.append(f"{name}={'_new' if isinstance(default, _Factory) else f'_{name}'}")
        elif defaults and not kw_only and any(before in defaults for before in names[: names.index(name)]):
            raise TypeError(f"non-default argument {name!r} follows default argument")
        else:
            takes.append(name)
        sets.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    key = f"({''.join(f'self.{name}, ' for name in names)})"
    text = (
        f"def __init__(self, {'*, ' if kw_only else ''}{', '.join(takes)}):\n {'; '.join(sets)}\n"
        f"def __eq__(self, other):\n"
        f" return {key} == {key.replace('self', 'other')} if other.__class__ is self.__class__ else NotImplemented\n"
        f"def __hash__(self):\n return hash({key})\n"
    )
    found: dict[str, Any] = {}
    exec(text, known, found)  # noqa: S102  of the names of our own fields, as the standard library does it
    return found


def _values(instance: Any) -> tuple[Any, ...]:
    return tuple(getattr(instance, name) for name in instance.__slots__)


def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
    return f"{type(self).__qualname__}({shown})"


def _cannot_be_set(self: Any, name: str, value: object) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _cannot_be_deleted(self: Any, name: str) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _compared(name: str) -> Callable[[Any, Any], Any]:
    def compare(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return getattr(_values(self), name)(_values(other))

    return compare


_ORDER = {name: _compared(name) for name in ("__lt__", "__le__", "__gt__", "__ge__")}


def replace(instance: T, /, **changes: Any) -> T:
    """Return a copy of ``instance`` with these fields changed, like `dataclasses.replace`."""
    for name in instance.__slots__:  # type: ignore[attr-defined]
        if name not in changes:
            changes[name] = getattr(instance, name)
    return type(instance)(**changes)
