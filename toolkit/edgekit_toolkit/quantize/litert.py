"""The forms of a LiteRT model, written by ai-edge-quantizer from a `Form` and nothing else.

Inputs and outputs stay as they are in the source: a static int8 form converts inside. Ranges come from us, so
that the library never sees a sample. See docs/adr/0010-tflite-quantization.md for what it cannot do.
"""

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from edgekit_runtime.errors import BackendError, RecipeError
from edgekit_runtime.sessions import EngineMissingError
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.litert_kernels import scope
from edgekit_toolkit.quantize.litert_prepare import finish
from edgekit_toolkit.quantize.litert_weights import weight_bounds
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.tflite_file import operator_name, operators, parsed, shape_of, stored_bytes, tensor_name

_ALL: Final = ".*"
_INT4_BLOCK: Final = 32
_MIN_INT4_BYTES: Final = 4 * 4096


def build(prepared: bytes, form: Form) -> bytes | None:
    """Return the form's model, or None where the model has no layer that the form changes.

    Args:
        prepared: the float model as `litert_prepare.prepare` made it.
        form: what to make of it.

    Raises:
        RecipeError: the plan does not belong to this model.
        BackendError: the library refuses the model.
        EngineMissingError: the library is not installed.
    """
    if form.kind == forms.FLOAT32:
        return finish(prepared)
    if form.factors:
        raise RecipeError("recipe: a LiteRT form has no channel factors; make the recipe again")
    library = _load()
    try:
        quantizer = library.Quantizer(bytearray(prepared))
        ranges = _ask(library, quantizer, prepared, form)
        if ranges is None:
            return None
        # It warns of an interpreter that it opens for a look, and draws bars for models that it finds large.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            made = quantizer.quantize(ranges or None, enable_progress_bar=False, enable_progress_report=False)
    except RecipeError:
        raise
    except Exception as error:  # the library raises whatever its parts do
        raise BackendError(
            f"ai-edge-quantizer cannot make {form.kind} of the model: {' '.join(str(error).split())}"
        ) from error
    return finish(made.quantized_model)


def _load() -> Any:
    try:
        from ai_edge_quantizer import quantizer
    except ImportError as error:
        raise EngineMissingError(
            f"quantizing .tflite models needs ai-edge-quantizer ({error}); pip install 'edgekit[litert-host]'"
        ) from error
    return quantizer


def _ask(library: Any, quantizer: Any, prepared: bytes, form: Form) -> Mapping[str, Any] | None:
    """Tell the library what to make; returns ranges, empty where none are needed, None for nothing to do."""
    if form.plan is not None:
        return _ask_static(library, quantizer, prepared, form.plan)
    model = parsed(prepared)
    kinds = {operator_name(model, operator) for _, _, operator in operators(model)}
    if not kinds & _WEIGHTED[form.kind]:
        return None
    return {} if _ASK[form.kind](library, quantizer, prepared) else None


def _ask_static(library: Any, quantizer: Any, prepared: bytes, plan: Plan) -> Mapping[str, Any]:
    model = parsed(prepared)
    known = {tensor_name(graph.tensors[op.outputs[0]]): (graph, op) for graph, _, op in operators(model)}
    try:
        scopes = [scope(*known[name]) for name in sorted(plan.kernels)]
    except KeyError as error:
        raise RecipeError(f"recipe: the form does not fit the model: no operator makes {error}") from error
    _half(library, quantizer, prepared)
    quantizer.add_static_config(
        _exactly(scopes),
        library.qtyping.TFLOperationName.ALL_SUPPORTED,
        8,
        8,
        _granularity(library, "CHANNELWISE" if plan.per_channel else "TENSORWISE"),
    )
    # The name of an output's last operator is the output's too, and would make it int8.
    none = library.AlgorithmName.NO_QUANTIZE
    quantizer.update_quantization_recipe(_ALL, library.qtyping.TFLOperationName.OUTPUT, algorithm_key=none)
    spans = {
        name: (np.asarray([low], np.float32), np.asarray([high], np.float32))
        for name, (low, high) in plan.ranges.items()
    }
    spans |= {name: (-bound, bound) for name, bound in weight_bounds(model, plan).items()}
    return {name: {"min": low, "max": high} for name, (low, high) in spans.items()}


def _exactly(scopes: Sequence[str]) -> str:
    return f"^(?:{'|'.join(map(re.escape, scopes))})$"


def _granularity(library: Any, name: str) -> Any:
    return library.qtyping.QuantGranularity[name]


def _half(library: Any, quantizer: Any, prepared: bytes) -> bool:
    del prepared
    quantizer.add_weight_only_config(
        _ALL,
        library.qtyping.TFLOperationName.ALL_SUPPORTED,
        16,
        algorithm_key=library.AlgorithmName.FLOAT_CASTING,
    )
    return True


def _int8(library: Any, quantizer: Any, prepared: bytes) -> bool:
    del prepared
    quantizer.add_weight_only_config(_ALL, library.qtyping.TFLOperationName.ALL_SUPPORTED, 8)
    return True


def _dynamic(library: Any, quantizer: Any, prepared: bytes) -> bool:
    """Not depthwise convolutions, whose kernel for it takes twice to six times as long as the float one."""
    _int8(library, quantizer, prepared)
    for name in ("BATCH_MATMUL", "CONV_2D", "FULLY_CONNECTED"):
        quantizer.add_dynamic_config(_ALL, library.qtyping.TFLOperationName[name], 8)
    return True


def _int4(library: Any, quantizer: Any, prepared: bytes) -> bool:
    """Blocks of 32 inputs; the kernel that exists for them quantizes its input at run time."""
    model = parsed(prepared)
    scopes = []
    for graph, _, operator in operators(model):
        if operator_name(model, operator) != "FULLY_CONNECTED":
            continue
        weight = graph.tensors[operator.inputs[1]]
        if stored_bytes(model, weight) >= _MIN_INT4_BYTES and shape_of(weight)[1] % _INT4_BLOCK == 0:
            scopes.append(scope(graph, operator))
    if scopes:
        granularity = _granularity(library, f"BLOCKWISE_{_INT4_BLOCK}")
        quantizer.add_dynamic_config(
            _exactly(scopes), library.qtyping.TFLOperationName.FULLY_CONNECTED, 4, granularity=granularity
        )
    return bool(scopes)


_LAYERS: Final = frozenset(
    {"BATCH_MATMUL", "CONV_2D", "DEPTHWISE_CONV_2D", "EMBEDDING_LOOKUP", "FULLY_CONNECTED", "TRANSPOSE_CONV"}
)
_ASK: Final[Mapping[str, Callable[[Any, Any, bytes], bool]]] = {
    forms.FLOAT16_WEIGHTS: _half,
    forms.INT8_WEIGHTS: _int8,
    forms.INT4_WEIGHTS: _int4,
    forms.DYNAMIC_INT8: _dynamic,
}
_WEIGHTED: Final = {**dict.fromkeys(_ASK, _LAYERS), forms.INT4_WEIGHTS: frozenset({"FULLY_CONNECTED"})}
