"""Options of a run on benches, its record of outcomes and figures, and the evidence that it leaves."""

import datetime
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

import edgekit_runtime  # noqa: F401  # switches telemetry off, before a test imports onnxruntime
from edgekit_hil.benches.bench_file import BenchFile
from edgekit_hil.benches.opening import Bench
from edgekit_hil.report.page import make_page
from edgekit_host.evidence import (
    Curve,
    Evidence,
    Figure,
    NetworkTimes,
    TestOutcome,
    find_hil_folder,
    read_checkout,
    write_evidence,
)

_MAX_REASON: Final = 300  # characters


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("edgekit hil")
    group.addoption(
        "--bench",
        action="append",
        metavar="FILE",
        help="environment file of a bench, or the name of one that needs no hardware. May be repeated"
        " (default: all that need no hardware)",
    )
    group.addoption(
        "--evidence",
        type=Path,
        metavar="FOLDER",
        help="folder for the evidence (default: in your edgekit configuration)",
    )
    group.addoption("--soak-seconds", type=int, default=20, help="length of the soak test (default: 20)")
    group.addoption(
        "--measure-seconds", type=int, default=5, help="length of a measurement of latency (default: 5)"
    )
    group.addoption(
        "--power-cuts",
        type=int,
        default=5,
        help="number of power cuts around an update, each with a boot if the machine boots (default: 5)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register what records the run."""
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("tests on a bench run one at a time: leave -n out")
    config.pluginmanager.register(RunRecord(config), "edgekit-hil-record")


class RunRecord:
    """The results of this run's tests, by bench.

    Attributes:
        has_refused: whether a bench that this machine can have was in use or broken.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.has_refused = False
        self._config = config
        self._folder = _prepare(config.getoption("evidence") or find_hil_folder() / "evidence")
        self._begun = datetime.datetime.now(datetime.timezone.utc)
        self._checkout = read_checkout()
        self._benches: dict[str, Bench] = {}
        self._tests: dict[str, dict[str, TestOutcome]] = {}
        self._left_out: Counter[str] = Counter()
        self._figures: dict[str, list[Figure]] = {}
        self._curves: dict[str, list[Curve]] = {}
        self._network_times: dict[str, NetworkTimes] = {}
        self._skipped: Counter[str] = Counter()
        self._written: list[Path] = []

    def add_figure(self, bench: Bench, figure: Figure) -> None:
        self._figures.setdefault(bench.file.settings.name, []).append(figure)

    def add_curve(self, bench: Bench, curve: Curve) -> None:
        self._curves.setdefault(bench.file.settings.name, []).append(curve)

    def set_network_times(self, bench: Bench, times: NetworkTimes) -> None:
        """Record the times behind the predictions of this run."""
        self._network_times[bench.file.settings.name] = times

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record how a test ended."""
        report = yield
        reason = _find_reason(report)
        if report.skipped:
            self._skipped[reason] += 1
        bench = getattr(item, "funcargs", {}).get("bench")  # is there also if a later fixture fails
        # A pass counts at the call; a failure or skip counts in any phase, also after a pass.
        if isinstance(bench, Bench) and (report.when == "call" or not report.passed):
            name = bench.file.settings.name
            self._benches[name] = bench
            proves = " ".join((getattr(item, "function", None).__doc__ or "").split())
            outcome = TestOutcome(
                item.nodeid.rpartition("/")[2], proves, report.outcome, reason, round(report.duration, 2)
            )
            self._tests.setdefault(name, {})[item.nodeid] = outcome
        return report

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Count the tests that the command line leaves out, such as by -k."""
        for item in items:
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            if isinstance(bench := parameters.get("bench"), BenchFile):
                self._left_out[bench.settings.name] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the evidence of each opened bench; fail if one was refused or a named one not opened."""
        named = self._config.getoption("bench") or ()
        if self.has_refused or (session.testscollected and len(self._tests) < len(set(named))):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        for name, tests in self._tests.items():
            bench = self._benches[name]
            evidence = Evidence(
                bench=name,
                kind=bench.file.settings.kind,
                target=bench.file.settings.target,
                date=self._begun.isoformat(timespec="seconds"),
                commit=self._checkout.commit,
                is_dirty=self._checkout.is_dirty,
                device=bench.facts,
                tests=tuple(tests.values()),
                figures=tuple(self._figures.get(name, ())),
                curves=tuple(self._curves.get(name, ())),
                left_out=self._left_out[name],
                network_times=self._network_times.get(name),
            )
            path = write_evidence(evidence, self._folder)
            page = path.with_suffix(".html")
            page.write_text(make_page(evidence), encoding="utf-8")
            self._written += [path, page]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print how many tests were skipped for which reason, and where the evidence is."""
        if not (self._skipped or self._written):
            return
        terminalreporter.section("benches")
        for reason, count in self._skipped.most_common():
            terminalreporter.line(f"{count} skipped: {reason}")
        for path in self._written:
            terminalreporter.line(f"{'report' if path.suffix == '.html' else 'evidence'}: {path}")


def _prepare(folder: Path) -> Path:
    """Return a folder in which files can be written.

    Raises:
        pytest.UsageError: none can: better now than at the end of the run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as cause:
        raise pytest.UsageError(f"evidence cannot be written to {folder}: {cause.strerror}") from cause
    return folder


def _find_reason(report: pytest.TestReport) -> str:
    """Return why a test was skipped or failed."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")[:_MAX_REASON]
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if crash is None else " ".join(str(crash.message).split())[:_MAX_REASON]
