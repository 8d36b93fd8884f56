"""The forms of weights and arithmetic in which a model can be packaged. Recipes store them.

`build` only needs the optimised float model and the form, so a recipe needs no calibration data.
"""

import base64
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray

from edgekit_runtime.errors import RecipeError
from edgekit_toolkit.compress.compression import Compression
from edgekit_toolkit.onnx_graph.index import GraphIndex, opset
from edgekit_toolkit.onnx_graph.traversal import StoredLayer
from edgekit_toolkit.quantize.onnx import storage
from edgekit_toolkit.quantize.onnx.compact import (
    derive_bias_scales,
    shorten_names,
    split_parameters,
    store_parameters,
)
from edgekit_toolkit.quantize.onnx.embedding_tables import (
    added_table,
    int8_tables,
    is_table_lookup,
    stored_table,
)
from edgekit_toolkit.quantize.onnx.equalize import apply_factors
from edgekit_toolkit.quantize.onnx.near import bring_near
from edgekit_toolkit.quantize.onnx.qdq import write_qdq
from edgekit_toolkit.quantize.plan import COMPUTE, Plan
from edgekit_toolkit.quantize.scheme import SCHEMES

FLOAT32: Final = "float32"
FLOAT16_WEIGHTS: Final = "float16-weights"
INT8_WEIGHTS: Final = "int8-weights"
INT4_WEIGHTS: Final = "int4-weights"
DYNAMIC_INT8: Final = "dynamic-int8"
STATIC_INT8: Final = "static-int8"
BFLOAT16_ARITHMETIC: Final = "bfloat16-arithmetic"
FLOAT16_ARITHMETIC: Final = "float16-arithmetic"
_SHA256: Final = re.compile("[0-9a-f]{64}")
KINDS: Final = (
    FLOAT32,
    FLOAT16_WEIGHTS,
    BFLOAT16_ARITHMETIC,
    INT8_WEIGHTS,
    INT4_WEIGHTS,
    DYNAMIC_INT8,
    STATIC_INT8,
)
"""The kinds that a search tries."""
UNTIMED_KINDS: Final = (FLOAT16_ARITHMETIC,)
"""The kinds that are made only on request, because no processor here can time them."""


@dataclass(frozen=True, slots=True)
class EarlierModel:
    """The model of an earlier package. An update is small if its weights are near those of this model.

    Attributes:
        sha256: The digest of the model's file.
        content: The content of the file, or None if it was read from a recipe, which only stores the digest.
    """

    sha256: str
    content: bytes | None = field(default=None, repr=False)

    def read(self) -> bytes:
        """Return the content of the model's file.

        Raises:
            RecipeError: `content` is None.
        """
        if self.content is None:
            raise RecipeError(
                f"the recipe makes an update of the model with sha256 {self.sha256}: name the recipe of that"
                " model's package with --like too"
            )
        return self.content


