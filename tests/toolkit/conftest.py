"""What tests of several commands start from: a folder of keys of their own, and a terminal of 80 columns."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.toolkit.package_run import isolated_home
from tests.toolkit.short_measurements import list_replacements

from edgekit_toolkit.evaluation import host_memory, judge
from edgekit_toolkit.measurement.peak_memory import measure_model_memory


@pytest.fixture(scope="session", autouse=True)
def short_measurements() -> Iterator[None]:
    """Measure candidates briefly; tests of memory ask for `measured_memory`."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in list_replacements():
            patch.setattr(module, name, value)
        yield


@pytest.fixture
def measured_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the memory of candidates."""
    for module in (judge, host_memory):
        monkeypatch.setattr(module, "measure_model_memory", measure_model_memory)


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
