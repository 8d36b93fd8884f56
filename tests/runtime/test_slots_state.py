"""The state file of a model: its form, its bounds, and what of it is refused by name."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.slots.state import (
    HEALTHY,
    REJECTED,
    DamagedStateError,
    Installed,
    ModelState,
    NewerStateError,
    Rejection,
    parse_state,
)

Change = Callable[[dict[str, Any]], object]
ONE, TWO, ZERO = (digit * 64 for digit in "120")


def put(version: str, sha256: str, health: str = HEALTHY) -> Installed:
    return Installed(version=version, sha256=sha256, health=health)


FULL = ModelState(
    model="linear",
    active=Installed(version="2.0.0", sha256=TWO, begun=1, extra={"note": 1}),
    spare=put("1.0.0", ONE),
    factory=put("0.9.0", ZERO),
    pinned="2.0.0",
    rejected=(Rejection(version="3.0.0", sha256="3" * 64, reason="wrong", extra={"at": 2}),),
    extra={"later": [True]},
)


def encode(body: dict[str, Any]) -> bytes:
    """Return the state file of `body`, with the digest that it must have."""
    return encode_json({**body, "sha256": hashlib.sha256(encode_json(body)).hexdigest()})


@pytest.fixture
def body() -> dict[str, Any]:
    """What `FULL` holds, without the digest, to be changed by a test."""
    value: dict[str, Any] = json.loads(FULL.to_bytes())
    del value["sha256"]
    return value


def test_state_survives_the_round_trip() -> None:
    assert parse_state(FULL.to_bytes(), "here") == FULL


def test_state_of_a_model_without_versions_survives_the_round_trip() -> None:
    empty = ModelState(model="linear")
    assert parse_state(empty.to_bytes(), "here") == empty


@pytest.mark.parametrize(("count", "first"), [(15, 0), (16, 0), (17, 1)])
def test_state_file_holds_the_newest_sixteen_rejections(count: int, first: int) -> None:
    rejected = tuple(Rejection(version=f"{n}", sha256=f"{n:064x}", reason="") for n in range(count))
    written = ModelState(model="linear", rejected=rejected).to_bytes()
    assert parse_state(written, "here").rejected == rejected[first:]


@pytest.mark.parametrize(
    ("active", "factory", "current"),
    [
        (None, None, None),
        (None, "0", "0"),
        (HEALTHY, None, "2"),
        (HEALTHY, "0", "2"),
        (REJECTED, None, "2"),
        (REJECTED, "0", "0"),
    ],
)
def test_current_version_is_the_active_one_unless_it_was_rejected_before_a_factory_package(
    active: str | None, factory: str | None, current: str | None
) -> None:
    state = ModelState(
        model="linear",
        active=None if active is None else put("2", TWO, active),
        factory=None if factory is None else put("0", ZERO),
    )
    assert (state.current and state.current.version) == current


def test_versions_are_listed_active_first_and_factory_last() -> None:
    assert [item.version for item in FULL.installed] == ["2.0.0", "1.0.0", "0.9.0"]


def test_one_package_in_both_slots_is_refused() -> None:
    with pytest.raises(DamagedStateError, match="slot state: both slots hold the same package"):
        ModelState(model="linear", active=put("1", ONE), spare=put("1", ONE))


@pytest.mark.parametrize("place", ["active", "spare"])
def test_package_in_one_slot_alone_is_accepted(place: str) -> None:
    state = ModelState(model="linear", **{place: put("1", ONE)})
    assert list(state.installed) == [put("1", ONE)]


def test_factory_package_in_a_slot_too_is_accepted() -> None:
    state = ModelState(model="linear", active=put("1", ONE), factory=put("1", ONE))
    assert len(list(state.installed)) == 2


@pytest.mark.parametrize("field", ["format", "model", "active", "spare", "factory", "pinned", "rejected"])
def test_missing_field_is_named(field: str, body: dict[str, Any]) -> None:
    del body[field]
    with pytest.raises(DamagedStateError, match=f"here: field '{field}' is missing"):
        parse_state(encode(body), "here")


@pytest.mark.parametrize("field", ["version", "sha256", "health", "begun"])
def test_missing_field_of_a_package_is_named(field: str, body: dict[str, Any]) -> None:
    del body["spare"][field]
    with pytest.raises(DamagedStateError, match=f"here: spare: field '{field}' is missing"):
        parse_state(encode(body), "here")


@pytest.mark.parametrize("field", ["version", "sha256", "reason"])
def test_missing_field_of_a_rejection_is_named(field: str, body: dict[str, Any]) -> None:
    del body["rejected"][0][field]
    with pytest.raises(DamagedStateError, match=rf"here: rejected\[0\]: field '{field}' is missing"):
        parse_state(encode(body), "here")


@cases(
    ("change", "reason"),
    [
        (lambda body: body.update(model="../x"), "model is '../x'"),
        (lambda body: body.update(model=7), "model is 7"),
        (lambda body: body.update(pinned=""), "pinned is ''"),
        (lambda body: body.update(active=[]), "here: active: is a list, expected an object"),
        (lambda body: body.update(rejected={}), "field 'rejected' is an object, expected a list"),
        (lambda body: body.update(rejected=[None]), r"here: rejected\[0\]: is null, expected an object"),
        (lambda body: body["active"].update(version="x" * 65), "version is 'x"),
        (lambda body: body["active"].update(sha256="2" * 63), "sha256 is '2+', expected 64"),
        (lambda body: body["active"].update(sha256="2" * 65), "sha256 is '2+', expected 64"),
        (lambda body: body["active"].update(sha256="A" * 64), "sha256 is 'A+', expected 64"),
        (lambda body: body["active"].update(sha256=2), "sha256 is 2, expected 64"),
        (
            lambda body: body["active"].update(health="fine"),
            "health is 'fine', expected one of unproven, healthy",
        ),
        (lambda body: body["active"].update(begun=-1), "begun is -1, expected a whole number from 0"),
        (lambda body: body["active"].update(begun=True), "begun is True"),
        (lambda body: body["active"].update(begun=1.0), "begun is 1.0"),
        (lambda body: body["active"].update(begun="1"), "begun is '1'"),
        (lambda body: body["rejected"][0].update(reason=None), "reason is None, expected a string"),
        (lambda body: body["rejected"][0].update(version=None), "version is None"),
        (lambda body: body["rejected"][0].update(sha256=""), "sha256 is ''"),
        (lambda body: body["spare"].update(sha256=TWO), "both slots hold the same package"),
    ],
)
def test_wrong_value_is_refused_with_its_field(change: Change, reason: str, body: dict[str, Any]) -> None:
    change(body)
    with pytest.raises(DamagedStateError, match=reason):
        parse_state(encode(body), "here")


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (
            lambda body: body["active"].update(version="x" * 64),
            lambda state: state.active.version == "x" * 64,
        ),
        (lambda body: body["active"].update(begun=0), lambda state: state.active.begun == 0),
        (lambda body: body["active"].update(health=REJECTED), lambda state: state.active.health == REJECTED),
        (lambda body: body["rejected"][0].update(reason=""), lambda state: state.rejected[0].reason == ""),
        (lambda body: body.update(rejected=[]), lambda state: state.rejected == ()),
    ],
)
def test_value_at_its_bound_is_read(
    change: Change, read: Callable[[ModelState], bool], body: dict[str, Any]
) -> None:
    change(body)
    assert read(parse_state(encode(body), "here"))


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (2, NewerStateError),
        (1000, NewerStateError),
        (0, DamagedStateError),
        (-1, DamagedStateError),
        ("2", DamagedStateError),
        (None, DamagedStateError),
        (1.5, DamagedStateError),
    ],
)
def test_other_format_is_refused_and_a_later_one_as_newer(
    number: object, error: type[Exception], body: dict[str, Any]
) -> None:
    with pytest.raises(error, match=f"here: is of format {number!r}, this reader knows 1; update edgekit"):
        parse_state(encode({**body, "format": number}), "here")


@pytest.mark.parametrize("stated", [None, "", "0" * 64, 7])
def test_wrong_digest_is_refused(stated: object, body: dict[str, Any]) -> None:
    with pytest.raises(DamagedStateError, match="here: does not have the digest that it states"):
        parse_state(encode_json({**body, "sha256": stated}), "here")


def test_missing_digest_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(DamagedStateError, match="here: does not have the digest that it states"):
        parse_state(encode_json(body), "here")


def test_damage_counts_before_a_format_that_is_not_known(body: dict[str, Any]) -> None:
    with pytest.raises(DamagedStateError, match="does not have the digest"):
        parse_state(encode_json({**body, "format": 2, "sha256": "0" * 64}), "here")


@pytest.mark.parametrize("changed", [{"active": None}, {"model": "other"}, {"pinned": None}, {"extra": {}}])
def test_state_of_other_content_is_another_one(changed: dict[str, Any]) -> None:
    fields = {name: getattr(FULL, name) for name in ModelState.__slots__}
    other = ModelState(**{**fields, **changed})
    assert (other == FULL, other.to_bytes() == FULL.to_bytes()) == (False, False)
