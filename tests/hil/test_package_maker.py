"""Packages of benches: shared between runs at one time, and made for the target that a user has now."""

import dataclasses
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgekit_hil.tests.models import PackageMaker
from edgekit_runtime.errors import BenchError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.measurement.arithmetic import measures_here
from edgekit_toolkit.targets.loader import find_user_targets, load_target
from edgekit_toolkit.targets.writer import write_target

pytestmark = pytest.mark.usefixtures("copied_commands")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Folders of the packages and of the user's targets, which the tests share."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("EDGEKIT_CACHE", str(folder / "cache"))
        environment.setenv("EDGEKIT_HOME", str(folder / "home"))
        yield


@pytest.fixture(scope="module")
def made(cache: None, copied_commands: None) -> tuple[PackageMaker, list[Path]]:
    """A maker, and the package that it and another one made at one time."""
    makers = PackageMaker(), PackageMaker()
    with ThreadPoolExecutor(2) as pool:
        packages = pool.map(lambda maker: maker.make("italy_power_mlp", "x86-64", "ort"), makers)
        return makers[0], list(packages)


@pytest.fixture(scope="module")
def own_target(made: tuple[PackageMaker, list[Path]]) -> tuple[str, Path]:
    """The error of a run that took too long, and the next run's package, for a target of the user."""
    board = dataclasses.replace(load_target("rpi5"), name="my-board", aliases=())
    write_target(find_user_targets() / "my-board.toml", board)
    with pytest.raises(BenchError) as too_long:
        PackageMaker(limit_s=0.01).make("italy_power_mlp", "my-board", "ort")
    return str(too_long.value), PackageMaker().make("italy_power_mlp", "my-board", "ort")


def test_runs_side_by_side_share_one_key_and_one_package(made: tuple[PackageMaker, list[Path]]) -> None:
    maker, packages = made

    assert packages[0] == packages[1]
    with read_package(packages[0], TrustStore.from_folder(maker.home / "keys")) as opened:
        assert opened.manifest.name == "italy_power_mlp"


def test_package_that_takes_too_long_is_an_error_and_made_by_the_next_run(
    own_target: tuple[str, Path],
) -> None:
    error, package = own_target

    assert re.search(r"`edgekit package .* did not end within 0\.01 s", error)
    assert package.is_file()


def test_package_is_made_for_a_target_of_the_user(own_target: tuple[str, Path]) -> None:
    _, first = own_target
    packages, board = PackageMaker(), load_target(str(find_user_targets() / "my-board.toml"))

    again = packages.make("italy_power_mlp", "my-board", "ort")
    write_target(find_user_targets() / "my-board.toml", dataclasses.replace(board, notes="changed"))
    other = packages.make("italy_power_mlp", "my-board", "ort")

    assert first.name == "italy_power_mlp-1.0.0-my-board.edgepkg"
    assert again == first
    assert other.parent != first.parent
    promise = packages.read_promise(first, "latency_ms")
    assert (promise.label, promise.source) == ("modelled", "coefficients of my-board")


def test_promise_of_a_latency_is_what_the_package_holds_against_its_limit(
    made: tuple[PackageMaker, list[Path]],
) -> None:
    maker, packages = made

    here = maker.read_promise(packages[0], "latency_ms")

    is_here = measures_here(load_target("x86-64"))  # it is not without VNNI
    expected = ("measured", "a run where the package was made")
    assert (here.label, here.source) == (expected if is_here else ("modelled", "coefficients of x86-64"))