@dataclass(frozen=True, slots=True)
class Form:
    """The form of the weights and arithmetic of a model.

    Attributes:
        kind: One of `KINDS` or `UNTIMED_KINDS`.
        plan: The kernels and ranges of `static-int8`, or None for other kinds.
        factors: A dict from each equalized tensor to the float32 factors of its channels, without pruned
            channels. Empty without a plan.
        layers: For `int8-weights`, the first outputs of the layers with int8 weights, or None for all layers
            in `int8_layers`. Other layers have float16 weights.
        compression: The compression of the float model, or None.
        earlier: The earlier model to which the weights are kept close, or None.
    """

    kind: str
    plan: Plan | None = None
    factors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    layers: frozenset[str] | None = None
    earlier: EarlierModel | None = None
    compression: Compression | None = None

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, *UNTIMED_KINDS) or (self.plan is not None) != (self.kind == STATIC_INT8):
            raise ValueError(f"form {self.kind!r} with plan {self.plan!r}")
        if self.layers is not None and self.kind != INT8_WEIGHTS:
            raise ValueError(f"form {self.kind!r} with chosen layers")

    def to_json(self) -> dict[str, Any]:
        """Return the form as a JSON object. It contains only the digest of the earlier model."""
        value = self._to_json()
        if self.compression is not None:
            value["compression"] = self.compression.to_json()
        return value if self.earlier is None else {**value, "earlier": self.earlier.sha256}

    def _to_json(self) -> dict[str, Any]:
        if self.layers is not None:
            return {"kind": self.kind, "layers": sorted(self.layers)}
        if self.plan is None:
            return {"kind": self.kind}
        disabled = self.plan.disabled_optimizers
        return {
            "kind": self.kind,
            **({"disabled_optimizers": list(disabled)} if disabled else {}),
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
        """Return the form from a JSON object. The content of its earlier model is None.

        Raises:
            RecipeError: A field is missing or invalid.
        """
        if not isinstance(value, Mapping):
            raise RecipeError(f"recipe: form is {value!r}, expected an object")
        kind = value.get("kind")
        if kind not in (*KINDS, *UNTIMED_KINDS):
            raise RecipeError(f"recipe: form.kind is {kind!r}, expected one of {', '.join(KINDS)}")
        try:
            earlier = _earlier(value.get("earlier"))
            stated = value.get("compression")
            compression = None if stated is None else Compression.from_json(stated)
            if kind == INT8_WEIGHTS and "layers" in value:
                layers = frozenset(_names("layers", value["layers"]))
                return cls(kind, layers=layers, earlier=earlier, compression=compression)
            if kind != STATIC_INT8:
                return cls(kind, earlier=earlier, compression=compression)
            plan = Plan(
                scheme=SCHEMES[value["scheme"]],
                kernels=frozenset(_names("kernels", value["kernels"])),
                ranges={name: _range(name, pair) for name, pair in value["ranges"].items()},
                per_channel=_flag("per_channel", value["per_channel"]),
                disabled_optimizers=tuple(
                    _names("disabled_optimizers", value.get("disabled_optimizers", []))
                ),
            )
            factors = {name: _factor(name, text) for name, text in value["factors"].items()}
            return cls(kind, plan, factors, earlier=earlier, compression=compression)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RecipeError(f"recipe: form is malformed: {error!r}") from error


def _earlier(value: Any) -> EarlierModel | None:
    if value is not None and not (isinstance(value, str) and _SHA256.fullmatch(value)):
        raise ValueError(f"earlier is {value!r}, expected a sha256")
    return None if value is None else EarlierModel(value)


def _names(field_name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{field_name} are {value!r}, expected a list of names")
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
    """Return the model in this form, or None if the form changes no layer of `model`.

    Raises:
        RecipeError: The form does not fit the model, or the content of its earlier model is missing.
        BackendError: onnxruntime fails to build a dynamic int8 form.
    """
    built = _build_named(model, form)
    if built is None:
        return None
    short = shorten_names(built)
    if form.earlier is not None:
        short = bring_near(short, store_parameters(_parse(form.earlier)))
    if form.plan is None or form.plan.scheme.symmetric:  # TensorRT takes stored parameters alone
        return short
    return split_parameters(derive_bias_scales(short))


def _parse(earlier: EarlierModel) -> onnx.ModelProto:
    try:
        return onnx.load_from_string(earlier.read())
    except DecodeError as error:
        raise RecipeError("--like: the model of the earlier package is not ONNX, as this one is") from error


def compressed_floats(model: onnx.ModelProto, form: Form) -> onnx.ModelProto:
    """Return the compressed and equalized float model from which a form is quantized.

    Channels are pruned first, then the remaining channels are equalized, then the weights are rounded.

    Raises:
        RecipeError: The form does not fit the model.
    """
    try:
        floats = model if form.compression is None else form.compression.slice(model)
        floats = apply_factors(floats, form.factors) if form.factors else floats
        return floats if form.compression is None else form.compression.apply(floats)
    except (KeyError, ValueError) as error:
        raise RecipeError(f"recipe: the form does not fit the model: {error!r}") from error


def _build_named(model: onnx.ModelProto, form: Form) -> onnx.ModelProto | None:
    """The form's model with the names of `model`."""
    model = compressed_floats(model, form)
    if form.kind == FLOAT32:
        return model
    if form.kind == FLOAT16_WEIGHTS:
        return storage.half_weights(model)
    if form.kind == BFLOAT16_ARITHMETIC:
        return storage.half_weights(model) or model
    if form.kind == INT8_WEIGHTS:
        return _int8_weights(model, form)
    built = _quantized(model, form)
    # Constants that the form leaves in float: tables become int8, other weights half precision.
    return None if built is None else _changed(built, int8_tables, storage.half_weights) or built


def _quantized(model: onnx.ModelProto, form: Form) -> onnx.ModelProto | None:
    if form.kind == INT4_WEIGHTS:
        return storage.int4_weights(model)
    if form.plan is None:
        return storage.dynamic_int8(model)
    try:
        return write_qdq(model, form.plan, _scales(form))
    except (KeyError, ValueError) as error:
        raise RecipeError(f"recipe: the form does not fit the model: {error!r}") from error


def _scales(form: Form) -> Mapping[str, NDArray[np.float32]]:
    return {} if form.compression is None else form.compression.scales()


def _int8_weights(model: onnx.ModelProto, form: Form) -> onnx.ModelProto | None:
    """Weights and tables of the form's layers as int8, the rest in half precision; None if none is int8."""
    layers = form.layers
    candidates = frozenset(int8_layers(model))
    if layers is not None and not layers <= candidates:
        raise RecipeError(
            f"recipe: the form does not fit the model: no int8 weight in {min(layers - candidates)!r}"
        )
    chosen = candidates if layers is None else layers
    to_int8 = partial(storage.int8_weights, layers=chosen, scales=_scales(form))
    built = _changed(model, to_int8, partial(int8_tables, layers=chosen))
    return None if built is None else storage.half_weights(built) or built


def _changed(
    model: onnx.ModelProto, *changes: Callable[[onnx.ModelProto], onnx.ModelProto | None]
) -> onnx.ModelProto | None:
    """Apply changes one after the other; return None if none of them changes anything."""
    result = None
    for change in changes:
        result = change(result or model) or result
    return result


def int8_layers(model: onnx.ModelProto) -> list[str]:
    """Return the first outputs of the layers that can have int8 weights, in the order of the graph."""
    index = GraphIndex(model.graph)
    has_scales = opset(model) >= storage.OPSET_INT8
    return [
        node.output[0]
        for node in model.graph.node
        if (has_scales and storage.int8_weight(index, node) is not None)
        or is_table_lookup(index, node)
        or added_table(index, node) is not None
    ]


_LAYERS: Final = COMPUTE | {"ConvTranspose", "LSTM", "GRU"}


def weight_inputs(node: onnx.NodeProto) -> list[str]:
    """Return the inputs of a node that can be weights.

    For a Gather, this is the first input. For other nodes, these are all inputs but the first.
    """
    return list(node.input[:1] if node.op_type == "Gather" else node.input[1:])


_CODES: Final = {onnx.TensorProto.INT8: "int8 weights", onnx.TensorProto.INT4: "int4 weights"}


def stored_layers(model: onnx.ModelProto, form: Form) -> dict[str, StoredLayer]:
    """Return the storage of each layer that a form changes, by the first output of the layer.

    Raises:
        RecipeError: The form does not fit the model.
    """
    built = _build_named(model, form)
    if built is None:
        return {}
    index, floats = GraphIndex(built.graph), GraphIndex(model.graph)
    layers = {}
    for node in model.graph.node:
        if is_table_lookup(floats, node):
            layers[node.output[0]] = _stored_lookup(index, node)
        if (table := added_table(floats, node)) is not None:
            layers[node.output[0]] = _stored_added(index, node, list(node.input).index(table))
        if node.op_type not in _LAYERS:
            continue
        kernel = form.plan is not None and node.output[0] in form.plan.kernels
        twin = next(
            (
                twin
                for twin in built.graph.node
                if twin.op_type == node.op_type and twin.name == node.name and node.name
            ),
            index.producers.get(node.output[0]),
        )
        if twin is None or twin.op_type != node.op_type:
            codes = [tensor for tensor in built.graph.initializer if tensor.name.startswith(node.input[1])]
            layers[node.output[0]] = StoredLayer("dynamic int8", sum(tensor.ByteSize() for tensor in codes))
            continue
        roots = [tensor for name in twin.input[1:] for tensor in _roots(index, name)]
        precision = "int8" if kernel else _precision(index, twin)
        coded = None if form.compression is None else form.compression.weights.get(node.input[1])
        if coded is not None and coded.bits < 8:
            precision += f", codes of {coded.bits} bits"
        layers[node.output[0]] = StoredLayer(precision, sum(tensor.ByteSize() for tensor in roots))
    return layers


def _stored_lookup(index: GraphIndex, node: onnx.NodeProto) -> StoredLayer:
    if codes := stored_table(index, node.output[0]):
        return StoredLayer("int8 weights", sum(tensor.ByteSize() for tensor in codes))
    twin = index.producers[node.output[0]]
    return StoredLayer(
        _precision(index, twin), sum(tensor.ByteSize() for tensor in _roots(index, twin.input[0]))
    )


def _stored_added(index: GraphIndex, node: onnx.NodeProto, position: int) -> StoredLayer:
    name = index.producers[node.output[0]].input[position]
    if codes := stored_table(index, name):
        return StoredLayer("int8 weights", sum(tensor.ByteSize() for tensor in codes))
    source = index.producers.get(name)
    precision = "fp16 weights" if source is not None and source.op_type == "Cast" else "fp32"
    return StoredLayer(precision, sum(tensor.ByteSize() for tensor in _roots(index, name)))


def _precision(index: GraphIndex, node: onnx.NodeProto) -> str:
    source = index.producers.get(weight_inputs(node)[0])
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
    return [index.initializers[name] for name in source.input if name in index.initializers]
