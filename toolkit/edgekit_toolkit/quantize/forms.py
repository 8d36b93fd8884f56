"""The forms in which the weights and arithmetic of a model can be packaged, as data that a recipe stores.

`build` makes a form's model from the optimised float model and nothing else, so that a recipe repeats it
without calibration data.
"""

import base64
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_runtime.errors import RecipeError
from edgekit_toolkit.graph import GraphIndex
from edgekit_toolkit.quantize import storage
from edgekit_toolkit.quantize.compact import shorten_names
from edgekit_toolkit.quantize.equalize import apply_factors
from edgekit_toolkit.quantize.plan import COMPUTE, Plan
from edgekit_toolkit.quantize.qdq import write_qdq
from edgekit_toolkit.quantize.scheme import SCHEMES

FLOAT32: Final = "float32"
FLOAT16_WEIGHTS: Final = "float16-weights"
INT8_WEIGHTS: Final = "int8-weights"
INT4_WEIGHTS: Final = "int4-weights"
DYNAMIC_INT8: Final = "dynamic-int8"
STATIC_INT8: Final = "static-int8"
KINDS: Final = (FLOAT32, FLOAT16_WEIGHTS, INT8_WEIGHTS, INT4_WEIGHTS, DYNAMIC_INT8, STATIC_INT8)

_STORED: Final[Mapping[str, Callable[[onnx.ModelProto], onnx.ModelProto | None]]] = {
    FLOAT16_WEIGHTS: storage.half_weights,
    INT8_WEIGHTS: storage.int8_weights,
    INT4_WEIGHTS: storage.int4_weights,
    DYNAMIC_INT8: storage.dynamic_int8,
}


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

    def __post_init__(self) -> None:
        if self.kind not in KINDS or (self.plan is not None) != (self.kind == STATIC_INT8):
            raise ValueError(f"form {self.kind!r} with plan {self.plan!r}")

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
    def from_json(cls, value: Any) -> "Form":
        """Return the form that a parsed JSON object states.

        Raises:
            RecipeError: a field is missing or has the wrong type or value.
        """
        if not isinstance(value, Mapping):
            raise RecipeError(f"recipe: form is {value!r}, expected an object")
        kind = value.get("kind")
        if kind not in KINDS:
            raise RecipeError(f"recipe: form.kind is {kind!r}, expected one of {', '.join(KINDS)}")
        if kind != STATIC_INT8:
            return cls(kind)
        try:
            plan = Plan(
                scheme=SCHEMES[value["scheme"]],
                kernels=frozenset(_kernels(value["kernels"])),
                ranges={name: _range(name, pair) for name, pair in value["ranges"].items()},
                per_channel=_flag("per_channel", value["per_channel"]),
            )
            return cls(kind, plan, {name: _factor(name, text) for name, text in value["factors"].items()})
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RecipeError(f"recipe: form is malformed: {error!r}") from error


def _kernels(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"kernels are {value!r}, expected a list of names")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected true or false")
    return value


def _range(name: str, pair: Any) -> tuple[float, float]:
    low, high = (float(bound) for bound in pair if isinstance(bound, int | float))
    if len(pair) != 2 or not (math.isfinite(low) and math.isfinite(high)) or low > high:
        raise ValueError(f"range of {name!r} is {pair!r}, expected two numbers in order")
    return low, high


def _factor(name: str, text: Any) -> NDArray[np.float32]:
    factor = np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32)
    if not np.isfinite(factor).all() or not (factor > 0).all():
        raise ValueError(f"factors of {name!r} are not all positive numbers")
    return factor


def build(model: onnx.ModelProto, form: Form) -> onnx.ModelProto | None:
    """Return the form's model, or None where the model has no layer that the form changes.

    Args:
        model: the optimised float model, with shapes inferred where that is possible.
        form: what to make of it.

    Raises:
        RecipeError: the plan does not belong to this model.
    """
    made = _build_named(model, form)
    return None if made is None else shorten_names(made)


def _build_named(model: onnx.ModelProto, form: Form) -> onnx.ModelProto | None:
    """The form's model with the names of `model`."""
    if form.plan is None:
        return model if form.kind == FLOAT32 else _STORED[form.kind](model)
    try:
        floats = apply_factors(model, form.factors) if form.factors else model
        quantized = write_qdq(floats, form.plan)
    except (KeyError, ValueError) as error:
        raise RecipeError(f"recipe: the form does not fit the model: {error!r}") from error
    return storage.half_weights(quantized) or quantized


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """How one layer with weights is stored and computed in a form's model.

    Attributes:
        precision: int8, int8 weights, int4 weights, fp16 weights, fp32, or dynamic int8.
        weight_bytes: its constants in the file, scales included.
    """

    precision: str
    weight_bytes: int


_LAYERS: Final = COMPUTE | {"ConvTranspose", "LSTM", "GRU"}
_CODES: Final = {onnx.TensorProto.INT8: "int8 weights", onnx.TensorProto.INT4: "int4 weights"}


def stored_layers(model: onnx.ModelProto, form: Form) -> dict[str, StoredLayer]:
    """Return how each layer of the optimised model is stored, read from the form's model, by first output."""
    made = _build_named(model, form)
    if made is None:
        return {}
    index = GraphIndex(made.graph)
    layers = {}
    for node in model.graph.node:
        if node.op_type not in _LAYERS:
            continue
        kernel = form.plan is not None and node.output[0] in form.plan.kernels
        twin = next(
            (
                one
                for one in made.graph.node
                if one.op_type == node.op_type and one.name == node.name and node.name
            ),
            index.producers.get(node.output[0]),
        )
        if twin is None or twin.op_type != node.op_type:
            codes = [tensor for tensor in made.graph.initializer if tensor.name.startswith(node.input[1])]
            layers[node.output[0]] = StoredLayer("dynamic int8", sum(tensor.ByteSize() for tensor in codes))
            continue
        roots = [tensor for name in twin.input[1:] for tensor in _roots(index, name)]
        precision = "int8" if kernel else _precision(index, twin)
        layers[node.output[0]] = StoredLayer(precision, sum(tensor.ByteSize() for tensor in roots))
    return layers


def _precision(index: GraphIndex, node: onnx.NodeProto) -> str:
    source = index.producers.get(node.input[1])
    if source is None or not source.input or source.input[0] not in index.initializers:
        return "fp32"
    kind = index.initializers[source.input[0]].data_type
    return "fp16 weights" if source.op_type == "Cast" else _CODES.get(kind, "fp32")


def _roots(index: GraphIndex, name: str) -> list[onnx.TensorProto]:
    """Initializers that a weight input is made of."""
    if name in index.initializers:
        return [index.initializers[name]]
    source = index.producers.get(name)
    if source is None or source.op_type not in {"DequantizeLinear", "Cast"}:
        return []
    return [index.initializers[one] for one in source.input if one in index.initializers]
