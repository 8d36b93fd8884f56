"""The quantizer of `.tflite` models, which uses ai-edge-quantizer and LiteRT."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import RecipeError
from edgekit_runtime.system.install_hint import install_command
from edgekit_toolkit.models.half_precision import HalfPrecisionModel
from edgekit_toolkit.models.model import Model, Specs
from edgekit_toolkit.models.tflite import TfliteModel
from edgekit_toolkit.onnx_graph.traversal import StoredLayer
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.litert import writer as litert
from edgekit_toolkit.quantize.litert.kernels import kernel_names, operator_nodes, touched_tensors
from edgekit_toolkit.quantize.litert.prepare import prepare
from edgekit_toolkit.quantize.litert.ranges import activation_reader
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.precise import OperatorNode
from edgekit_toolkit.quantize.quantizer import Factors, FloatLayer, Quantizer
from edgekit_toolkit.quantize.ranges import Histogram, Range, count_values, gather
from edgekit_toolkit.quantize.scheme import LITERT, Scheme
from edgekit_toolkit.quantize.sensitivity import Parts
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.tflite.flatbuffer import operator_name, operators, parsed, tensor_name
from edgekit_toolkit.tflite.summary import summarise

_MAX_RECENT: Final = 4  # a step of the search tries three plans, and builds the form of the best one


class CompressedFloats(NamedTuple):
    """A compressed `.tflite` model, and the scales of its compressed weights for `weight_bounds`."""

    content: bytes
    scales: Mapping[str, NDArray[np.float32]]


class LiteRtQuantizer(Quantizer):
    """The quantizer of `.tflite` models, see `Quantizer`.

    Attributes:
        model: The source `.tflite` model, which may have been converted from ONNX.
        threads: The number of threads of one inference.
        scheme: `LITERT`, or its variant for AVX-512 that folds pixels. Both have asymmetric int8 activations.
    """

    model: TfliteModel
    wider = None
    labels: Mapping[str, str] = {
        forms.FLOAT16_WEIGHTS: "float16 weights",
        forms.INT8_WEIGHTS: "int8 weights, float arithmetic",
        forms.INT4_WEIGHTS: "int4 weights, inputs quantized at run time",
        forms.DYNAMIC_INT8: "int8 weights, inputs quantized at run time",
    }

    def __init__(
        self,
        model: bytes,
        *,
        threads: int,
        scheme: Scheme = LITERT,
        compress: Callable[[Form], CompressedFloats] | None = None,
    ) -> None:
        """Take a model; `compress` makes the float model of a compressed form, if the source is ONNX."""
        self.model, self._content = TfliteModel(model), model
        self.scheme = scheme
        self.threads = threads
        self._compress = compress
        self._recent: deque[tuple[Plan, TfliteModel | None]] = deque(maxlen=_MAX_RECENT)

    @cached_property
    def _prepared(self) -> bytes:
        return prepare(self._content)

    def source_form(self) -> tuple[str, TfliteModel]:
        """Return a label and the source model.

        The label is "float32", or "as it is" for models with float16 weights and for quantized models.
        """
        layers = self.model.summary.layers.values()
        is_half = any(layer.precision == "fp16 weights" for layer in layers)
        return "as it is" if is_half or self._find_codes() else "float32", self.model

    def why_no_forms(self) -> str | None:
        if (reason := self._find_codes()) is not None:
            return reason
        if find_spec("ai_edge_quantizer") is None:
            return f"they need ai-edge-quantizer on the host: {install_command('litert-host')}"
        return None

    def _find_codes(self) -> str | None:
        """Return why its weights are not those of a float model; None if they are."""
        summary = self.model.summary
        if summary.quantized:  # quantizing codes again would only lose accuracy
            return "the model is already quantized"
        names = {spec.name for spec in self._specs[0]} & {spec.name for spec in self._specs[1]}
        if names:  # operators and ranges are identified by the names of tensors
            return f"an input and an output are both named '{min(names)}'; give them names of their own"
        return None

    def why_no_static_int8(self) -> str | None:
        count = len(parsed(self._content).subgraphs)
        return f"the model has {count} sub-graphs (control flow)" if count > 1 else None

    @cached_property
    def _specs(self) -> Specs:
        return self.model.specs()

    def float_layers(self) -> dict[str, FloatLayer]:
        model = parsed(self._content)
        kinds = {
            tensor_name(graph.tensors[operator.outputs[0]]): operator_name(model, operator)
            for graph, _, operator in operators(model)
            if len(operator.outputs)
        }
        layers = summarise(model).layers
        return {
            name: FloatLayer(name, kinds.get(name, ""), layer.weight_bytes) for name, layer in layers.items()
        }

    def stored_layers(self, form: Form, model: Model) -> dict[str, StoredLayer]:  # noqa: ARG002  # the file says it
        # ai-edge-quantizer renames tensors; layers keep their order.
        layers = (model if isinstance(model, TfliteModel) else TfliteModel(model.content)).summary.layers
        return dict(zip(self.model.summary.layers, layers.values(), strict=True))

    def softmax_axes(self) -> Sequence[int | None]:
        """Return -1 (the last axis) for each output of a softmax, and None for each other output."""
        model = parsed(self._prepared)
        graph = model.subgraphs[0]
        names = {
            tensor_name(graph.tensors[operator.outputs[0]])
            for operator in graph.operators
            if operator_name(model, operator) == "SOFTMAX"
        }
        tensors = {
            tensor_name(graph.tensors[index]): tensor_name(graph.tensors[index]) for index in graph.outputs
        }
        for signature in model.signatureDefs if len(model.signatureDefs) == 1 else ():
            tensors |= {
                bytes(item.name).decode(): tensor_name(graph.tensors[item.tensorIndex])
                for item in signature.outputs
            }
        return [-1 if tensors[spec.name] in names else None for spec in self._specs[1]]

    def build(self, form: Form) -> TfliteModel | None:
        if form.plan is None or form != Form(form.kind, form.plan):
            return self._build(form)
        for plan, model in self._recent:
            if plan == form.plan:
                return model
        self._recent.append((form.plan, self._build(form)))
        return self._recent[-1][1]

    def _build(self, form: Form) -> TfliteModel | None:
        floats = None
        if form.compression is not None:
            if self._compress is None:
                raise RecipeError("recipe: the form is of an ONNX model, and this is a .tflite")
            floats = self._compress(form)
        content = self._content if floats is None else floats.content
        if form.kind == forms.FLOAT32:
            return TfliteModel(content)
        if form.kind == forms.FLOAT16_ARITHMETIC:
            return HalfPrecisionModel.of(content)
        prepared, scales = (
            (self._prepared, {}) if floats is None else (prepare(floats.content), floats.scales)
        )
        built = litert.build(prepared, form, scales)
        return None if built is None else TfliteModel(built)

    def wrong_rewrites(self, form: Form, noise: Callable[[Model], float]) -> None:
        """Return None, because LiteRT's optimisations cannot be disabled."""

    def kernels(self, *, elementwise: bool) -> tuple[str, ...]:
        return kernel_names(parsed(self._prepared), elementwise=elementwise)

    def operator_nodes(self) -> list[OperatorNode]:
        return operator_nodes(parsed(self._prepared))

    def touched(self, kernels: Sequence[str]) -> list[str]:
        return touched_tensors(parsed(self._prepared), kernels)

    def ranges(
        self, kernels: Sequence[str], samples: Callable[[], Iterator[Feeds]], progress: Callable[[], None]
    ) -> dict[str, Range]:
        read = activation_reader(self._prepared, self.touched(kernels), threads=self.threads)
        return gather(samples, read, progress, axis=None)

    def histograms(
        self, kernels: Sequence[str], samples: Sequence[Feeds], ranges: Mapping[str, tuple[float, float]]
    ) -> dict[str, Histogram]:
        read = activation_reader(self._prepared, self.touched(kernels), threads=self.threads)
        return count_values(samples, read, ranges)

    def int8_layers(self) -> Sequence[str]:
        return litert.int8_layers(self._prepared)

    def equalize(self, ranges: Mapping[str, Range]) -> tuple[Factors, dict[str, Range]]:
        """Return no factors and the unchanged ranges. docs/explanation/litert.md explains why."""
        return {}, dict(ranges)

    def writer(self, factors: Factors) -> Callable[[Plan], TfliteModel]:  # noqa: ARG002  # always none
        return lambda plan: self.build(Form(forms.STATIC_INT8, plan)) or self.model

    def output_parts(self, feeds: Feeds) -> Sequence[Parts | None]:  # noqa: ARG002  # see the class
        """Return None for each output, because parts of outputs are not determined."""
        return [None] * len(self._specs[1])
