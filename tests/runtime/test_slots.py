"""Installing, starting, confirming, rejecting and rolling back, through the public interface."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.slot_cases import rewrite_state

from edgekit_runtime.errors import DigestError, PackageError, SignatureError, SlotError, UnavailableError
from edgekit_runtime.package.version_order import is_older
from edgekit_runtime.slots import MAX_BEGUN, Choice, Permissions, Slots
from edgekit_runtime.trust.dsse import Statement

MakePackage = Callable[..., Path]


@pytest.fixture
def package(maker: Any, tmp_path: Path) -> MakePackage:
    """Makes a signed package of a version."""

    def make(version: str, **changes: Any) -> Path:
        path = tmp_path / f"given-{version}.edgepkg"
        maker.write(path, version=version, **changes)
        return path

    return make


@pytest.fixture
def slots(maker: Any, tmp_path: Path) -> Slots:
    return Slots(tmp_path / "state", maker.trust)


def close(choice: Choice | None) -> Choice:
    assert choice is not None
    choice.package.close()
    return choice


def start(slots: Slots, model: str = "linear") -> str:
    return close(slots.begin_start(model)).version


def prove(slots: Slots, package: Path) -> None:
    """Install a package, start it and confirm it."""
    version = slots.install(package).version
    assert start(slots) == version
    slots.confirm("linear", version)


def packages_of(slots: Slots) -> list[str]:
    return sorted(path.name.split("-")[1] for path in (slots.folder / "models/linear").glob("*.edgepkg"))


class AbsentVerifier:
    """One whose process has ended."""

    def verify(self, _envelope: bytes, _predicate_type: str, _where: str) -> tuple[Statement, str]:
        raise UnavailableError("ended before it answered")


def test_what_cannot_be_verified_now_does_not_give_way_to_another_version(
    slots: Slots, package: MakePackage
) -> None:
    for version in ("1.0.0", "2.0.0"):
        prove(slots, package(version))
    before = slots.load("linear")
    without = dataclasses.replace(slots, trust=AbsentVerifier())
    for choose in (without.choose, without.begin_start):
        with pytest.raises(UnavailableError):
            choose("linear")
    assert slots.load("linear") == before
    assert start(slots) == "2.0.0"


def test_a_failure_is_recorded_where_no_other_version_can_be_verified_now(
    slots: Slots, package: MakePackage
) -> None:
    for version in ("1.0.0", "2.0.0"):
        prove(slots, package(version))
    without = dataclasses.replace(slots, trust=AbsentVerifier())
    with pytest.raises(UnavailableError):
        without.reject("linear", "2.0.0", "fails")
    assert start(slots) == "1.0.0"


def test_what_cannot_be_verified_now_is_left_out_of_no_state(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    lost = slots.folder / "models/linear/state.json"
    lost.unlink()
    without = dataclasses.replace(slots, trust=AbsentVerifier())
    for use in (without.load, without.begin_start, lambda model: without.confirm(model, "1.0.0")):
        with pytest.raises(UnavailableError):
            use("linear")
        assert not lost.exists()
    assert start(slots) == "1.0.0"


def test_a_device_without_state_has_no_models(slots: Slots) -> None:
    assert (slots.models(), slots.folder.exists()) == ((), False)


def test_an_installed_package_is_what_is_opened(slots: Slots, package: MakePackage) -> None:
    receipt = slots.install(package("1.0.0"))
    choice = close(slots.choose("linear"))
    assert (receipt.active, choice.version, choice.health, choice.begun) == (True, "1.0.0", "unproven", 0)
    assert slots.models() == ("linear",)


def test_the_chosen_package_is_open_and_verified(slots: Slots, package: MakePackage, maker: Any) -> None:
    slots.install(package("1.0.0"))
    with slots.begin_start("linear").package as opened:
        assert bytes(opened.read("labels.txt")) == maker.artifacts["labels.txt"]


def test_an_asked_version_is_opened_whichever_is_active(slots: Slots, package: MakePackage) -> None:
    for version in ("1.0.0", "2.0.0"):
        prove(slots, package(version))
    for version in ("1.0.0", "2.0.0"):
        assert close(slots.choose("linear", version)).version == version
    for version in ("0.9.0", "1.5.0", "3.0.0"):
        with pytest.raises(SlotError, match=rf"version {version} is not installed, there are: 1.0.0, 2.0.0"):
            slots.choose("linear", version)


def test_an_asked_version_that_was_rejected_says_why(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    slots.install(package("2.0.0"))
    close(slots.reject("linear", "2.0.0", "fails here"))
    with pytest.raises(SlotError, match=r"linear 2\.0\.0: was rejected here: fails here"):
        slots.choose("linear", "2.0.0")
    with pytest.raises(SlotError, match=r"version 3\.0\.0 is not installed"):
        slots.choose("linear", "3.0.0")
    assert close(slots.choose("linear", "1.0.0")).version == "1.0.0"


def test_a_new_version_is_active_and_the_old_one_waits(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    slots.install(package("2.0.0"))
    assert start(slots) == "2.0.0"
    assert packages_of(slots) == ["1.0.0", "2.0.0"]


def test_a_third_version_takes_the_slot_of_the_oldest(slots: Slots, package: MakePackage) -> None:
    for version in ("1.0.0", "2.0.0", "3.0.0"):
        prove(slots, package(version))
    assert packages_of(slots) == ["2.0.0", "3.0.0"]


def test_a_version_on_trial_gives_way_before_the_proven_one(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    slots.install(package("2.0.0"))
    slots.install(package("3.0.0"))
    assert packages_of(slots) == ["1.0.0", "3.0.0"]


def test_where_none_has_proved_itself_the_version_before_waits(slots: Slots, package: MakePackage) -> None:
    slots.install(package("1.0.0"))
    slots.install(package("2.0.0"))
    assert packages_of(slots) == ["1.0.0", "2.0.0"]
    slots.rollback("linear")
    assert start(slots) == "1.0.0"


def test_a_version_that_is_begun_too_often_gives_way_to_the_previous_one(
    slots: Slots, package: MakePackage
) -> None:
    prove(slots, package("1.0.0"))
    slots.install(package("2.0.0"))
    # A new object each time, as after a crash of the whole service.
    again = [start(Slots(slots.folder, slots.trust)) for _ in range(MAX_BEGUN + 1)]
    assert again == ["2.0.0"] * MAX_BEGUN + ["1.0.0"]
    (rejection,) = slots.load("linear").state.rejected
    assert (rejection.version, rejection.reason) == ("2.0.0", "was begun 3 times and never confirmed")


def test_a_confirmed_version_is_never_counted(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    prove(slots, package("2.0.0"))
    before = (slots.folder / "models/linear/state.json").stat().st_ino
    assert {start(slots) for _ in range(MAX_BEGUN * 2)} == {"2.0.0"}
    assert (slots.folder / "models/linear/state.json").stat().st_ino == before


def test_a_choice_says_in_which_place_it_lies(slots: Slots, package: MakePackage) -> None:
    slots.install(package("0.9.0"), factory=True)
    said = [close(slots.begin_start("linear")).why]
    slots.install(package("1.0.0"))
    said.append(close(slots.begin_start("linear")).why)
    slots.confirm("linear", "1.0.0")
    said.append(close(slots.begin_start("linear")).why)
    slots.install(package("2.0.0"))
    next((slots.folder / "models/linear").glob("slot-2.0.0-*")).write_bytes(b"")
    said.append(close(slots.begin_start("linear")).why.split(";")[0])
    assert said == ["factory", "active, on trial", "active", "previous"]


def test_choosing_records_nothing(slots: Slots, package: MakePackage) -> None:
    slots.install(package("1.0.0"))
    for _ in range(MAX_BEGUN * 2):
        close(slots.choose("linear"))
    assert close(slots.begin_start("linear")).begun == 1


def test_a_failed_self_test_brings_the_previous_version_back(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    slots.install(package("2.0.0"))
    start(slots)
    instead = close(slots.reject("linear", "2.0.0", "output 'y': 2 of 2 values differ"))
    assert (instead.version, start(slots)) == ("1.0.0", "1.0.0")


def test_a_version_that_fails_alone_leaves_nothing_until_the_next_start(
    slots: Slots, package: MakePackage
) -> None:
    slots.install(package("1.0.0"))
    start(slots)
    assert slots.reject("linear", "1.0.0", "wrong outputs") is None
    choice = close(slots.begin_start("linear"))
    assert (choice.version, choice.health) == ("1.0.0", "rejected")
    assert "nothing else" in choice.why


def test_a_rejected_version_that_proves_itself_alone_is_healthy_again(
    slots: Slots, package: MakePackage
) -> None:
    slots.install(package("1.0.0"))
    slots.reject("linear", "1.0.0", "the engine was missing")
    start(slots)
    slots.confirm("linear", "1.0.0")
    state = slots.load("linear").state
    assert (close(slots.choose("linear")).health, state.rejected) == ("healthy", ())


def test_the_factory_package_comes_back_when_all_else_fails(slots: Slots, package: MakePackage) -> None:
    slots.install(package("0.9.0"), factory=True)
    assert start(slots) == "0.9.0"
    slots.install(package("1.0.0"))
    start(slots)
    assert close(slots.reject("linear", "1.0.0", "wrong")).version == "0.9.0"
    assert slots.reject("linear", "0.9.0", "wrong too") is None
    assert start(slots) == "0.9.0"


def test_the_factory_package_remains(slots: Slots, package: MakePackage) -> None:
    slots.install(package("0.9.0"), factory=True)
    with pytest.raises(SlotError, match=r"factory package is 0\.9\.0 and remains"):
        slots.install(package("1.0.0"), factory=True)
    for version in ("1.0.0", "2.0.0", "3.0.0"):
        prove(slots, package(version))
    assert packages_of(slots) == ["0.9.0", "2.0.0", "3.0.0"]
    (factory,) = (slots.folder / "models/linear").glob("factory-*")
    assert factory.stat().st_mode & 0o777 == 0o400


def test_a_package_that_runs_as_factory_needs_no_slot(slots: Slots, package: MakePackage) -> None:
    slots.install(package("0.9.0"), factory=True)
    assert slots.install(package("0.9.0")).active
    assert slots.load("linear").state.active is None


def test_a_rollback_goes_back_one_by_one(slots: Slots, package: MakePackage) -> None:
    slots.install(package("0.9.0"), factory=True)
    for version in ("1.0.0", "2.0.0"):
        prove(slots, package(version))
    slots.rollback("linear")
    assert start(slots) == "1.0.0"
    slots.rollback("linear")
    assert start(slots) == "0.9.0"
    with pytest.raises(SlotError, match="no previous version"):
        slots.rollback("linear")


def test_a_rollback_to_a_damaged_version_changes_nothing(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    prove(slots, package("2.0.0"))
    next((slots.folder / "models/linear").glob("slot-1.0.0-*")).write_bytes(b"")
    before = slots.load("linear")
    with pytest.raises(PackageError):
        slots.rollback("linear")
    assert (slots.load("linear"), start(slots)) == (before, "2.0.0")


def test_a_late_confirmation_does_not_bring_back_what_was_rolled_back(
    slots: Slots, package: MakePackage
) -> None:
    prove(slots, package("1.0.0"))
    slots.install(package("2.0.0"))
    start(slots)
    slots.rollback("linear")
    slots.confirm("linear", "2.0.0")
    spare = slots.load("linear").state.spare
    assert spare is not None
    assert (spare.health, start(slots)) == ("rejected", "1.0.0")


def test_a_confirmation_of_a_version_that_has_left_does_nothing(slots: Slots, package: MakePackage) -> None:
    slots.install(package("1.0.0"))
    slots.confirm("linear", "0.1.0")
    assert close(slots.choose("linear")).health == "unproven"


def test_a_rejected_version_is_installed_again_only_on_demand(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    slots.install(package("2.0.0"))
    slots.reject("linear", "2.0.0", "wrong outputs")
    with pytest.raises(SlotError, match="was rejected here: wrong outputs; --retry"):
        slots.install(package("2.0.0"))
    slots.install(package("2.0.0"), Permissions(retry=True))
    assert close(slots.begin_start("linear")).version == "2.0.0"
    assert slots.load("linear").state.rejected == ()


def test_an_older_version_is_refused_unless_allowed(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.10.0"))
    with pytest.raises(SlotError, match=r"is older than 1\.10\.0, which is active; see --allow-downgrade"):
        slots.install(package("1.9.0"))
    slots.install(package("1.9.0"), Permissions(downgrade=True))
    assert start(slots) == "1.9.0"


def test_the_same_version_with_other_content_is_refused(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    with pytest.raises(SlotError, match=r"version 1\.0\.0 is known here"):
        slots.install(package("1.0.0", budget={}))


def test_a_rejected_version_with_other_content_is_refused_too(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    slots.install(package("2.0.0"))
    slots.reject("linear", "2.0.0", "wrong")
    slots.install(package("3.0.0"))
    with pytest.raises(SlotError, match=r"version 2\.0\.0 is known here"):
        slots.install(package("2.0.0", budget={}), Permissions(retry=True, downgrade=True))


def test_installing_the_active_package_again_mends_it(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    stored = next((slots.folder / "models/linear").glob("slot-*"))
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(SlotError, match="no version can be opened"):
        slots.choose("linear")
    slots.install(package("1.0.0"))
    assert close(slots.choose("linear")).health == "healthy"


def test_a_pinned_model_stays_at_its_version(slots: Slots, package: MakePackage) -> None:
    slots.install(package("1.0.0"), Permissions(pin=True))
    with pytest.raises(SlotError, match=r"pinned to 1\.0\.0"):
        slots.install(package("2.0.0"))
    slots.install(package("2.0.0"), Permissions(pin=True))
    assert slots.load("linear").state.pinned == "2.0.0"
    slots.pin("linear", False)
    slots.install(package("3.0.0"))
    assert start(slots) == "3.0.0"


def test_a_pinned_version_that_fails_loses_its_pin(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    slots.install(package("2.0.0"), Permissions(pin=True))
    assert close(slots.reject("linear", "2.0.0", "wrong")).version == "1.0.0"
    assert slots.load("linear").state.pinned is None


def test_a_specific_version_is_taken_or_nothing(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    prove(slots, package("2.0.0"))
    assert close(slots.choose("linear", "1.0.0")).version == "1.0.0"
    with pytest.raises(SlotError, match=r"version 3\.0\.0 is not installed, there are: 1\.0\.0, 2\.0\.0"):
        slots.choose("linear", "3.0.0")
    slots.rollback("linear")
    with pytest.raises(SlotError, match=r"2\.0\.0: was rejected here: was rolled back by hand"):
        slots.begin_start("linear", "2.0.0")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_active_version_gives_way_to_the_previous_one(
    damage: str, slots: Slots, package: MakePackage
) -> None:
    prove(slots, package("1.0.0"))
    prove(slots, package("2.0.0"))
    stored = next((slots.folder / "models/linear").glob("slot-2.0.0-*"))
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "missing":
        stored.unlink()
    else:
        stored.write_bytes(data if damage == "flipped" else data[:1000])
    choice = close(slots.begin_start("linear"))
    assert (choice.version, choice.health) == ("1.0.0", "healthy")
    assert "2.0.0: " in choice.why


def test_packages_of_a_key_that_is_not_trusted_any_more_are_not_opened(
    slots: Slots, package: MakePackage, other_signer: Any, maker: Any
) -> None:
    prove(slots, package("1.0.0"))
    with pytest.raises(SlotError, match="no version can be opened"):
        Slots(slots.folder, type(maker.trust)([])).choose("linear")


def test_a_package_of_a_stranger_is_refused_before_anything_is_written(
    slots: Slots, maker: Any, other_signer: Any, tmp_path: Path
) -> None:
    stranger = type(maker)(other_signer, maker.trust, maker.artifacts, maker.roles)
    stranger.write(tmp_path / "x.edgepkg")
    with pytest.raises(SignatureError):
        slots.install(tmp_path / "x.edgepkg")
    assert not slots.folder.exists()


def test_a_damaged_package_is_refused_before_anything_is_written(
    slots: Slots, package: MakePackage, maker: Any
) -> None:
    path = package("1.0.0")
    data = bytearray(path.read_bytes())
    data[maker.layout(bytes(data))["model.onnx"].payload_offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError):
        slots.install(path)
    assert not slots.folder.exists()


def test_a_package_for_another_target_is_refused(slots: Slots, package: MakePackage) -> None:
    with pytest.raises(SlotError, match="is for target 'x86-64', this device is 'rpi5'"):
        Slots(slots.folder, slots.trust, "rpi5").install(package("1.0.0"))


def test_fields_of_a_later_edgekit_survive_a_change(slots: Slots, package: MakePackage) -> None:
    prove(slots, package("1.0.0"))
    path = slots.folder / "models/linear/state.json"
    body = json.loads(path.read_bytes())
    body["shadow"] = {"share": 0.1}
    body["active"]["note"] = "kept"
    rewrite_state(path, body)
    slots.install(package("2.0.0"))
    after = json.loads(path.read_bytes())
    assert (after["shadow"], after["spare"]["note"]) == ({"share": 0.1}, "kept")


def test_a_reason_that_is_long_and_no_text_is_kept_all_the_same(slots: Slots, package: MakePackage) -> None:
    for number in range(20):
        slots.install(package(f"{number}.0.0"))
        slots.reject("linear", f"{number}.0.0", "\udcff" + "\U0001f600" * 10_000)
    loaded = slots.load("linear")
    assert (loaded.problem, len(loaded.state.rejected)) == (None, 16)
    assert loaded.state.rejected[-1].reason.startswith("?\U0001f600")


def test_a_rejected_version_cannot_be_the_factory_package(slots: Slots, package: MakePackage) -> None:
    slots.install(package("1.0.0"))
    slots.reject("linear", "1.0.0", "wrong")
    with pytest.raises(SlotError, match="so it cannot be the factory package"):
        slots.install(package("1.0.0"), factory=True)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("1.9.0", "1.10.0"),
        ("1", "1.0.1"),
        ("2.0-rc1", "2.0"),
        ("2.0-rc9", "2.0-rc10"),
        ("2.0-1", "2.0-alpha"),
        ("v1.2", "1.3"),
        ("2026-11-21", "2026-11-22"),
        ("1.0", "1.0b"),
        ("9" * 60, "1" + "0" * 60),
    ],
)
def test_versions_are_ordered_by_their_numbers(older: str, newer: str) -> None:
    assert (is_older(older, newer), is_older(newer, older)) == (True, False)


@pytest.mark.parametrize(("one", "other"), [("1.0", "1"), ("1.0+a", "1.0+b"), ("v2", "2.0.0"), ("a", "a")])
def test_versions_of_one_order_are_not_older(one: str, other: str) -> None:
    assert (is_older(one, other), is_older(other, one)) == (False, False)


def test_candidates_are_listed_best_first_without_being_opened(
    maker: Any, tmp_path: Path, slots: Slots
) -> None:
    for version in ("1.0.0", "2.0.0"):
        maker.write(tmp_path / version, version=version)
        slots.install(tmp_path / version)
        slots.confirm("linear", version)
    listed = slots.list_candidates("linear")
    assert [item.version for item, _ in listed] == ["2.0.0", "1.0.0"]
    for _, path in listed:
        path.write_bytes(b"damaged")
    assert slots.list_candidates("linear") == listed
    ((item, _),) = slots.list_candidates("linear", "1.0.0")
    assert item.version == "1.0.0"
    with pytest.raises(SlotError, match="version 3"):
        slots.list_candidates("linear", "3.0.0")


def test_model_of_which_nothing_is_left_has_no_candidates(maker: Any, tmp_path: Path, slots: Slots) -> None:
    maker.write(tmp_path / "linear.edgepkg")
    slots.install(tmp_path / "linear.edgepkg")
    ((_, path),) = slots.list_candidates("linear")
    path.unlink()
    (path.parent / "state.json").write_bytes(b"damaged")
    with pytest.raises(SlotError, match="nothing is installed"):
        slots.list_candidates("linear")
