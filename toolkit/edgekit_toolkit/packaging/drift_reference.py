"""The reference for drift detection: statistics of inputs and outputs on the calibration samples.

The outputs are computed by the float model. Outputs of quantized models differ from them by less than the
smallest drift that is reported. See docs/explanation/canary.md, section "Drift".
"""

from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.drift.class_outputs import class_output
from edgekit_runtime.drift.monitor import pick
from edgekit_runtime.drift.reference import ValueReference
from edgekit_runtime.drift.sketches import ClassSketch, ValueSketch, are_probabilities
from edgekit_runtime.tensors import DTYPES
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.samples.split import Part, feeds_only

_SAMPLES: Final = 128  # samples, each a run of the float model on one thread
# Beyond this, float32 sums of squares overflow. Such values are markers (the lowest float of a mask), not
# data. In float64: a comparison of halves with a plain float overflows, with a warning on the terminal.
_LARGEST: Final = np.float64(1e18)
_STEP: Final = 0.618  # its multiples fill 0..1 evenly and choose values of a large array
_DECILES: Final = np.arange(1, 10) / 10
_FIFTHS: Final = np.arange(1, 5) / 5


@dataclass(slots=True)
class _Values:
    """Extremes of one tensor over all samples, and some of its values."""

    low: float = np.inf
    high: float = -np.inf
    values: list[NDArray[Any]] = field(default_factory=list)

    def add(self, array: NDArray[Any]) -> None:
        if not array.size or not (np.abs(array) <= _LARGEST).all():  # NaN is not, either
            return
        self.low, self.high = min(self.low, float(array.min())), max(self.high, float(array.max()))
        self.values.append(pick(array, _STEP * len(self.values) % 1.0))

    def to_json(self) -> dict[str, Any]:
        values = np.concatenate(self.values)
        low, high = _round(self.low), _round(self.high)
        # Deciles resolve dense values best. Many equal values (a black background) make deciles equal, which
        # leaves one edge; so fifths of the range are added.
        cuts = [*np.quantile(values, _DECILES).tolist(), *(low + _FIFTHS * (high - low)).tolist()]
        edges = sorted({_round(edge) for edge in cuts})
        sketch = ValueSketch(ValueReference(low, high, tuple(edges), (0.0,) * (len(edges) + 1)))
        count = len(values)
        sketch.add(values)
        span = high - low or 1.0
        return {
            "low": low,
            "high": high,
            # Relative to the range: the remainder of values that cancel differs between processors.
            "mean": _round(round(sketch.moments.mean / span, 4) * span),
            "std": _round(round(sketch.moments.std / span, 4) * span),
            "edges": edges,
            # The first and last bin are empty here: they are for values outside.
            "shares": [round(bin_count / count, 4) for bin_count in sketch.bins[1:-1]],
        }


def drift_reference(model: Model, calibration: Part, *, says_classes: bool = False) -> dict[str, Any] | None:
    """Return the statistics for `figures.reference` in the manifest.

    Return None if the samples are generated, or if no tensor has finite numeric values up to 1e18.

    Args:
        model: The float model. It runs on one thread, so that the result is reproducible.
        calibration: The samples. Up to `_SAMPLES` evenly spaced samples are used.
        says_classes: Whether the first output is known to be class scores. Otherwise it is treated as class
            scores if it is a probability distribution for all samples.

    Raises:
        BackendError: The model does not run on a sample.
    """
    if calibration.sha256 is None:
        return None
    inputs, outputs = model.specs()
    names = [spec.name for spec in outputs]
    run = model.open(names, threads=1)
    classes = class_output(outputs)
    answers = None if classes is None else ClassSketch(int(classes.shape[1]))
    input_values = {spec.name: _Values() for spec in inputs if DTYPES[spec.dtype].kind in "fiu"}
    output_values = {spec.name: _Values() for spec in outputs if DTYPES[spec.dtype].kind == "f"}
    count, is_certain = 0, True
    step = max(1, calibration.count // _SAMPLES)
    for feeds in islice(feeds_only(calibration), 0, step * _SAMPLES, step):
        outputs_by_name = dict(zip(names, run(feeds), strict=True))
        for name, values in input_values.items():
            values.add(feeds[name])
        for name, values in output_values.items():
            values.add(outputs_by_name[name])
        if classes is not None and answers is not None:
            for row in outputs_by_name[classes.name]:
                answers.add(row)
                is_certain = is_certain and (says_classes or are_probabilities(row))
        count += 1
    known_inputs = {name: values.to_json() for name, values in input_values.items() if values.values}
    known_outputs = {name: values.to_json() for name, values in output_values.items() if values.values}
    if classes is not None and answers is not None and is_certain and any(answers.classes):
        known_outputs[classes.name] = _class_reference(answers)
    if not known_inputs and not known_outputs:
        return None
    return {"samples": count, "inputs": known_inputs, "outputs": known_outputs}


def _class_reference(sketch: ClassSketch) -> dict[str, Any]:
    total = sum(sketch.classes)
    return {
        "probabilities": bool(sketch.is_probabilities),
        "confidence": [round(bin_count / total, 4) for bin_count in sketch.confidence],
        "classes": [round(class_count / total, 4) for class_count in sketch.classes],
        "entropy": round(sketch.entropy.mean, 4),
    }


def _round(value: float) -> float:
    """Round to six significant digits."""
    return float(f"{value:.6g}")
