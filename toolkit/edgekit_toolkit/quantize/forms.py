"""The forms in which the weights and arithmetic of a model can be packaged, as data that a recipe stores.

`build` makes a form's model from the optimised float model and nothing else, so that a recipe repeats it
without calibration data.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_runtime.errors import RecipeError
from edgekit_toolkit.quantize import storage
from edgekit_toolkit.quantize.compact import shorten_names
from edgekit_toolkit.quantize.equalize import apply_factors
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.qdq import write_qdq
from edgekit_toolkit.quantize.scheme import SCHEMES

FLOAT32: Final = "float32"
FLOAT16_WEIGHTS: Final = "float16-weights"
INT8_WEIGHTS: Final = "int8-weights"
INT4_WEIGHTS: Final = "int4-weights"
DYNAMIC_INT8: Final = "dynamic-int8"
STATIC_INT8: Final = "static-int8"
KINDS: Final = (FLOAT32, FLOAT16_WEIGHTS, INT8_WEIGHTS, INT4_WEIGHTS, DYNAMIC_INT8, STATIC_INT8)


@dataclass(frozen=True, slots=True)
class Form:
    """One form.

    Attributes:
        kind: of `KINDS`.
        plan: kernels and ranges of `static-int8`; None for the others.
        factors: channel factors of equalized tensors, float32 [channels], only with a plan.
    """

    kind: str
    plan: Plan | None = None
    factors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `from_json` reads."""
        if self.plan is None:
            return {"kind": self.kind}
        return {
            "kind": self.kind,
            "scheme": self.plan.scheme.name,
            "per_channel": self.plan.per_channel,
            "kernels": sorted(self.plan.kernels),
            "ranges": {name: list(pair) for name, pair in sorted(self.plan.ranges.items())},
            "factors": {
                name: base64.b64encode(value.astype("<f4").tobytes()).decode()
                for name, value in sorted(self.factors.items())
            },
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Form":
        """Return the form that a parsed JSON object states.

        Raises:
            RecipeError: a field is missing or has the wrong type or value.
        """
        kind = value.get("kind")
        if kind not in KINDS:
            raise RecipeError(f"recipe: form.kind is {kind!r}, expected one of {', '.join(KINDS)}")
        if kind != STATIC_INT8:
            return cls(kind)
        try:
            ranges = {str(name): (float(low), float(high)) for name, (low, high) in value["ranges"].items()}
            factors = {
                str(name): np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32)
                for name, text in value["factors"].items()
            }
            if not np.isfinite([*sum(ranges.values(), ())]).all():
                raise ValueError("a range is not finite")
            if any(not np.isfinite(factor).all() or (factor <= 0).any() for factor in factors.values()):
                raise ValueError("a factor is not a positive number")
            scheme = SCHEMES[value["scheme"]]
            kernels = frozenset(str(name) for name in value["kernels"])
            return cls(kind, Plan(scheme, kernels, ranges, bool(value["per_channel"])), factors)
        except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
            raise RecipeError(f"recipe: form is malformed: {error!r}") from error


def build(model: onnx.ModelProto, form: Form) -> onnx.ModelProto | None:
    """Return the form's model, or None where the model has no layer that the form changes.

    Args:
        model: the optimised float model, with shapes inferred where that is possible.
        form: what to make of it.

    Raises:
        RecipeError: the plan does not belong to this model.
    """
    if form.plan is not None:
        try:
            floats = apply_factors(model, form.factors) if form.factors else model
            return shorten_names(storage.half_weights(write_qdq(floats, form.plan)))
        except (KeyError, ValueError) as error:
            raise RecipeError(f"recipe: the form does not fit the model: {error}") from error
    makers = {
        FLOAT32: lambda: model,
        FLOAT16_WEIGHTS: lambda: storage.half_weights(model),
        INT8_WEIGHTS: lambda: storage.int8_weights(model),
        INT4_WEIGHTS: lambda: storage.int4_weights(model),
        DYNAMIC_INT8: lambda: storage.dynamic_int8(model),
    }
    made = makers[form.kind]()
    return None if made is None else shorten_names(made)
