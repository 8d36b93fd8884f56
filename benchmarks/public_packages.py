"""Packages of real public models for each engine: what is made, what it computes, how the rest is refused.

    scripts/python benchmarks/public_packages.py [--only NAME ...] [--engine ENGINE ...] [OPTION ...]

Each model goes through the command `edgekit package` for onnxruntime, TensorRT and LiteRT. A package must
open, and its outputs on inputs that packaging never saw are compared with what onnxruntime, without
optimisations, makes of the file as it came. TensorRT's parser and builder are those of
TensorRT-RTX (requirements/tensorrt.txt); what they accept runs on the package's fallback here. A refusal must
name operator and node, or the limit that stands in the way, and leave no package.
Prints a table in Markdown: the form that was chosen; in brackets the largest error as a share of the output's
range, the similarity (1 - |error| / |reference|) and the share of equal classes, on four inputs. Ends with 1
if a package is wrong, a refusal is not as it must be, or a source file changed. Other options go to
`edgekit package`; --metric similarity --budget size=1GB,drop=0.01% gives the exact forms.
"""

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_runtime.errors import EdgekitError, ModelError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.evaluation.metrics import Probes, class_scores, find_metric
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.packaging.evidence import evidence_path, read_evidence
from edgekit_toolkit.packaging.recipe import read_recipe
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.passes.optimiser import EQUAL as EXACT
from edgekit_toolkit.passes.parity import Tolerance, compare, worst
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.shards import Batching
from edgekit_toolkit.tflite.check import EQUAL as LITERT_EXACT
from public_models import PublicModel, make_public_parser, try_models
from public_samples import Samples, read_source, samples_of
from results import print_head, print_row

ENGINES = {
    "ort": ("--target", "x86-64", "--backend", "ort"),
    "jetson": ("--target", "jetson"),
    "litert": ("--target", "android-arm64"),
}
# Loose and quick: what is asked here is whether a package is right, not how good it can be.
LIMITS = ("--budget", "size=1GB,drop=5%", "--search-seconds", "2")
NAMED = re.compile(r"operator '[^']+'.* at (node '|the node)|operator '[^']+' of the custom domain")
REFUSED_MODEL, REFUSED_BUDGET = 3, 5  # docs/reference/exit-codes.md

ANY_SIZE = Tolerance(range_fraction=1e30)  # of a quantized model; its error is reported
# Below this neither outputs nor classes have anything to do with the source's.
LEAST_LIKENESS = 0.5


@dataclass(frozen=True)
class Subject:
    """A model file with samples for it; none where the file cannot even be imported."""

    public: PublicModel
    path: Path
    samples: Samples | None
    options: tuple[str | Path, ...]


@dataclass(frozen=True)
class Verdict:
    """How a package compares with its source.

    Attributes:
        problem: why it is wrong; empty if it is not.
        error: largest difference, as a share of the output's range.
        similarity: 1 - |error| / |reference|, the mean over outputs and samples.
        same_class: share of samples whose largest score is at the same place; None for other outputs.
    """

    problem: str = ""
    error: float = float("nan")
    similarity: float = float("nan")
    same_class: float | None = None


@dataclass(frozen=True)
class Row:
    model: str
    inputs: str
    engine: str
    result: str
    failed: bool
    seconds: float
    verdict: Verdict | None = None

    def cell(self) -> str:
        if self.failed:
            return f"**FAILED**: {self.result}"
        if self.verdict is None:
            return "refused"
        same = "" if self.verdict.same_class is None else f", {self.verdict.same_class:.0%}"
        return f"{self.result} ({self.verdict.error:.1e}, {self.verdict.similarity:.3f}{same})"


@contextlib.contextmanager
def prepared(public: PublicModel) -> Iterator[Subject]:
    path = public.path()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            source, dims = read_source(public)
        except ModelError:
            yield Subject(public, path, None, ())
            return
        if not public.weights:
            path = folder / f"{public.name}.onnx"
            onnx.save(source, path)
        samples = samples_of(public, source, dims)
        calibration, evaluation = folder / "calibration.npz", folder / "evaluation.npz"
        stacked = Batching.of(tensor_specs(source)[0]).stacked
        write_samples(calibration, samples.calibration, stacked=stacked)
        write_samples(evaluation, samples.evaluation, stacked=stacked)
        yield Subject(public, path, samples, ("--calibration", calibration, "--eval", evaluation))


