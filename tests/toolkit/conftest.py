"""What tests of several commands start from: a folder of keys of their own, and a terminal of 80 columns."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.toolkit.package_run import isolated_home

from edgekit_toolkit.measurement import brevity


@pytest.fixture(scope="module", autouse=True)
def _copies(copied_children: None) -> None:
    """Each file has copies: commands prove packages and measure devices in children."""


@pytest.fixture
def measured_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the memory of candidates."""
    monkeypatch.setenv(brevity.VARIABLE, "times,races")


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
