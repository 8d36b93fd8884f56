"""The records of packages, signatures and slots are immutable."""

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

from edgekit_runtime.package.archive import Limits
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.slots import Choice, Permissions
from edgekit_runtime.slots.state import Installed, ModelState, Rejection
from edgekit_runtime.slots.store import Receipt
from edgekit_runtime.trust.dsse import Envelope, Statement

MODULES = (
    "package.archive", "package.canonical_zip", "package.manifest", "package.manifest_entries",
    "package.variants", "slots.choice", "slots.folder", "slots.state",
    "slots.store", "slots.transitions", "trust.dsse",
)  # fmt: skip
SHA256 = "0" * 64


def find_dataclasses() -> list[type[Any]]:
    modules = [importlib.import_module(f"edgekit_runtime.{name}") for name in MODULES]
    found = [
        thing
        for module in modules
        for _, thing in inspect.getmembers(module, inspect.isclass)
        if dataclasses.is_dataclass(thing) and thing.__module__ == module.__name__
    ]
    assert len(found) > len(MODULES)
    return found


@pytest.mark.parametrize("kind", find_dataclasses(), ids=lambda kind: kind.__name__)
def test_value_takes_no_other_attribute(kind: type[Any]) -> None:
    made = object.__new__(kind)
    name = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, None)
    assert not hasattr(made, "__dict__")


@pytest.mark.parametrize(
    "kind", [Limits, Manifest, Choice, Permissions, Installed, Rejection, ModelState, Receipt]
)
def test_value_of_many_fields_takes_them_by_name_only(kind: type[Any]) -> None:
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        kind(None)


@pytest.mark.parametrize(
    "value",
    [
        Installed(version="1", sha256=SHA256, extra={"later": 1}),
        Rejection(version="1", sha256=SHA256, reason="", extra={"later": 1}),
        ModelState(model="linear", extra={"later": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_with_fields_of_a_newer_writer_has_a_hash(value: Any) -> None:
    assert hash(value) == hash(dataclasses.replace(value))


def test_manifest_with_all_its_entries_has_a_hash(maker: Any) -> None:
    manifest = maker.manifest()
    assert hash(manifest) == hash(maker.manifest())


def test_values_of_one_content_are_equal() -> None:
    assert Envelope(b"a", "b", b"c") == Envelope(b"a", "b", b"c")
    assert Statement("a", SHA256, "b", {}) != Statement("b", SHA256, "b", {})
