"""What tests of several commands start from: a folder of keys of their own, and a terminal of 80 columns."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.toolkit.package_run import isolated_home

from edgekit_toolkit.evaluation import judge


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    """Time candidates in the fewest rounds: no test depends on the speed of the machine it runs on."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LATENCY_LIMITS", "PROCESSOR_LIMITS"):
            limits = getattr(judge, name)
            patch.setattr(judge, name, replace(limits, max_rounds=limits.min_rounds))
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for the tests of a file, which share what is slow to make."""
    folder = tmp_path_factory.mktemp("home")
    with isolated_home(folder):
        yield folder


@pytest.fixture
def new_home(tmp_path: Path) -> Iterator[Path]:
    """A folder for each test; it is made on first use."""
    with isolated_home(tmp_path / "home"):
        yield tmp_path / "home"
