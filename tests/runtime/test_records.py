"""Our `dataclass` acts as that of the standard library, which compiles all methods of a class."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from edgekit_runtime import records

MAKERS = (records.dataclass, dataclasses.dataclass)
OPTIONS: tuple[dict[str, bool], ...] = (
    {},
    {"slots": True},
    {"eq": False},
    {"kw_only": True},
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "slots": True, "kw_only": True},
    {"frozen": True, "slots": True, "eq": False},
)


def make_point(maker: Callable[..., Any], options: dict[str, bool]) -> Any:
    @maker(**options)
    class Point:
        dimensions: ClassVar = 2

        x: float
        y: float = 0.0
        tags: list[str] = dataclasses.field(default_factory=list, hash=False)
        note: str = dataclasses.field(default="", compare=False, repr=False)
        length: float = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", (self.x**2 + self.y**2) ** 0.5)

    return Point


def make_pair(maker: Callable[..., Any], options: dict[str, bool]) -> Any:
    @maker(**options)
    class Parent:
        name: str

    @maker(**options)
    class Child(Parent):
        """A record with a docstring and methods of its own."""

        parts: tuple[Any, ...] = ()

        def __repr__(self) -> str:
            return f"<{self.name}>"

    return Child


def describe(call: Callable[[], Any]) -> Any:
    """Return the result of a call or its error, to compare it."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def observe_point(point: Any) -> dict[str, Any]:
    first, same, other = point(x=3.0, y=4.0, note="a"), point(x=3.0, y=4.0, note="b"), point(x=3.0)
    return {
        "repr": repr(first),
        "equal": (first == same, first == other, first != other, first == (3.0, 4.0), first == first),
        "default": (other.tags, other.tags is first.tags),
        "hash": describe(lambda: hash(first) == hash(same)),
        "length": first.length,
        "replaced": repr(dataclasses.replace(first, x=0.0)),
        "plain": dataclasses.asdict(first),
        "set": describe(lambda: setattr(first, "x", 1.0)),
        "delete": describe(lambda: delattr(other, "x")),
        "copied": repr(copy.copy(same)),
        "by position": describe(lambda: repr(point(1.0))),
        "missing": describe(point),
        "unknown": describe(lambda: point(x=1.0, z=2.0)),
        "matched": point.__match_args__,
        "has dict": hasattr(first, "__dict__"),
    }


def observe_pair(pair: Any) -> tuple[Any, ...]:
    first = pair(name="a", parts=(1,))
    return repr(first), first == pair(name="a", parts=(1,)), first == pair(name="b"), pair.__doc__


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_record_acts_as_a_dataclass(options: dict[str, bool]) -> None:
    ours, theirs = (observe_point(make_point(maker, options)) for maker in MAKERS)
    assert ours == theirs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_record_that_inherits_acts_as_a_dataclass(options: dict[str, bool]) -> None:
    ours, theirs = (make_pair(maker, options) for maker in MAKERS)
    assert observe_pair(ours) == observe_pair(theirs)


@pytest.mark.parametrize("maker", MAKERS)
def test_record_in_itself_has_an_end(maker: Callable[..., Any]) -> None:
    child = make_pair(maker, {})
    point = make_point(maker, {})(x=1.0)
    point.tags.append(point)
    assert "tags=[...]" in repr(point)
    assert repr(child(name="a", parts=(child,))) == "<a>"


@records.dataclass(frozen=True, slots=True)
class Sent:
    """A record that another process gets."""

    name: str
    sizes: tuple[int, ...] = ()


def test_frozen_record_can_be_pickled() -> None:
    sent = Sent("a", (1, 2))
    assert pickle.loads(pickle.dumps(sent)) == sent  # noqa: S301  # our own


# Prints the dataclasses that `dataclasses` gave a `__repr__`.
FIND_COMPILED = """
import dataclasses, sys
import edgekit_runtime.agent.agent, edgekit_runtime.agent.execution.local_steps
import edgekit_runtime.commands.serve, edgekit_runtime.service.worker.__main__
import edgekit_runtime.sessions.opening.selftest_child, edgekit_runtime.trust.verifier_process
for name, module in list(sys.modules.items()):
    for kind in vars(module).values() if name.startswith("edgekit_runtime") else ():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and hasattr(kind.__repr__, "__code__"):
            if kind.__repr__.__code__.co_filename == dataclasses.__file__:
                print(kind.__name__)
"""


def test_dataclasses_of_processes_that_start_often_are_all_ours() -> None:
    child = subprocess.run([sys.executable, "-c", FIND_COMPILED], capture_output=True, text=True, check=True)
    assert child.stdout == ""