def write_samples(path: Path, feeds: Sequence[Feeds], *, stacked: bool) -> None:
    """Write feeds as an .npz of `edgekit package`: one sample a row."""
    join = np.concatenate if stacked else np.stack
    arrays: dict[str, NDArray[Any]] = {name: join([feed[name] for feed in feeds]) for name in feeds[0]}
    np.savez(path, **arrays)  # type: ignore[arg-type]  # the stub takes the names for its own options


def measure(subject: Subject, engine: str, given: Sequence[str]) -> Row:
    before = digest(subject.path)
    inputs = "none" if subject.samples is None else subject.samples.kind
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name) / "out", time.perf_counter()
        command = [sys.executable, "-m", "edgekit_cli", "package", subject.path, *ENGINES[engine]]
        command += [*subject.options, *LIMITS, *given, "--json", "-o", folder]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        written = sorted(folder.glob("*")) if folder.exists() else []
        if process.returncode:
            result, failed = refusal(process, written)
            result = result.replace(f"{subject.path}: ", "").partition(" Report: ")[0]
            row = Row(subject.public.name, inputs, engine, result, failed, seconds)
        else:
            row = packaged(subject, engine, json.loads(process.stdout), folder, seconds)
    if digest(subject.path) != before:
        return Row(subject.public.name, inputs, engine, "the source file changed", True, row.seconds)
    return row


def refusal(process: subprocess.CompletedProcess[str], written: Sequence[Path]) -> tuple[str, bool]:
    """What was said, and whether that is not how a refusal must be."""
    code = process.returncode
    try:
        said = " ".join(json.loads(process.stdout)["error"]["message"].split())
    except ValueError:
        return f"ended with {code}: {process.stderr[-300:].strip()}", True
    if code == REFUSED_BUDGET:
        return f"refused under the budget: {said}", any(path.suffix == ".edgepkg" for path in written)
    named = code == REFUSED_MODEL and NAMED.search(said) is not None
    return f"refused ({code}): {said}", not named or bool(written)


