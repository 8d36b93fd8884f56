"""Writes the forms of a LiteRT model with ai-edge-quantizer.

Inputs and outputs keep their types, so a static int8 model converts them to and from int8 itself. The form
contains the ranges, so the library needs no samples. docs/adr/0010-tflite-quantization.md describes the
library's limits.
"""

import contextlib
import io
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import BackendError, RecipeError
from edgekit_runtime.sessions import EngineMissingError
from edgekit_runtime.system.install_hint import install_command
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.litert.fold import fold_pixels
from edgekit_toolkit.quantize.litert.kernels import scope
from edgekit_toolkit.quantize.litert.near import bring_near
from edgekit_toolkit.quantize.litert.prepare import finish
from edgekit_toolkit.quantize.litert.weights import weight_bounds
from edgekit_toolkit.quantize.onnx.storage import fits_half
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.tflite.flatbuffer import (
    Model,
    Operator,
    SubGraph,
    constant,
    operator_name,
    operators,
    parsed,
    shape_of,
    stored_bytes,
    tensor_name,
)

_ALL: Final = ".*"
# Settings with the same expression have the rank of the first of them.
_ALL_LATER: Final = "^.*$"
_INT4_BLOCK: Final = 32
_MIN_INT4_BYTES: Final = 4 * 4096
# Operators for which a kernel that quantizes its input at run time pays off. That of depthwise convolutions
# takes twice to six times as long as the float one.
_DYNAMIC: Final = ("BATCH_MATMUL", "CONV_2D", "FULLY_CONNECTED")
_LAYERS: Final = frozenset(
    {"BATCH_MATMUL", "CONV_2D", "DEPTHWISE_CONV_2D", "EMBEDDING_LOOKUP", "FULLY_CONNECTED", "TRANSPOSE_CONV"}
)


def build(
    prepared: bytes, form: Form, scales: Mapping[str, NDArray[np.float32]] | None = None
) -> bytes | None:
    """Return the `.tflite` model of a form, or None if the form changes no layer of the model.

    Args:
        prepared: A float model from `prepare.prepare`, to which the compression of the form is already
            applied.
        form: The form.
        scales: The scales of compressed weights, see `weight_bounds`.

    Raises:
        RecipeError: The form does not fit the model, or has channel factors.
        BackendError: The library refuses the model.
        EngineMissingError: The library is not installed.
    """
    if form.kind == forms.FLOAT32:
        return None
    if form.factors:
        raise RecipeError("recipe: a LiteRT form has no channel factors; make the recipe again")
    library = _load()
    try:
        # The library warns about an interpreter that it opens itself, and draws progress bars for large
        # models.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            prepared, form = _folded(prepared, form)
            order = _Order(library, prepared, scales or {})
            if not order.ask(form):
                return None
            content = finish(order.carry_out(), prepared)
            return content if form.earlier is None else bring_near(content, form.earlier.read())
    except RecipeError:
        raise
    except Exception as error:  # the library passes on exceptions of any class
        raise BackendError(
            f"ai-edge-quantizer cannot make {form.kind} of the model: {' '.join(str(error).split())}"
        ) from error


def _folded(prepared: bytes, form: Form) -> tuple[bytes, Form]:
    if form.plan is None or not form.plan.scheme.folds_pixels:
        return prepared, form
    prepared, plan = fold_pixels(prepared, form.plan)
    return prepared, replace(form, plan=plan)


def _load() -> Any:
    try:
        from ai_edge_quantizer import quantizer
    except ImportError as error:
        raise EngineMissingError(
            f"quantizing .tflite models needs ai-edge-quantizer ({error}): {install_command('litert-host')}"
        ) from error
    return quantizer


