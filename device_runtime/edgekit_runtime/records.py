"""A replacement for `dataclasses.dataclass` that compiles one function per class instead of six.

With `dataclasses`, compiling a hundred such classes took half of the time to import this project's modules.
Here only `__init__` is compiled, because it is called for each request. The other methods are shared by all
classes. Use `dataclasses` for classes that need `InitVar`, `order` or `unsafe_hash`. For example, for

    @dataclass(frozen=True, slots=True)
    class Limits:
        bytes: int
        names: list[str] = field(default_factory=list)

it compiles

    def __init__(self, bytes, names=__default_names):
        __set(self, 'bytes', bytes)
        __set(self, 'names', __make_names() if names is __MISSING else names)
"""

import dataclasses
import functools
import reprlib
from collections.abc import Callable
from dataclasses import MISSING
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(kind=None, /, *, frozen=False, eq=True, slots=False, kw_only=False):
        """Return the class with the methods of a dataclass; the arguments are those of `dataclasses`."""
        if kind is None:
            return functools.partial(dataclass, frozen=frozen, eq=eq, slots=slots, kw_only=kw_only)
        kind.__doc__ = kind.__doc__ or kind.__name__  # an empty one costs an inspection
        record = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(kind)
        methods = {"__repr__": _show}
        if "__init__" not in record.__dict__:
            methods["__init__"] = _compile_init(record, frozen=frozen)
        if eq:
            read = _make_reader([field.name for field in dataclasses.fields(record) if field.compare])
            methods["__eq__"] = lambda self, other: (
                read(self) == read(other) if other.__class__ is self.__class__ else NotImplemented
            )
        if frozen:
            methods |= {"__setattr__": _refuse_value, "__delattr__": _refuse_deletion}
            methods |= {"__setstate__": _restore} if slots else {}
        for name, method in methods.items():
            if name not in record.__dict__:
                setattr(record, name, method)
        if eq and record.__dict__.get("__hash__") is None:
            record.__hash__ = _make_hash(record) if frozen else None
        return record


def _compile_init(record: type[Any], *, frozen: bool) -> Callable[..., None]:
    positional, named, lines = ["self"], ["*"], []
    scope: dict[str, Any] = {"__set": object.__setattr__, "__MISSING": MISSING, "__name__": record.__module__}
    for field in dataclasses.fields(record):
        name, default, factory = field.name, f"__default_{field.name}", f"__make_{field.name}"
        scope |= {default: field.default, factory: field.default_factory}
        has_default = field.default is not field.default_factory  # both are MISSING where there is none
        value = name if field.init else default
        if field.default_factory is not MISSING:
            value = f"{factory}() if {name} is __MISSING else {name}" if field.init else f"{factory}()"
        if field.init:
            (named if field.kw_only else positional).append(f"{name}={default}" if has_default else name)
        if field.init or has_default:
            lines.append(f"__set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(record, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join(positional + named * (len(named) > 1))
    exec(f"def __init__({parameters}):\n " + "\n ".join(lines or ["pass"]), scope)  # noqa: S102  # our own names
    init: Callable[..., None] = scope["__init__"]
    init.__qualname__ = f"{record.__qualname__}.__init__"
    return init


def _make_reader(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda record: tuple(getattr(record, name) for name in names)


def _make_hash(record: type[Any]) -> Callable[[Any], int]:
    fields = dataclasses.fields(record)
    read = _make_reader([f.name for f in fields if (f.compare if f.hash is None else f.hash)])
    return lambda self: hash(read(self))


@reprlib.recursive_repr()
def _show(self: Any) -> str:
    values = [
        f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr
    ]
    return f"{self.__class__.__qualname__}({', '.join(values)})"


def _refuse_value(_self: Any, name: str, _value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(_self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _restore(self: Any, state: tuple[None, dict[str, Any]]) -> None:
    for name, value in state[1].items():
        object.__setattr__(self, name, value)
