"""Evidence: what one run has seen on one bench, as JSON that can be committed."""

import contextlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.atomic_files import write_atomically
from edgekit_runtime.system.paths import find_config_folder

FORMAT: Final = 1
_PACKAGE: Final = Path(__file__).resolve().parents[1]
_GIT_LIMIT_S: Final = 30
_SOURCES: Final = ("--", ":(top)", ":(top,exclude)hil/evidence")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device says of itself.

    Attributes:
        model: of the board, else of the processor.
        architecture: as `uname -m` has it.
        os: name and version of the system.
        kernel: its release.
        python: version.
        runtime: version of edgekit-runtime, or empty if it is not installed.
        engines: versions by package name.
        memory_bytes: all of the machine.
        free_bytes: of the disk that the tests use.
    """

    model: str
    architecture: str
    os: str
    kernel: str
    python: str
    runtime: str
    engines: Mapping[str, str]
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value.

    Attributes:
        name: what was measured, with the model.
        value: in `unit`.
        unit: such as `ms`, `bytes`, `%`.
        method: how it was measured.
        test: id of the test that measured it.
        predicted: what the package or the profile promised, in `unit`, or None.
    """

    name: str
    value: float | None
    unit: str
    method: str
    test: str
    predicted: float | None = None

    @property
    def error(self) -> float | None:
        """By which share the prediction is too high, or negative: too low."""
        if self.predicted is None or not self.value:
            return None
        return self.predicted / self.value - 1


@dataclass(frozen=True, slots=True)
class Curve:
    """Many measured values, for a plot.

    Attributes:
        name: what was measured.
        x_label, y_label: quantities with their units.
        x, y: of the points, in their order.
        test: id of the test that measured it.
    """

    name: str
    x_label: str
    y_label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    test: str


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """How one test ended.

    Attributes:
        test: its id.
        proves: what it shows where it passes.
        outcome: of pytest.
        reason: why it was skipped, or the last line of a failure.
        seconds: that it took.
    """

    __test__ = False  # pytest takes the name for that of a test

    test: str
    proves: str
    outcome: Literal["passed", "failed", "skipped"]
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """One run on one bench.

    Attributes:
        bench: name.
        kind: whether this was seen on the real device, on an emulated one, or on a stand-in.
        target: of the device.
        date: of the begin of the run, in UTC.
        commit: of the checkout that ran, or empty outside of one.
        is_dirty: whether that checkout held changes that are in no commit.
        device: what it is.
        tests: all, in their order.
        figures: all, in their order.
        curves: all, in their order.
        format: of this file.
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
    format: int = FORMAT

    @property
    def file_name(self) -> str:
        """Name of the file that holds it."""
        return f"{self.target}-{self.bench}-{self.date[:19].replace(':', '')}.json"

    def count(self, outcome: str) -> int:
        """Return how many tests ended so."""
        return sum(each.outcome == outcome for each in self.tests)


@dataclass(frozen=True, slots=True)
class Checkout:
    """The source that runs.

    Attributes:
        commit: its hash, or empty outside of a checkout.
        is_dirty: whether files differ from it, or are in no commit; evidence of other runs does not count.
    """

    commit: str
    is_dirty: bool


def read_checkout() -> Checkout:
    """Return the commit that runs: none of an installed wheel, `unknown` where git does not say."""
    if not (_PACKAGE.parents[1] / ".git").exists():
        return Checkout("", is_dirty=False)
    try:
        commit = _git("rev-parse", "HEAD")
        return Checkout(commit, bool(_git("status", "--porcelain", *_SOURCES)))
    except (OSError, subprocess.SubprocessError):
        return Checkout("unknown", is_dirty=True)


def write_evidence(evidence: Evidence, folder: Path) -> Path:
    """Write a file of evidence into `folder`, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / evidence.file_name
    with write_atomically(path) as file:
        file.write(f"{json.dumps(to_plain(evidence), indent=1)}\n".encode())
    return path


def read_evidence(path: Path) -> Evidence:
    """Return the evidence in a file.

    Raises:
        BenchError: it is none, or of a newer format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise BenchError(f"{path}: no evidence: {cause}") from cause
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise BenchError(f"{path}: format {content.get('format')!r}, expected {FORMAT}; update edgekit")
    return from_plain(Evidence, content, str(path), BenchError)


def read_folders(folders: Iterable[Path]) -> list[Evidence]:
    """Return all evidence in some folders, oldest first."""
    files = {path.name: path for folder in folders for path in sorted(folder.glob("*.json"))}
    return sorted((read_evidence(path) for path in files.values()), key=lambda each: each.date)


def list_committed() -> Path:
    """Return the folder of the evidence that came with this source, or with this release."""
    released = _PACKAGE / "evidence" / "seen"
    return released if released.is_dir() else _PACKAGE.parent / "evidence"


def find_hil_folder() -> Path:
    """Return where this user's benches and evidence are noted."""
    return find_config_folder() / "hil"


def read_newest(target: str) -> list[Evidence]:
    """Return the newest evidence of a target for each of its benches, of this source and of this user.

    Runs in which nothing passed say nothing of a target, and a user's files that cannot be read are left out.
    """
    seen = read_folders([list_committed()])
    for path in (find_hil_folder() / "evidence").glob("*.json"):
        with contextlib.suppress(BenchError):
            seen.append(read_evidence(path))
    seen.sort(key=lambda each: each.date)
    return list({one.bench: one for one in seen if one.target == target and one.count("passed")}.values())


def describe_source(evidence: Evidence, current: Checkout) -> str:
    """Return what evidence is of, beside the checkout that reads it: `this commit`, `commit 1234abc`..."""
    if not evidence.commit:
        return "no commit (an installed release)"
    changes = " with changes that were not committed" if evidence.is_dirty else ""
    if evidence.commit == current.commit and not evidence.is_dirty:
        return "this commit"
    return f"commit {evidence.commit[:9]}{changes}"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(_PACKAGE), *arguments],
        check=True, capture_output=True, text=True, timeout=_GIT_LIMIT_S,
    )  # fmt: skip
    return done.stdout.strip()
