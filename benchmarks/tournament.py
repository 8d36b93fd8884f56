"""Is the engine that a tournament keeps the fastest when all are measured again?

    scripts/python benchmarks/tournament.py [--only NAME ...] [--again 4]
        [--seconds 6] [--load 0] [--folder FOLDER]

The models are those of `public_models.py` that convert to TFLite, each in a package with onnxruntime and
LiteRT with one and two threads, and LiteRT without XNNPACK. Each has one tournament, then `--again` further
ones, and what one keeps is looked for in the next: "again" counts where it has the lowest median there, "as
fast" where it cannot be told from that one, and "processes" the single processes in which it has the lowest.
`--load` busy loops run meanwhile.
Packages that are in the folder already are taken from there: `--again 0` only makes them.
"""

import itertools
import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgekit_runtime.autotune.tournament import hold_tournament
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.package.manifest import BackendChoice, Manifest, Variant
from edgekit_runtime.sessions.latency import Latency
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.tensors import TensorSpec
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.assemble import describe_artifacts
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.tflite.convert import convert
from processes import busy_loops
from public_models import PublicModel, make_public_parser, try_models
from public_samples import read_source, samples_of
from results import print_head
from serving import store_golden

LITERT = ({"threads": 1}, {"threads": 2}, {"threads": 1, "xnnpack": False})
NAMES = ("ort 1", "ort 2", "litert 1", "litert 2", "plain")


def prepare(public: PublicModel, folder: Path) -> Path:
    """Write a package of a model with all engines, unless it is there; returns its path."""
    path = folder / f"{public.name}.edgepkg"
    if path.exists():
        return path
    source, dims = read_source(public)
    *_, feeds = samples_of(public, source, dims)
    optimised = optimise(source, batch=None, feeds=feeds[:1]).model
    write(path, optimised.SerializeToString(), convert(optimised, dims), feeds[0])
    return path


def write(path: Path, model: bytes, tflite: bytes, feeds: Feeds) -> None:
    outputs = OrtSession(model).run(feeds)
    golden, contents = store_golden(
        feeds, outputs, lambda array: 1e-3 * float(np.ptp(array.astype(np.float64))) + 1e-5
    )
    models = {"model.onnx": model, "model.tflite": tflite}
    roles = {**dict.fromkeys(contents, "golden"), **dict.fromkeys(models, "model")}
    contents |= models
    litert = None
    for options in reversed(LITERT):
        litert = BackendChoice("litert", "model.tflite", options, litert)
    manifest = Manifest(
        name=path.stem,
        version="1",
        target="x86-64",
        inputs=tuple(TensorSpec(name, a.dtype.name, a.shape) for name, a in feeds.items()),
        outputs=tuple(TensorSpec(name, a.dtype.name, a.shape) for name, a in outputs.items()),
        artifacts=describe_artifacts(contents, roles),
        backend=BackendChoice(
            "ort", "model.onnx", {"threads": 1}, BackendChoice("ort", "model.onnx", {"threads": 2})
        ),
        golden=golden,
        variants=(Variant("litert", litert, golden),),
    )
    write_package(path, manifest, contents, load_signer())


@dataclass(frozen=True)
class Measured:
    """One tournament."""

    kept: str
    as_fast: list[str]
    latencies: dict[str, Latency]

    def fastest(self) -> str:
        return min(self.latencies, key=lambda name: self.latencies[name].median_s)


def measure(path: Path, seconds: float) -> Measured:
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        result = hold_tournament(package, find_keys_folder(), seconds=seconds)
    names = dict(zip((entrant.name for entrant in result.entrants), NAMES, strict=True))
    latencies = {names[one.name]: one.latency for one in result.entrants if one.latency is not None}
    if result.winner is None:
        raise EdgekitError(f"{path}: {result.entrants[0].reason}")
    return Measured(names[result.winner.name], [names[name] for name in result.as_fast], latencies)


def contest(path: Path, again: int, seconds: float) -> tuple[int, int, int, int]:
    """Hold all tournaments of a model, print its row; returns again, as fast, processes and of how many."""
    first, *_ = tournaments = [measure(path, seconds) for _ in range(again + 1)]
    pairs = list(itertools.pairwise(tournaments))
    fastest = sum(before.kept == after.fastest() for before, after in pairs)
    as_fast = sum(before.kept in after.as_fast for before, after in pairs)
    processes = [
        before.kept == min(medians, key=lambda name: medians[name])
        for before, after in pairs
        for values in zip(*(latency.seconds for latency in after.latencies.values()), strict=True)
        for medians in [dict(zip(after.latencies, values, strict=True))]
    ]
    won = sum(processes)
    behind = [
        after.latencies[before.kept].median_s / after.latencies[after.fastest()].median_s - 1
        for before, after in pairs
    ]
    medians_ms = [
        f"{first.latencies[name].median_s * 1e3:.3f}" if name in first.latencies else "" for name in NAMES
    ]
    kept = ", ".join(f"{name} {count}" for name, count in Counter(one.kept for one in tournaments).items())
    cells = [path.stem, *medians_ms, kept, str(fastest), str(as_fast), f"{won} of {len(processes)}"]
    print(f"| {' | '.join([*cells, f'{max(behind):.1%}'])} |", flush=True)
    return fastest, as_fast, won, len(processes)


def main() -> None:
    parser = make_public_parser(__doc__)
    parser.add_argument("--again", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a tournament, nearly")
    parser.add_argument("--load", type=int, default=0, metavar="LOOPS")
    parser.add_argument("--folder", type=Path, help="where packages are kept (default: nowhere)")
    arguments = parser.parse_args()
    print_head("model", *NAMES, "kept", "again", "as fast", "processes", "behind")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        os.environ["EDGEKIT_HOME"] = str(folder / "home")

        def try_model(public: PublicModel) -> tuple[int, int, int, int] | None:
            path = prepare(public, folder)
            return contest(path, arguments.again, arguments.seconds) if arguments.again else None

        with busy_loops(arguments.load):
            counts = list(filter(None, try_models(arguments.only, try_model)))
    if counts:
        fastest, as_fast, won, processes = (sum(column) for column in zip(*counts, strict=True))
        mostly = sum(2 * one[0] > arguments.again for one in counts)
        print(
            f"\n{len(counts)} models: fastest again in most tournaments {mostly}; of"
            f" {arguments.again * len(counts)} tournaments fastest in {fastest}, as fast in {as_fast};"
            f" of {processes} processes fastest in {won}"
        )


if __name__ == "__main__":
    main()
