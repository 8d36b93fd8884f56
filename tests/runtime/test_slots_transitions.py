"""What each event makes of the state of a model; no file is touched."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from edgekit_runtime.errors import SlotError
from edgekit_runtime.slots import transitions
from edgekit_runtime.slots.state import HEALTHY, REJECTED, UNPROVEN, Installed, ModelState, Rejection
from edgekit_runtime.slots.transitions import Permissions

MAX_BEGUN = 3


def digest(version: str) -> str:
    return hashlib.sha256(version.encode()).hexdigest()


def put(version: str, health: str = HEALTHY, begun: int = 0) -> Installed:
    return Installed(version=version, sha256=digest(version), health=health, begun=begun)


def refused(version: str, reason: str = "wrong") -> Rejection:
    return Rejection(version=version, sha256=digest(version), reason=reason)


def state(
    active: Installed | None = None,
    spare: Installed | None = None,
    factory: Installed | None = None,
    **more: Any,
) -> ModelState:
    return ModelState(model="linear", active=active, spare=spare, factory=factory, **more)


FACTORY = put("0")


@pytest.mark.parametrize(
    ("before", "previous"),
    [
        (state(), None),
        (state(factory=FACTORY), None),
        (state(put("2", REJECTED), put("1"), FACTORY), None),
        (state(put("2")), None),
        (state(put("2"), put("1")), "1"),
        (state(put("2"), put("1"), FACTORY), "1"),
        (state(put("2"), put("1", UNPROVEN)), "1"),
        (state(put("2"), put("1", UNPROVEN), FACTORY), "0"),
        (state(put("2"), put("1", REJECTED)), None),
        (state(put("2"), put("1", REJECTED), FACTORY), "0"),
        (state(put("2"), None, FACTORY), "0"),
    ],
)
def test_previous_version_is_the_proven_one_else_the_factory_package(
    before: ModelState, previous: str | None
) -> None:
    found = transitions.find_previous(before)
    assert (found and found.version) == previous


@pytest.mark.parametrize(
    ("before", "order"),
    [
        (state(), ""),
        (state(factory=FACTORY), "0"),
        (state(put("2"), put("1"), FACTORY), "210"),
        (state(put("2", UNPROVEN), put("1"), FACTORY), "210"),
        (state(put("2", UNPROVEN), put("1", UNPROVEN), FACTORY), "201"),
        (state(put("2", REJECTED), put("1"), FACTORY), "102"),
        (state(put("2", REJECTED), put("1", UNPROVEN), FACTORY), "012"),
        (state(put("2", REJECTED), put("1", REJECTED), FACTORY), "021"),
        (state(put("2"), put("1", REJECTED)), "21"),
        (state(None, put("1")), "1"),
    ],
)
def test_candidates_come_proven_first_and_rejected_last(before: ModelState, order: str) -> None:
    assert "".join(item.version for item in transitions.list_candidates(before)) == order


@pytest.mark.parametrize(
    ("health", "begun", "after"),
    [
        (UNPROVEN, MAX_BEGUN - 1, UNPROVEN),
        (UNPROVEN, MAX_BEGUN, REJECTED),
        (UNPROVEN, MAX_BEGUN + 1, REJECTED),
        (HEALTHY, MAX_BEGUN + 1, HEALTHY),
    ],
)
@pytest.mark.parametrize("is_spare", [False, True])
def test_unproven_version_is_given_up_at_the_bound_of_its_starts(
    health: str, begun: int, after: str, is_spare: bool
) -> None:
    tried, other = put("2", health, begun), put("1")
    given = transitions.give_up(state(other, tried) if is_spare else state(tried, other))
    found = next(item for item in given.installed if item.version == "2")
    assert found.health == after


def test_reason_of_a_version_that_is_given_up_says_how_often_it_was_begun() -> None:
    given = transitions.give_up(state(put("2", UNPROVEN, 5), put("1")))
    assert given.rejected == (refused("2", "was begun 5 times and never confirmed"),)


def test_start_that_is_under_way_is_not_given_up_while_another_version_is() -> None:
    before = state(put("2", UNPROVEN, MAX_BEGUN), put("1", UNPROVEN, MAX_BEGUN))
    given = transitions.give_up(before, {digest("2")})
    assert [(item.version, item.health) for item in given.installed] == [("2", UNPROVEN), ("1", REJECTED)]


@pytest.mark.parametrize(("health", "begun"), [(UNPROVEN, 3), (HEALTHY, 2), (REJECTED, 2)])
def test_start_of_an_unproven_version_alone_is_counted(health: str, begun: int) -> None:
    counted = transitions.count_start(state(put("2", health, 2), put("1", UNPROVEN, 1)), "2")
    assert [item.begun for item in counted.installed] == [begun, 1]


@pytest.mark.parametrize(
    ("health", "before", "after"),
    [(UNPROVEN, 2, 1), (UNPROVEN, 1, 0), (UNPROVEN, 0, 0), (HEALTHY, 2, 2), (REJECTED, 2, 2)],
)
def test_start_that_is_taken_back_is_counted_no_more(health: str, before: int, after: int) -> None:
    taken = transitions.undo_start(state(put("2", health, before), put("1", UNPROVEN, 1)), "2")
    assert [item.begun for item in taken.installed] == [after, 1]


def test_confirmed_version_is_healthy_and_its_starts_are_forgotten() -> None:
    assert transitions.confirm(state(put("2", UNPROVEN, 2)), "2").active == put("2")


def test_spare_version_on_trial_is_confirmed_too() -> None:
    assert transitions.confirm(state(put("2"), put("1", UNPROVEN, 1)), "1").spare == put("1")


def test_rejected_version_that_is_current_is_confirmed_and_its_rejection_forgotten() -> None:
    before = state(put("2", REJECTED), rejected=(refused("1"), refused("2")))
    assert transitions.confirm(before, "2") == state(put("2"), rejected=(refused("1"),))


@pytest.mark.parametrize(
    "before",
    [
        state(put("1"), put("2", REJECTED), rejected=(refused("2"),)),
        state(put("2", REJECTED), None, FACTORY, rejected=(refused("2"),)),
        state(put("1"), rejected=(refused("1"),)),
        state(),
    ],
    ids=["spare", "behind the factory package", "not installed", "nothing installed"],
)
def test_confirmation_of_what_is_not_current_changes_nothing(before: ModelState) -> None:
    assert transitions.confirm(before, "2") == before


def test_rejected_version_gives_its_place_to_the_previous_one() -> None:
    after = transitions.reject(state(put("2", UNPROVEN, 2), put("1")), "2", "wrong")
    assert after == state(put("1"), put("2", REJECTED), rejected=(refused("2"),))


def test_rejected_version_keeps_its_place_before_the_factory_package() -> None:
    after = transitions.reject(state(put("2"), None, FACTORY), "2", "wrong")
    assert after == state(put("2", REJECTED), None, FACTORY, rejected=(refused("2"),))
    assert after.current == FACTORY


def test_spare_version_that_is_rejected_stays_the_spare_one() -> None:
    after = transitions.reject(state(put("2"), put("1"), FACTORY), "1", "wrong")
    assert (after.active, after.spare) == (put("2"), put("1", REJECTED))


def test_rejection_of_a_version_that_is_not_installed_changes_nothing() -> None:
    before = state(put("2"), put("1"), FACTORY, pinned="9")
    assert transitions.reject(before, "9", "wrong") == before


def test_second_rejection_of_a_version_takes_the_place_of_the_first() -> None:
    before = state(put("2"), rejected=(refused("2", "once"), refused("1")))
    assert transitions.reject(before, "2", "twice").rejected == (refused("1"), refused("2", "twice"))


@pytest.mark.parametrize(("kept", "first"), [(14, "r0"), (15, "r0"), (16, "r1")])
def test_rejections_beyond_sixteen_are_forgotten_oldest_first(kept: int, first: str) -> None:
    before = state(put("2"), rejected=tuple(refused(f"r{number}") for number in range(kept)))
    rejected = transitions.reject(before, "2", "wrong").rejected
    assert (len(rejected), rejected[0].version, rejected[-1].version) == (min(kept + 1, 16), first, "2")


@pytest.mark.parametrize(("length", "kept"), [(499, 499), (500, 500), (501, 500)])
def test_reason_is_kept_up_to_its_bound(length: int, kept: int) -> None:
    (rejection,) = transitions.reject(state(put("2")), "2", "x" * length).rejected
    assert rejection.reason == "x" * kept


@pytest.mark.parametrize(("pinned", "after"), [("2", None), ("1", "1"), (None, None)])
def test_pin_on_a_rejected_version_alone_is_gone(pinned: str | None, after: str | None) -> None:
    assert transitions.reject(state(put("2"), put("1"), pinned=pinned), "2", "wrong").pinned == after


def test_pin_holds_the_current_version_until_it_is_taken_off() -> None:
    pinned = transitions.pin(state(put("2"), put("1")), True)
    assert (pinned.pinned, transitions.pin(pinned, False).pinned) == ("2", None)


def test_pin_without_a_version_is_refused() -> None:
    with pytest.raises(SlotError, match="linear: nothing is installed that could be pinned"):
        transitions.pin(state(), True)


def test_factory_package_is_healthy_from_the_start_and_remains_as_it_is() -> None:
    added = transitions.add_factory(state(put("2")), put("0", UNPROVEN), Permissions())
    assert added == state(put("2"), None, FACTORY)
    assert transitions.add_factory(added, put("0", UNPROVEN), Permissions()) == added


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (state(factory=put("1")), "factory package is 1 and remains; install 0 without --factory"),
        (state(rejected=(refused("0"),)), "linear 0: was rejected here, so it cannot be the factory package"),
        (state(replace(put("0"), sha256=digest("9"))), "version 0 is known here with manifest sha256"),
    ],
)
def test_factory_package_that_contradicts_the_state_is_refused(before: ModelState, reason: str) -> None:
    with pytest.raises(SlotError, match=reason):
        transitions.add_factory(before, put("0", UNPROVEN), Permissions())


NEW = put("3", UNPROVEN)


@pytest.mark.parametrize(
    ("before", "spare"),
    [
        (state(put("2"), put("1")), "2"),
        (state(put("2", UNPROVEN), put("1")), "1"),
        (state(put("2", UNPROVEN), put("1", UNPROVEN)), "2"),
        (state(put("2", REJECTED), put("1", UNPROVEN)), "1"),
        (state(put("2", REJECTED), put("1", REJECTED)), None),
        (state(put("2", UNPROVEN)), "2"),
        (state(), None),
    ],
)
def test_new_version_leaves_the_best_proven_one_in_the_other_slot(
    before: ModelState, spare: str | None
) -> None:
    after = transitions.add(before, NEW, Permissions())
    assert (after.active, after.spare and after.spare.version) == (NEW, spare)


@pytest.mark.parametrize(
    ("known", "after"),
    [
        (put("3"), put("3")),
        (put("3", UNPROVEN, 2), put("3", UNPROVEN, 2)),
        (put("3", REJECTED, 2), put("3", UNPROVEN, 0)),
    ],
)
def test_version_that_lies_in_the_other_slot_is_active_as_it_was_known(
    known: Installed, after: Installed
) -> None:
    added = transitions.add(state(put("2"), known), NEW, Permissions())
    assert (added.active, added.spare) == (after, put("2"))


@pytest.mark.parametrize("other", ["8", "2"], ids=["lower digest", "higher digest"])
def test_version_in_use_stays_in_the_other_slot_whatever_its_digest(other: str) -> None:
    assert digest("8") < digest("3") < digest("2")
    assert transitions.add(state(put(other)), NEW, Permissions(downgrade=True)).spare == put(other)


def test_version_that_runs_as_the_factory_package_takes_no_slot() -> None:
    before = state(factory=FACTORY, rejected=(refused("1"), refused("0")))
    after = transitions.add(before, put("0", UNPROVEN), Permissions(pin=True, retry=True))
    assert after == state(factory=FACTORY, pinned="0", rejected=(refused("1"),))


def test_factory_version_that_does_not_run_takes_a_slot() -> None:
    after = transitions.add(state(put("2"), None, FACTORY), put("0", UNPROVEN), Permissions(downgrade=True))
    assert (after.active, after.spare) == (put("0", UNPROVEN), put("2"))


REFUSALS: dict[str, tuple[ModelState, str]] = {
    "pin": (state(put("2"), pinned="2"), "linear 3: the model is pinned to 2; move the pin with --pin"),
    "retry": (state(put("2"), rejected=(refused("3"),)), "linear 3: was rejected here: wrong; --retry"),
    "downgrade": (state(put("4")), "linear 3: is older than 4, which is active; see --allow-downgrade"),
}


@pytest.mark.parametrize("permission", REFUSALS)
def test_what_an_installation_may_not_do_is_refused_without_its_permission(permission: str) -> None:
    before, reason = REFUSALS[permission]
    others = {name: name != permission for name in REFUSALS}
    with pytest.raises(SlotError, match=reason):
        transitions.add(before, NEW, Permissions(**others))


@pytest.mark.parametrize("permission", REFUSALS)
def test_what_an_installation_may_do_is_done_with_its_permission(permission: str) -> None:
    before, _ = REFUSALS[permission]
    after = transitions.add(before, NEW, Permissions(**{permission: True}))
    assert (after.active, after.rejected) == (NEW, ())
    assert after.pinned == ("3" if permission == "pin" else None)


def test_pinned_version_itself_is_installed_again() -> None:
    before = state(put("3"), pinned="3")
    assert transitions.add(before, NEW, Permissions()) == before


@pytest.mark.parametrize(
    "known",
    [
        state(replace(put("3"), sha256=digest("9"))),
        state(put("2"), replace(put("3"), sha256=digest("9"))),
        state(put("2"), None, replace(put("3"), sha256=digest("9"))),
        state(put("2"), rejected=(refused("1"), replace(refused("3"), sha256=digest("9")))),
    ],
    ids=["active", "spare", "factory", "rejected"],
)
def test_other_content_under_a_known_version_is_refused(known: ModelState) -> None:
    with pytest.raises(SlotError, match=f"version 3 is known here with manifest sha256 {digest('9')}, this"):
        transitions.add(known, NEW, Permissions(pin=True, downgrade=True, retry=True))
