"""Fixtures of a test on a bench: the bench, its device with a folder, and a recorder of figures."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import pytest

from edgekit_hil.benches.bench_file import BenchFile, find_bench, list_shipped
from edgekit_hil.benches.device import Device
from edgekit_hil.benches.opening import Bench, open_bench
from edgekit_hil.tests.bench_target import BenchTarget
from edgekit_hil.tests.models import PackageMaker
from edgekit_hil.tests.plugin import RunRecord
from edgekit_host.evidence import Curve, Figure
from edgekit_runtime.errors import BenchError, BenchUnavailableError

_OF_TIME: Final = ("s", "ms", "mJ")
_BENCHES: Final = pytest.StashKey[list[BenchFile]]()
_MOST_POINTS: Final = 1000  # of a curve. A plot shows no more, and evidence is committed


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records figures and curves of the running test."""

    record: RunRecord
    bench: Bench
    test: str

    def __call__(
        self, name: str, value: float | None, unit: str, method: str = "", predicted: float | None = None
    ) -> None:
        """Record a figure, see `Figure`; times are recorded only on benches where they mean anything."""
        if unit in _OF_TIME and not self.bench.file.settings.has_time:
            return
        self.record.add_figure(
            self.bench,
            Figure(name=name, value=value, unit=unit, method=method, test=self.test, predicted=predicted),
        )

    def curve(self, name: str, labels: tuple[str, str], points: Sequence[tuple[float, float]]) -> None:
        """Record a curve, see `Curve`; of many successive points, only the point with the greatest y.

        Args:
            name: what was measured.
            labels: labels of x and y.
            points: pairs (x, y).
        """
        if not self.bench.file.settings.has_time:
            return
        width = -(-len(points) // _MOST_POINTS)
        groups = (points[begin : begin + width] for begin in range(0, len(points), width))
        x, y = zip(*(max(group, key=itemgetter(1)) for group in groups), strict=True)
        x_label, y_label = labels
        curve = Curve(name=name, x_label=x_label, y_label=y_label, x=x, y=y, test=self.test)
        self.record.add_curve(self.bench, curve)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on every bench."""
    if "bench" in metafunc.fixturenames:
        files = _read_benches(metafunc.config)
        ids = [file.settings.name for file in files]
        metafunc.parametrize("bench", files, ids=ids, indirect=True, scope="session")


def _read_benches(config: pytest.Config) -> list[BenchFile]:
    """Return the files of all benches of this run, which are read once."""
    if _BENCHES not in config.stash:
        named = config.getoption("bench", None)
        files = [find_bench(name) for name in named] if named else list_shipped()
        names = [file.settings.name for file in files]
        if len(set(names)) < len(names):  # evidence is by name
            raise pytest.UsageError(f"benches of one name: {', '.join(sorted(names))}; give each its own")
        config.stash[_BENCHES] = files
    return config.stash[_BENCHES]


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest, run_record: RunRecord) -> Iterator[Bench]:
    """Return the opened bench; the test is skipped with the reason where it cannot be had.

    A bench that this machine cannot have is no fault, but ends the run if it is the only one that was named.
    One that is in use or broken fails the run.
    """
    with contextlib.ExitStack() as stack:
        try:
            bench = stack.enter_context(open_bench(request.param))
        except BenchError as error:
            is_fault = not isinstance(error, BenchUnavailableError)
            run_record.has_refused |= is_fault
            if not is_fault and len(request.config.getoption("bench") or ()) == 1:
                pytest.exit(str(error), pytest.ExitCode.TESTS_FAILED)
            pytest.skip(str(error))
        yield bench


@pytest.fixture
def working_bench(bench: Bench) -> Bench:
    """Return the bench; the test is skipped if the bench has broken in this run."""
    if (reason := bench.lock.read_reason()) is not None:
        pytest.skip(f"bench '{bench.file.settings.name}' is broken since {reason}")
    return bench


@pytest.fixture
def device(working_bench: Bench, request: pytest.FixtureRequest) -> Iterator[Device]:
    """Return the device with a folder of its own; one that answers no more afterwards breaks the bench."""
    folder = hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
    with working_bench.open_folder(folder, request.node.name) as device:
        yield device


@pytest.fixture(scope="session")
def run_record(pytestconfig: pytest.Config) -> RunRecord:
    record = pytestconfig.pluginmanager.get_plugin("edgekit-hil-record")
    assert isinstance(record, RunRecord)
    return record


@pytest.fixture
def target(bench: Bench, run_record: RunRecord) -> BenchTarget:
    """Return the target of the bench's packages; evidence keeps the times behind its profile."""
    target = BenchTarget.of(bench)
    if target.network_times is not None:
        run_record.set_network_times(bench, target.network_times)
    return target


@pytest.fixture
def evidence(bench: Bench, run_record: RunRecord, request: pytest.FixtureRequest) -> Recorder:
    """Return the recorder of this test's figures."""
    return Recorder(run_record, bench, request.node.name)


@pytest.fixture(scope="session")
def packages() -> PackageMaker:
    """Return the maker of the packages that tests install."""
    return PackageMaker()
