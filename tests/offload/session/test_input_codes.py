"""Inputs that the codes of a plan cannot carry go another way: photographs that are none, and spikes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from tests.offload.session.planned_package import (
    Array,
    make_model,
    make_pictures,
    offloading_to,
    serving,
    write_planned,
)
from tests.waiting import SHARED_S

from edgekit_offload.partition.calibrate import SOUND, find_bytes, find_series
from edgekit_offload.partition.coding import Lattice
from edgekit_runtime.errors import DataError, RefusedInputError
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.offload.session.plan_runner import PlanRunner
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.archive import OpenedPackage, read_package
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.trust.trust_store import TrustStore

PICTURES = make_pictures(4, seed=3)
Offload = Callable[[str, str], AbstractContextManager[RemoteSession]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("codes")
    write_planned(made)
    write_planned(made, is_whole=False)
    return made


def find_package(folder: Path, kind: str) -> Path:
    (package,) = (folder / kind).glob("*.edgepkg")
    return package


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    """Address of a service with the tails, which both packages have."""
    with serving(folder, folder, "--tails", find_package(folder, "planned"), limit_s=SHARED_S) as address:
        yield address


@pytest.fixture
def offload(server: str, folder: Path, tmp_path: Path) -> Offload:
    """Opens a session of a kind of package that runs a plan."""
    return lambda kind, plan: offloading_to(server, folder, find_package(folder, kind), plan, tmp_path)


def off_the_grid(image: Array) -> Array:
    """Return a picture whose values lie between the codes of 8 bits, as resizing leaves them."""
    return (image + np.roll(image, 1, axis=-1) * np.float32(0.5)) / np.float32(1.5)


@pytest.mark.parametrize("plan", ["uint8", "jpeg"])
def test_picture_that_is_none_of_8_bits_is_not_rounded(offload: Offload, plan: str) -> None:
    image = PICTURES[:1]
    whole = OrtSession(make_model(), OrtOptions(threads=1))
    with offload("planned", plan) as session:
        session.run({"image": image})
        assert session.counts.remote == 1
        for other in (off_the_grid(image), image + 2, image * np.float32("nan")):
            found, expected = (one.run({"image": other})["logits"] for one in (session, whole))
            np.testing.assert_array_equal(found, expected)
        assert session.counts.remote == 1


@pytest.mark.parametrize("plan", ["raw", "cut3-int8", "cut5"])
def test_what_is_not_finite_is_computed_here_and_nobody_is_blamed(offload: Offload, plan: str) -> None:
    dead, infinite = PICTURES[:1].copy(), PICTURES[:1] * np.float32("inf")
    dead[0, 0, 0, 0] = np.nan
    overflowing = [] if plan == "raw" else [PICTURES[:1] * np.float32(3e38)]  # in the head
    whole = OrtSession(make_model(), OrtOptions(threads=1))
    with offload("planned", plan) as session:
        for image in (dead, infinite, *overflowing):
            found, expected = (one.run({"image": image})["logits"] for one in (session, whole))
            np.testing.assert_array_equal(found, expected)
            assert session.decision().plan.name == plan
        assert session.counts.failed == 0


def test_device_that_cannot_run_the_model_refuses_what_is_not_finite(offload: Offload) -> None:
    with offload("split-only", "cut3-int8") as session:
        with pytest.raises(DataError, match="not finite"):
            session.run({"image": PICTURES[:1] * np.float32("nan")})
        with pytest.raises(RefusedInputError, match="not finite"):
            session.run({"image": PICTURES[:1] * np.float32(3e38)})
        session.run({"image": PICTURES[:1]})
        assert session.counts.remote == 1


def test_device_that_cannot_run_the_model_sends_such_a_picture_by_another_plan(offload: Offload) -> None:
    other = off_the_grid(PICTURES[:1])
    expected = OrtSession(make_model(), OrtOptions(threads=1)).run({"image": other})["logits"]
    with offload("split-only", "uint8") as session:
        found = session.run({"image": other})["logits"]
        np.testing.assert_allclose(
            found, expected, rtol=0, atol=0.02 * np.ptp(expected)
        )  # by 8 bits at worst
        for way in session.state.runners.values():
            way.carries = lambda _: False  # type: ignore[method-assign]
        with pytest.raises(DataError, match="no other plan"):
            session.run({"image": other})


@pytest.fixture(scope="module")
def package(folder: Path) -> Iterator[OpenedPackage]:
    with read_package(find_package(folder, "planned"), TrustStore.from_folder(folder / "keys")) as package:
        yield package


def carrier(package: OpenedPackage, lattice: Lattice) -> Callable[[Array], bool]:
    """Return a function that says whether a plan of the device with these codes takes an input."""
    plan = OffloadPlan("raw", PlanCosts(0.0), tail="pictures", codes={"image": lattice.codes})
    runner = PlanRunner(plan, package, 1)
    return lambda x: runner.carries({"image": x})


@pytest.mark.parametrize("channels_first", [False, True])
def test_every_picture_behind_the_same_preprocessing_is_taken(
    package: OpenedPackage, *, channels_first: bool
) -> None:
    pixels = np.random.default_rng(4).integers(0, 256, (24, 20, 24, 3)).astype(np.float32)
    mean, std = (np.float32(one) for one in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    x = (pixels / np.float32(255) - mean) / std
    x = np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if channels_first else x
    lattice = find_bytes(x[:1])
    assert lattice is not None
    carries = carrier(package, lattice)
    assert all(carries(one[None]) for one in x)
    for wrong in (x[:1] + np.float32(0.004), x[:1] * np.float32(1.2), x[:1] - 3):
        assert not carries(wrong)


def test_sound_is_rounded_and_series_are_where_their_samples_were(package: OpenedPackage) -> None:
    generator = np.random.default_rng(5)
    sound = generator.uniform(-1, 1, (1, 4000)).astype(np.float32)
    sound[0, 0] = 1.0  # a step beyond the codes
    assert carrier(package, SOUND)(sound)
    assert not carrier(package, SOUND)(sound * np.float32(1.01))
    steps = generator.integers(-9, 10, (5, 3, 64)).cumsum(2).astype(np.float32)
    carries = carrier(package, find_series(steps))
    assert carries(steps + 30)  # a quarter of their span
    assert not carries(steps + 60)
    assert not carries(steps + np.float32(0.3))


@pytest.mark.parametrize("find", [find_bytes, find_series])
@pytest.mark.parametrize("steps", [1, 3, 40])
def test_coarse_grid_is_checked_for_every_value_and_little_beyond_the_samples(
    package: OpenedPackage, find: Callable[[Array], Lattice | None], steps: int
) -> None:
    """A mask of 0 and 1: half a step is half of its range, so that no value may lie between the codes."""
    generator = np.random.default_rng(6)
    masks = generator.integers(0, steps + 1, (8, 3, 200, 300)).astype(np.float32)
    lattice = find(masks if find is find_bytes else masks.reshape(8, 3, -1))
    assert lattice is not None
    carries = carrier(package, lattice)
    assert carries(masks[:1])
    for place in generator.integers(0, masks[0].size, 6):
        for wrong in (0.5, steps * 1.25 + 1, -steps * 0.25 - 1):
            x = masks[:1].copy()
            x.reshape(-1)[place] = wrong
            assert not carries(x)


def test_dark_channel_of_the_samples_says_nothing_of_bright_values_there(package: OpenedPackage) -> None:
    steps = (np.float32([1, 1.37, 1]) / 255).reshape(3, 1, 1)  # so that each channel has its grid
    most = np.array([255, 255, 100]).reshape(3, 1, 1)
    x = np.random.default_rng(7).integers(0, most + 1, (8, 3, 64, 64)).astype(np.float32) * steps
    lattice = find_bytes(x)
    assert lattice is not None
    carries = carrier(package, lattice)
    for channel, code, is_carried in [(0, 255, True), (1, 255, True), (2, 120, True), (2, 130, False)]:
        image = x[:1].copy()
        image[0, channel, 3, 5] = np.float32(code) * steps[channel, 0, 0]
        assert carries(image) == is_carried