class _Order:
    """The settings for the library for one form. Of two settings that match an operator, the later counts."""

    def __init__(self, library: Any, prepared: bytes, scales: Mapping[str, NDArray[np.float32]]) -> None:
        self._library, self._scales = library, scales
        self._quantizer = library.Quantizer(bytearray(prepared))
        self._kinds = library.qtyping.TFLOperationName
        self._model = parsed(prepared)
        self._spans: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}

    def carry_out(self) -> bytes:
        """Return the file that the library makes."""
        ranges = {name: {"min": low, "max": high} for name, (low, high) in self._spans.items()}
        content = self._quantizer.quantize(
            ranges or None, enable_progress_bar=False, enable_progress_report=False
        )
        return bytes(content.quantized_model)

    def ask(self, form: Form) -> bool:
        """Request a form; returns whether that changes anything.

        Raises:
            RecipeError: the plan does not belong to this model.
        """
        if form.plan is not None:
            self._ask_static(form.plan)
            return True
        if form.kind == forms.INT4_WEIGHTS:
            return self._ask_int4()
        if not any(
            operator_name(self._model, operator) in _LAYERS for *_, operator in operators(self._model)
        ):
            return False
        if form.kind == forms.FLOAT16_WEIGHTS:
            return self._ask_half()
        if form.layers is not None:
            return self._ask_int8(form.layers)
        self._quantizer.add_weight_only_config(_ALL, self._kinds.ALL_SUPPORTED, 8)
        self._ask_tables(_ALL)
        if form.kind == forms.DYNAMIC_INT8:
            self._ask_dynamic()
        return True

    def _ask_int8(self, layers: Collection[str]) -> bool:
        """Request int8 weights in these layers and float16 weights in the others.

        Raises:
            RecipeError: the model has no such layer.
        """
        scope_by_layer = _layer_scopes(self._model)
        if strangers := set(layers) - set(scope_by_layer):
            raise RecipeError(f"recipe: the form does not fit the model: no layer makes {min(strangers)!r}")
        self._ask_half()
        scopes = [scope_by_layer[name] for name in sorted(layers)]
        self._quantizer.add_weight_only_config(_exactly(scopes), self._kinds.ALL_SUPPORTED, 8)
        self._ask_tables(_exactly(scopes))
        return bool(layers)

    def _ask_tables(self, scopes: str) -> None:
        """Request int8 embedding tables; a lookup widens the rows that it reads, not the whole table."""
        self._quantizer.add_dynamic_config(scopes, self._kinds.EMBEDDING_LOOKUP, 8)

    def _ask_dynamic(self) -> None:
        """Request dynamic int8 for computed inputs; a constant input would become int8 like weights."""
        for name in _DYNAMIC:
            scopes = [
                scope(graph, operator)
                for graph, _, operator in operators(self._model)
                if operator_name(self._model, operator) == name
                and not stored_bytes(self._model, graph.tensors[operator.inputs[0]])
            ]
            if scopes:
                self._quantizer.add_dynamic_config(_exactly(scopes), self._kinds[name], 8)

    def _ask_half(self) -> bool:
        """Request float16 weights in the layers that allow it; returns whether there are any."""
        casting = self._library.AlgorithmName.FLOAT_CASTING
        self._quantizer.add_weight_only_config(_ALL, self._kinds.ALL_SUPPORTED, 16, algorithm_key=casting)
        fitting = {
            scope(graph, operator): all(map(fits_half, self._weights(graph, operator)))
            for graph, _, operator in operators(self._model)
            if operator_name(self._model, operator) in _LAYERS
        }
        unfitting = [name for name, fits in fitting.items() if not fits]
        if unfitting:
            none = self._library.AlgorithmName.NO_QUANTIZE
            self._quantizer.update_quantization_recipe(
                _exactly(unfitting), self._kinds.ALL_SUPPORTED, algorithm_key=none
            )
        return len(unfitting) < len(fitting)

    def _weights(self, graph: SubGraph, operator: Operator) -> Iterator[NDArray[Any]]:
        """Yield the constants of a layer that the library would cast: not its bias, which stays float32."""
        for index in operator.inputs:
            value = constant(self._model, graph.tensors[index]) if index >= 0 else None
            if value is not None and value.ndim > 1 and value.dtype == np.float32:
                yield value

    def _ask_int4(self) -> bool:
        """Request int4 in blocks of 32 inputs; the kernel for them quantizes its input at run time."""
        scopes = []
        for graph, _, operator in operators(self._model):
            if operator_name(self._model, operator) != "FULLY_CONNECTED":
                continue
            weight = graph.tensors[operator.inputs[1]]
            large = stored_bytes(self._model, weight) >= _MIN_INT4_BYTES
            if large and shape_of(weight)[1] % _INT4_BLOCK == 0:
                scopes.append(scope(graph, operator))
        if scopes:
            self._ask_half()
            self._ask_tables(_ALL)
            blocks = self._library.qtyping.QuantGranularity[f"BLOCKWISE_{_INT4_BLOCK}"]
            kind = self._kinds.FULLY_CONNECTED
            self._quantizer.add_dynamic_config(_exactly(scopes), kind, 4, granularity=blocks)
        return bool(scopes)

    def _ask_static(self, plan: Plan) -> None:
        quantized = {
            tensor_name(graph.tensors[operator.outputs[0]]): scope(graph, operator)
            for graph, _, operator in operators(self._model)
        }
        try:
            scopes = [quantized[name] for name in sorted(plan.kernels)]
        except KeyError as error:
            raise RecipeError(
                f"recipe: the form does not fit the model: no operator makes {error}"
            ) from error
        self._ask_half()  # of operators that stay in float
        self._ask_tables(_ALL)
        scales = self._library.qtyping.QuantGranularity["CHANNELWISE" if plan.per_channel else "TENSORWISE"]
        self._quantizer.add_static_config(_exactly(scopes), self._kinds.ALL_SUPPORTED, 8, 8, scales)
        # Its kernel takes one scale for a constant; with a scale for each channel it computes zeros.
        whole = self._library.qtyping.QuantGranularity.TENSORWISE
        self._quantizer.add_static_config(_exactly(scopes), self._kinds.BATCH_MATMUL, 8, 8, whole)
        # The last operator of an output shares the output's name, which would make the output int8.
        none = self._library.AlgorithmName.NO_QUANTIZE
        self._quantizer.update_quantization_recipe(_ALL_LATER, self._kinds.OUTPUT, algorithm_key=none)
        tensors = {tensor_name(tensor): tensor for graph in self._model.subgraphs for tensor in graph.tensors}
        for name, (low, high) in plan.ranges.items():
            # With the tensor's rank: the library also applies them to constants that share a scale.
            unit_axes = [1] * len(shape_of(tensors[name])) if name in tensors else [1]
            self._spans[name] = np.full(unit_axes, low, np.float32), np.full(unit_axes, high, np.float32)
        for name, bound in weight_bounds(self._model, plan, self._scales).items():
            self._spans[name] = -bound, bound


def int8_layers(prepared: bytes) -> list[str]:
    """Return the output names of the layers that can have int8 weights, in order."""
    return list(_layer_scopes(parsed(prepared)))


def _layer_scopes(model: Model) -> dict[str, str]:
    """Return the expression by which the library finds each layer, by the name of the layer's output."""
    return {
        tensor_name(graph.tensors[operator.outputs[0]]): scope(graph, operator)
        for graph, _, operator in operators(model)
        if operator_name(model, operator) in _LAYERS
    }


def _exactly(scopes: Sequence[str]) -> str:
    return f"^(?:{'|'.join(map(re.escape, scopes))})$"
