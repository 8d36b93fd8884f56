"""Evidence: the results of one run on a bench, as JSON that can be committed."""

import contextlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from edgekit_runtime.agent.device_facts import DeviceFacts
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.atomic_files import write_text_atomically
from edgekit_runtime.system.paths import find_config_folder

FORMAT: Final = 1
MOST_WATTS: Final = 1000.0
"""No device draws more. A higher reading shows that a meter reports milliwatts."""
PACKAGE: Final = Path(__file__).resolve().parent
_GIT_LIMIT_S: Final = 30
_SOURCES: Final = ("--", ":(top)", ":(top,exclude)hil/evidence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured value.

    Attributes:
        name: The measured quantity and its model.
        value: The value in `unit`, or None if there is none.
        method: How the value was measured.
        test: The name of the test that measured it.
        predicted: The predicted value from the package or the profile, in `unit`, or None.
    """

    name: str
    value: float | None
    unit: str
    method: str
    test: str
    predicted: float | None = None

    @property
    def error(self) -> float | None:
        """The relative error of the prediction, or None without a prediction or if the value is None or 0."""
        if self.predicted is None or not self.value:
            return None
        return self.predicted / self.value - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A series of measured values for a plot.

    Attributes:
        x_label, y_label: The quantities with their units.
        x, y: The coordinates of the points, in those units.
        test: The name of the test that measured them.
    """

    name: str
    x_label: str
    y_label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    test: str


@dataclass(frozen=True, slots=True)
class MeasuredPower:
    """The measured power of the whole device at rest and under load, in watts."""

    idle_w: float
    active_w: float

    def __post_init__(self) -> None:
        if not 0 < self.idle_w < self.active_w <= MOST_WATTS:
            raise BenchError(
                f"{self.idle_w:g} W at rest and {self.active_w:g} W meanwhile, expected more meanwhile, and"
                f" 0 to {MOST_WATTS:g} W"
            )


@dataclass(frozen=True, slots=True)
class NetworkTimes:
    """The times of the calibration networks on a device, from which the times of models are predicted.

    Attributes:
        date: The day of the measurement, such as `2026-11-23`.
        engine: The name and release of the engine on the device.
        networks: A digest of the networks.
        seconds: The time of one inference of each network by name.
        power: The power of the device during the runs, or None without a meter for the whole device.
    """

    date: str
    engine: str
    networks: str
    seconds: Mapping[str, float]
    power: MeasuredPower | None = None


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """The outcome of a test.

    Attributes:
        proves: What the test proves if it passes.
        reason: Why the test was skipped, or the last line of its failure.
    """

    __test__ = False  # pytest would collect the class as a test

    test: str
    proves: str
    outcome: Literal["passed", "failed", "skipped"]
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The results of one run on a bench.

    Attributes:
        kind: Whether the device is real, emulated or simulated.
        date: The start of the run in UTC, as ISO 8601.
        commit: The commit of the checkout that ran, or empty without a checkout.
        is_dirty: Whether the checkout had uncommitted changes.
        left_out: The number of tests that the command line excluded, such as with -k.
        network_times: The calibration times of the profile that predicted the latencies, or None.
    """

    bench: str
    kind: Literal["real", "emulated", "simulated"]
    target: str
    date: str
    commit: str
    is_dirty: bool
    device: DeviceFacts
    tests: tuple[TestOutcome, ...]
    figures: tuple[Figure, ...]
    curves: tuple[Curve, ...] = ()
    left_out: int = 0
    network_times: NetworkTimes | None = None
    format: int = FORMAT

    @property
    def file_name(self) -> str:
        return f"{self.target}-{self.bench}-{self.date[:19].replace(':', '')}.json"

    @property
    def latency_errors(self) -> tuple[float, ...]:
        """The errors of the predicted latencies of this run, see `Figure.error`."""
        return tuple(
            figure.error for figure in self.figures if figure.unit == "ms" and figure.error is not None
        )

    def count(self, outcome: str) -> int:
        return sum(test.outcome == outcome for test in self.tests)

    def describe_tests(self) -> str:
        """Return a text with the numbers of passed, failed, skipped and excluded tests."""
        counts = [
            f"{self.count(counted_outcome)} {counted_outcome}"
            for counted_outcome in ("passed", "failed", "skipped")
        ]
        return ", ".join([*counts, *([f"{self.left_out} left out"] if self.left_out else [])])


@dataclass(frozen=True, slots=True)
class Checkout:
    """The source tree of the running code.

    Attributes:
        commit: The hash of the commit, empty without a checkout, or `unknown` if git fails.
        is_dirty: Whether there are uncommitted changes, except in evidence files.
    """

    commit: str
    is_dirty: bool


def read_checkout() -> Checkout:
    """Return the checkout of the running code."""
    if not (PACKAGE.parents[1] / ".git").exists():
        return Checkout("", is_dirty=False)
    try:
        commit = _git("rev-parse", "HEAD")
        return Checkout(commit, bool(_git("status", "--porcelain", *_SOURCES)))
    except (OSError, subprocess.SubprocessError):
        return Checkout("unknown", is_dirty=True)


def write_evidence(evidence: Evidence, folder: Path) -> Path:
    """Write evidence to the file `TARGET-BENCH-DATE.json` in `folder`, and return its path.

    The folder is created if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / evidence.file_name
    write_text_atomically(path, f"{json.dumps(to_plain(evidence), indent=1)}\n")
    return path


def read_evidence(path: Path) -> Evidence:
    """Read an evidence file.

    Raises:
        BenchError: The file is not evidence, or has a newer format.
    """
    return from_plain(Evidence, _read_document(path), str(path), BenchError)


def _read_document(path: Path) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise BenchError(f"{path}: no evidence: {cause}") from cause
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise BenchError(f"{path}: format {content.get('format')!r}, expected {FORMAT}; update edgekit")
    return content


def read_folders(folders: Iterable[Path]) -> list[Evidence]:
    """Read all evidence in folders, oldest first. Of files with the same name, only the last one is read.

    Raises:
        BenchError: A file is not evidence, or has a newer format.
    """
    files = {path.name: path for folder in folders for path in sorted(folder.glob("*.json"))}
    return sorted((read_evidence(path) for path in files.values()), key=lambda run: run.date)


def list_committed() -> Path:
    """Return the folder of the evidence that is part of this source tree or release."""
    released = PACKAGE / "released_evidence"
    return released if released.is_dir() else PACKAGE.parents[1] / "hil" / "evidence"


def find_hil_folder() -> Path:
    """Return the folder of the user's benches and evidence."""
    return find_config_folder() / "hil"


def read_newest(target: str) -> list[Evidence]:
    """Return the newest evidence of each bench for a target, from this source tree and the user's folder.

    Runs in which all tests were skipped, and unreadable files of the user, are ignored.
    """
    return list({run.bench: run for run in _read_all(target)}.values())


def _read_all(target: str) -> list[Evidence]:
    """Return all evidence of a target in which not all tests were skipped, oldest first."""
    runs = []
    for path in list_committed().glob("*.json"):
        document = _read_document(path)
        if document["target"] == target:  # the rest takes ten times as long
            runs.append(from_plain(Evidence, document, str(path), BenchError))
    for path in (find_hil_folder() / "evidence").glob("*.json"):
        with contextlib.suppress(BenchError):
            runs.append(read_evidence(path))
    runs.sort(key=lambda run: run.date)
    return [run for run in runs if run.target == target and run.count("skipped") < len(run.tests)]


def read_measured_costs(target: str) -> list[tuple[Evidence, NetworkTimes]]:
    """Return pairs of evidence for a target and its calibration times, newest first.

    Evidence without calibration times is excluded. Evidence from emulated devices is also excluded, because
    its times do not apply to the real device.
    """
    newest_first = reversed(_read_all(target))
    return [(run, run.network_times) for run in newest_first if run.kind == "real" and run.network_times]


def describe_source(evidence: Evidence, current: Checkout) -> str:
    """Describe the code that produced the evidence, such as `this commit` or `commit 1234abcde`."""
    if not evidence.commit:
        return "no commit (an installed release)"
    changes = " with changes that were not committed" if evidence.is_dirty else ""
    if evidence.commit == current.commit and not evidence.is_dirty:
        return "this commit"
    return f"commit {evidence.commit[:9]}{changes}"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(PACKAGE), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=_GIT_LIMIT_S,
    )
    return done.stdout.strip()