def packaged(subject: Subject, engine: str, report: dict[str, Any], folder: Path, seconds: float) -> Row:
    """The package of a model, judged in a process of its own: an engine may crash."""
    if subject.samples is None:
        return Row(subject.public.name, "none", engine, "packaged, but cannot be imported", True, seconds)
    package = next(folder.glob("*.edgepkg"))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            verdict = pool.submit(verify, package, subject.path, subject.samples.fresh, engine).result()
        except (BrokenProcessPool, EdgekitError) as error:
            verdict = Verdict(problem=f"cannot be run: {error}")
    chosen = next(one for one in report["candidates"] if one["chosen"])["label"]
    result = f"{chosen}: {verdict.problem}" if verdict.problem else chosen
    return Row(
        model=subject.public.name,
        inputs=subject.samples.kind,
        engine=engine,
        result=result,
        failed=bool(verdict.problem),
        seconds=seconds,
        verdict=verdict,
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def verify(package: Path, source: Path, fresh: Sequence[Feeds], engine: str) -> Verdict:
    """Open a package as a device does, run it on fresh inputs, and hold it against its source."""
    logging.disable(logging.WARNING)  # of a fallback: there is no TensorRT here
    trust = TrustStore.from_folder(find_keys_folder())
    with read_package(package, trust) as opened:
        manifest = opened.manifest
    session = open_session(package, trust=trust)
    got = [session.run(feed) for feed in fresh]
    want = run_source(source, fresh)
    stated = [spec.name for spec in manifest.outputs]
    if stated != list(want[0]):
        return Verdict(f"the manifest's outputs are {stated}, the source's {list(want[0])}")
    if any(set(one) != set(stated) for one in got):
        return Verdict(f"the session's outputs are {list(got[0])}, the source's {stated}")
    verdict = compared(want, [{name: one[name] for name in stated} for one in got], form(package), engine)
    if engine == "jetson" and not verdict.problem:
        check = read_evidence(evidence_path(package), package, trust).predicate["tensorrt_check"]
        if not isinstance(check, Mapping) or not check["accepted"]:
            return Verdict(f"TensorRT did not accept it: {check}")
    return verdict


def form(package: Path) -> str:
    """How weights and arithmetic of a package are stored."""
    recipe = next(package.parent.glob("*.recipe.json"))
    return read_recipe(recipe).form.kind


def run_source(path: Path, feeds: Sequence[Feeds]) -> list[dict[str, NDArray[Any]]]:
    """Outputs of the file as it came, in onnxruntime without optimisations."""
    session = OrtSession(path, OrtOptions(optimise=False))
    return [session.run(feed) for feed in feeds]


def compared(want: Sequence[Feeds], got: Sequence[Feeds], kind: str, engine: str) -> Verdict:
    """The verdict on outputs of a package of one form."""
    allowed = ANY_SIZE if kind != "float32" else LITERT_EXACT if engine == "litert" else EXACT
    parity = worst(
        [compare(floats(one), floats(other), allowed) for one, other in zip(want, got, strict=True)]
    )
    pairs = list(zip(got, want, strict=True))
    if not np.isfinite(parity.max_abs_error):
        return Verdict(parity.reason, parity.relative_to_range)
    scores, same = class_scores(Probes([want[0]])), None
    if scores is not None:
        agreement = find_metric("agreement", want[0], labelled=False)
        same = statistics.fmean(float(agreement.score(one, other, None).mean()) for one, other in pairs)
    alike = {
        name: similarity([({name: one[name]}, {name: other[name]}) for one, other in pairs])
        for name in want[0]
    }
    problem = parity.reason or frozen(want, got)
    strange = [
        name
        for name, likeness in alike.items()
        if likeness < LEAST_LIKENESS and (name != scores or same is None or same < LEAST_LIKENESS)
    ]
    if not problem and strange:
        problem = f"outputs {strange} have nothing to do with the source's"
    return Verdict(problem, parity.relative_to_range, statistics.fmean(alike.values()), same)


def similarity(pairs: Sequence[tuple[Feeds, Feeds]]) -> float:
    """The mean over samples of outputs and what they should be."""
    metric = find_metric("similarity", pairs[0][1], labelled=False)
    return statistics.fmean(float(metric.score(got, want, None)[0]) for got, want in pairs)


def floats(outputs: Feeds) -> Feeds:
    """Outputs whose values may move; integers (places, classes) count as well, as numbers."""
    return {
        name: value if value.dtype.kind == "f" else value.astype(np.float64)
        for name, value in outputs.items()
    }


def frozen(want: Sequence[Feeds], got: Sequence[Feeds]) -> str:
    """Why outputs are constant, or do not follow the inputs, where the source's do; empty if they do."""
    for name in want[0]:
        expected, found = ([np.asarray(one[name], np.float64) for one in part] for part in (want, got))
        if spread(expected) > 0 and spread(found) == 0:
            return f"output '{name}' is constant, the source's is not"
        apart = max((float(np.abs(one - expected[0]).max()) for one in expected[1:] if one.size), default=0.0)
        still = all(np.array_equal(one, found[0]) for one in found[1:])
        if still and apart > 0.1 * spread(expected):
            return f"output '{name}' does not follow the inputs"
    return ""


def spread(arrays: Sequence[NDArray[np.float64]]) -> float:
    """Largest less smallest value of all arrays, 0 where rounding explains it."""
    values = np.concatenate([one.ravel() for one in arrays])
    span = float(np.ptp(values)) if values.size else 0.0
    return span if span > 1e-5 * float(np.abs(values).max(initial=0.0)) else 0.0


def main() -> int:
    parser = make_public_parser(__doc__)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    chosen, given = parser.parse_known_args()
    print_head("model", "inputs", *chosen.engine)

    def try_engines(public: PublicModel) -> list[Row]:
        with prepared(public) as subject:
            return [measure(subject, engine, given) for engine in chosen.engine]

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["EDGEKIT_HOME"] = os.environ["EDGEKIT_CACHE"] = home
        load_signer()
        for made in try_models(chosen.only, try_engines):
            print_row(made[0].model, made[0].inputs, *(row.cell() for row in made))
            rows += made
    print()
    for row in rows:
        if row.verdict is None:
            print(f"- `{row.model}`, {row.engine}: {row.result}")
    packages = sum(row.verdict is not None for row in rows)
    failed = sum(row.failed for row in rows)
    print(
        f"\n{len(rows)} pairs: {packages} packaged, {len(rows) - packages} refused, {failed} of all failed;"
        f" {sum(row.seconds for row in rows) / 60:.0f} minutes of packaging"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
