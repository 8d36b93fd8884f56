"""Is a package's model the model that it was made from? Runs both; makes no package."""

import telemetry_off  # noqa: F401

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions import open_session
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.evaluation.metrics import class_scores, find_metric
from edgekit_toolkit.packaging.evidence import evidence_path, read_evidence
from edgekit_toolkit.packaging.recipe import read_recipe
from edgekit_toolkit.passes.optimiser import EQUAL as EXACT
from edgekit_toolkit.passes.parity import Tolerance, compare, worst
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.tflite.check import EQUAL as LITERT_EXACT

ANY_SIZE = Tolerance(range_fraction=1e30)  # of a quantized model; its error is reported
# Below this neither outputs nor classes have anything to do with the source's.
LEAST_LIKENESS = 0.5


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
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(names, dict(feed)), strict=True)) for feed in feeds]


def compared(want: Sequence[Feeds], got: Sequence[Feeds], kind: str, engine: str) -> Verdict:
    """The verdict on outputs of a package of one form."""
    allowed = ANY_SIZE if kind != "float32" else LITERT_EXACT if engine == "litert" else EXACT
    parity = worst(
        [compare(floats(one), floats(other), allowed) for one, other in zip(want, got, strict=True)]
    )
    pairs = list(zip(got, want, strict=True))
    if not np.isfinite(parity.max_abs_error):
        return Verdict(parity.reason, parity.relative_to_range)
    scores, same = class_scores(want[0]), None
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
