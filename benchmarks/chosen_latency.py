"""Is a package that was chosen for another machine slower here than its float32 source, and does it say so?

    scripts/python benchmarks/chosen_latency.py
        [--only NAME ...] [--targets rpi5 jetson android]

Each model is packaged for each target by the command line, with its default limits. The package and the
source model then run in turns in one process, with one thread. A ratio above 1.05 without a warning on the
report's first page ends the benchmark with exit code 1.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.latency import LatencyLimits, measure_latency
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.sessions.selftest import read_golden_inputs
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from results import NONE, machine, make_parser, print_head
from works import list_subjects

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = {"rpi5": "ort", "jetson": "tensorrt", "android": "litert"}
MOST = 1.05
LIMITS = LatencyLimits(warmup_rounds=5, min_rounds=30, max_rounds=400, time_limit_s=8.0)


@dataclass(frozen=True)
class Row:
    """One package; ratios are to float32, and `has_warned` is whether its report says that it is slower."""

    model: str
    target: str
    form: str
    modelled: float | None
    uncertainty: float
    measured: float
    has_warned: bool
    reason: str

    @property
    def is_kept(self) -> bool:
        """Whether the package is as fast as its source, or its report says that it is not."""
        return self.measured <= MOST or self.has_warned


def run(name: str, model: Path, options: list[str], target: str, folder: Path) -> Row | None:
    """Package a model and race it against its source; None where it is refused."""
    command = [str(ROOT / "edgekit"), "package", str(model), "--target", target]
    command += ["--backend", BACKENDS[target]]
    command += [*options, "--search-seconds", "10", "-o", str(folder), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(f"{name} {target}: {ended.stdout[-300:]} {ended.stderr[-300:]}", file=sys.stderr)
        return None
    report = json.loads(ended.stdout)
    (package,) = folder.glob("*.edgepkg")
    measured = race(package, model)
    chosen = report["outcome"]["chosen"]
    said = report["outcome"]["latency_to_float"]
    return Row(
        model=name,
        target=target,
        form=next(one["label"] for one in report["candidates"] if one["id"] == chosen),
        modelled=said["modelled"]["value"],
        uncertainty=said["uncertainty"],
        measured=measured,
        has_warned=any("slower on this machine" in warning for warning in report["warnings"]),
        reason=report["outcome"]["reason"],
    )


def race(package: Path, source: Path) -> float:
    """Return the package's latency as a multiple of the source's, in turns on this machine."""
    floats = OrtSession(source, OrtOptions(threads=1))
    with read_package(package, TrustStore.from_folder(find_keys_folder())) as opened:
        session = open_session(opened, threads=1)
        feeds = read_golden_inputs(opened)
    calls = {"package": partial(session.run, feeds), "source": partial(floats.run, feeds)}
    found = measure_latency(calls, LIMITS)
    return found["package"].ratio_to(found["source"])


def show(row: Row) -> str:
    modelled = NONE
    if row.modelled is not None:
        modelled = f"{row.modelled:.2f} (may be off by {row.uncertainty:.1f} x)"
    decided = "model" if "by more than its uncertainty" in row.reason else "measured here"
    if "on a GPU" in row.reason:
        decided = "size"
    if "the only one" in row.reason:
        decided = "limits"
    warned = "yes" if row.has_warned else "no"
    cells = (row.model, row.target, row.form, modelled, f"{row.measured:.2f}", warned, decided)
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--targets", nargs="*", default=list(BACKENDS), choices=list(BACKENDS))
    arguments = parser.parse_args()
    print_head("model | target | form | x float32, modelled | x float32, measured here | warned | decided by")
    rows = []
    for subject in list_subjects(arguments.only):
        options = [] if subject.name == "mnist8" else subject.options  # one model has no samples
        for target in arguments.targets:
            with tempfile.TemporaryDirectory() as folder:
                row = run(subject.name, subject.model, options, target, Path(folder))
            if row is not None:
                rows.append(row)
                print(show(row), flush=True)
    kept = sum(row.is_kept for row in rows)
    print(f"\n{kept} of {len(rows)} at most {MOST} x float32, or said so. {machine()}")
    return 0 if kept == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
