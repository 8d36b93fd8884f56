"""Scores of a model on evaluation samples, all in 0..1 with 1 the best; an output that is NaN scores 0.

`top1` and `top5` need labels. `agreement` and `similarity` compare with the outputs of the float source
model, which says how much packaging changed, not how good the model is.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError

Outputs = Mapping[str, NDArray[Any]]
# (outputs, outputs of the float source model, labels [samples] or None) -> scores [samples]
Score = Callable[[Outputs, Outputs, NDArray[np.int64] | None], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Metric:
    """A named score.

    Attributes:
        name: as the user gave it, or as `auto` chose.
        score: the function.
        needs_labels: whether samples must be labelled.
    """

    name: str
    score: Score
    needs_labels: bool


def find_metric(name: str, outputs: Outputs, labelled: bool) -> Metric:
    """Return the metric called `name`.

    Args:
        name: `auto`, `top1`, `top5`, `agreement`, `similarity`, or `FILE.py:FUNCTION` for one's own.
        outputs: outputs of the source model on one batch; `auto` decides by their shapes.
        labelled: whether the evaluation samples have labels.

    Raises:
        DataError: no such metric, it needs labels that are not there, or it does not suit the outputs.
    """
    classes = class_scores(outputs)
    if name == "auto":
        name = "similarity" if classes is None else "top1" if labelled else "agreement"
    known = {
        "top1": Metric("top1", _top(1), True),
        "top5": Metric("top5", _top(5), True),
        "agreement": Metric("agreement", _agreement, False),
        "similarity": Metric("similarity", _similarity, False),
    }
    if name not in known and ":" in name:
        digest = (
            hashlib.sha256(Path(name.rpartition(":")[0]).read_bytes()).hexdigest() if _is_file(name) else ""
        )
        return Metric(f"{Path(name).name} (sha256 {digest[:12]})", _load(name), False)
    if name not in known:
        raise DataError(f"metric {name!r}: expected auto, {', '.join(known)} or FILE.py:FUNCTION")
    metric = known[name]
    if metric.needs_labels and not labelled:
        raise DataError(
            f"metric {name!r} needs labels: add an int64 array `y` [samples] to the evaluation data"
        )
    if name != "similarity" and classes is None:
        shapes = {key: list(value.shape) for key, value in outputs.items()}
        raise DataError(f"metric {name!r} needs class scores [samples, classes]; the outputs are {shapes}")
    return metric


def _is_file(name: str) -> bool:
    return Path(name.rpartition(":")[0]).is_file()


def class_scores(outputs: Outputs) -> str | None:
    """Name of the first output, where it looks like class scores [samples, classes >= 2]; otherwise None."""
    name, first = next(iter(outputs.items()))
    return name if first.ndim == 2 and first.shape[1] >= 2 and first.dtype.kind == "f" else None


def _top(count: int) -> Score:
    def score(outputs: Outputs, _reference: Outputs, labels: NDArray[np.int64] | None) -> NDArray[np.float64]:
        scores = next(iter(outputs.values()))
        if labels is None:
            raise DataError(f"metric 'top{count}' needs labels")
        if labels.shape != scores.shape[:1]:
            raise DataError(f"labels have shape {list(labels.shape)}, expected [{len(scores)}], one a sample")
        wrong = labels[(labels < 0) | (labels >= scores.shape[1])]
        if wrong.size:
            raise DataError(f"label {wrong[0]} is outside the model's {scores.shape[1]} classes")
        best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        return np.asarray((best == labels[:, None]).any(axis=1) & _is_decided(scores), np.float64)

    return score


def _agreement(
    outputs: Outputs, reference: Outputs, _labels: NDArray[np.int64] | None
) -> NDArray[np.float64]:
    got, want = next(iter(outputs.values())), next(iter(reference.values()))
    return np.asarray((got.argmax(axis=1) == want.argmax(axis=1)) & _is_decided(got), np.float64)


def _is_decided(scores: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each sample's scores have a best one: NaN has no order."""
    decided: NDArray[np.bool_] = ~np.isnan(scores).any(axis=1)
    return decided


def _similarity(
    outputs: Outputs, reference: Outputs, _labels: NDArray[np.int64] | None
) -> NDArray[np.float64]:
    """1 - |error| / |reference|, at least 0, the mean over float outputs and samples; shape [1].

    An output of another shape (a number of detections, say) scores 0.
    """
    parts = []
    for name, want in reference.items():
        if want.dtype.kind != "f" or not want.size:
            continue
        if outputs[name].shape != want.shape:
            parts.append(0.0)
            continue
        flat = want.reshape(want.shape[0] if want.ndim else 1, -1).astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinity less or through infinity
            error = outputs[name].reshape(flat.shape).astype(np.float64) - flat
            ratio = np.linalg.norm(error, axis=1) / np.maximum(np.linalg.norm(flat, axis=1), 1e-12)
        parts.append(float(np.nan_to_num(np.clip(1 - ratio, 0, 1), nan=0.0).mean()))
    return np.asarray([np.mean(parts) if parts else 1.0])


def _load(name: str) -> Score:
    """Load FILE.py:FUNCTION. The file is the user's own code and runs with the user's rights."""
    file, _, function = name.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise DataError(f"metric {name!r}: there is no Python file {file}")
    module_name = f"edgekit_metric_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise DataError(f"metric {name!r}: {file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
        found = getattr(module, function)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise DataError(f"metric {name!r}: {error!r} while loading {file}") from error

    def score(outputs: Outputs, reference: Outputs, labels: NDArray[np.int64] | None) -> NDArray[np.float64]:
        try:
            # Copies: a metric that works in place must not change what the next candidate is held against.
            given = [{key: value.copy() for key, value in one.items()} for one in (outputs, reference)]
            scores = np.atleast_1d(np.asarray(found(*given, labels), np.float64))
        except (Exception, SystemExit) as error:  # whatever the user's function raises
            raise DataError(f"metric {name!r} failed: {error!r}") from error
        if (
            scores.ndim != 1
            or not scores.size
            or not np.isfinite(scores).all()
            or scores.min() < 0
            or scores.max() > 1
        ):
            found_values = f", values {scores.min()}..{scores.max()}" if scores.size else ""
            raise DataError(
                f"metric {name!r} returned shape {list(scores.shape)}{found_values}; expected scores 0..1,"
                " shape [samples]"
            )
        return scores

    return score
