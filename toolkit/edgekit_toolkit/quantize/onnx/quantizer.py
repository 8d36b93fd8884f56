"""The quantizer of ONNX models, which uses the project's own Q/DQ writer and onnxruntime."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import onnx

from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.index import GraphIndex, opset
from edgekit_toolkit.onnx_graph.traversal import StoredLayer, computes_in_integers, float_types, nodes
from edgekit_toolkit.passes.wrong_rewrites import WrongRewrites, find_wrong_in_codes
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form, build, stored_layers, weight_inputs
from edgekit_toolkit.quantize.onnx.equalize import apply_factors, apply_to_ranges, find_factors
from edgekit_toolkit.quantize.onnx.output_parts import output_parts
from edgekit_toolkit.quantize.onnx.propagation import ODD_GRAPH, block_roundings, layer_rounding, propagate
from edgekit_toolkit.quantize.onnx.qdq import write_qdq
from edgekit_toolkit.quantize.plan import Plan, kernel_names, operator_nodes, touched_tensors
from edgekit_toolkit.quantize.precise import OperatorNode, blocks
from edgekit_toolkit.quantize.quantizer import Factors, FloatLayer, Quantizer
from edgekit_toolkit.quantize.ranges import Histogram, Range, activation_reader, collect, count_values
from edgekit_toolkit.quantize.scheme import Scheme
from edgekit_toolkit.quantize.sensitivity import (
    BlockNoise,
    Fidelity,
    LayerCost,
    Parts,
    softmax_axes,
)
from edgekit_toolkit.samples.generated import Feeds

_MIN_QDQ_OPSET: Final = 13
_FLOAT_TYPES: Final = {
    onnx.TensorProto.FLOAT16: "fp16",
    onnx.TensorProto.BFLOAT16: "bf16",
    onnx.TensorProto.DOUBLE: "fp64",
}


class OnnxQuantizer(Quantizer):
    model: OnnxModel
    labels: Mapping[str, str] = {
        forms.FLOAT16_WEIGHTS: "float16 weights",
        forms.INT8_WEIGHTS: "int8 weights, float arithmetic",
        forms.INT4_WEIGHTS: "int4 weights in blocks of 32, float arithmetic",
        forms.DYNAMIC_INT8: "dynamic int8 matrix products",
    }

    def __init__(
        self,
        model: onnx.ModelProto,
        scheme: Scheme,
        *,
        threads: int,
        make: Callable[[onnx.ModelProto], OnnxModel] = OnnxModel,
        wider: Scheme | None = None,
    ) -> None:
        """Make the quantizer.

        Args:
            model: The float model.
            scheme: The quantization scheme of the engine.
            threads: The number of threads of one inference.
            make: Converts an ONNX model to the model that the engine runs.
            wider: A scheme with more bits, see `Quantizer`.
        """
        self.model, self._proto, self._make = make(model), model, make
        self.scheme, self.wider = scheme, wider
        self.threads = threads

    def source_form(self) -> tuple[str, OnnxModel]:
        """Return a label and the model with short tensor names.

        The label contains the float types of the model, such as "float32". Quantized models and models
        without floats have the label "as it is".
        """
        types = float_types(self._proto)
        label = " and ".join(types) if types and not self._is_quantized() else "as it is"
        return label, self.build(Form(forms.FLOAT32)) or self.model

    def why_no_forms(self) -> str | None:
        if self._is_quantized():  # quantizing codes again would only lose accuracy
            return "the model is already quantized"
        types = float_types(self._proto)
        if types and "float32" not in types:
            return (
                f"the model computes in {' and '.join(types)}, and they are made of float32 models; give that"
                " one to have them"
            )
        return None

    def _is_quantized(self) -> bool:
        return computes_in_integers(self._proto) or any(
            node.op_type == "DequantizeLinear" for node in nodes(self._proto)
        )

    def why_no_static_int8(self) -> str | None:
        version = opset(self._proto)
        if version >= _MIN_QDQ_OPSET:
            return None
        return f"the model stays at opset {version}, {_MIN_QDQ_OPSET} is needed"

    def float_layers(self) -> dict[str, FloatLayer]:
        """Return the nodes of the float model as layers, by the first output of the node."""
        stored = {tensor.name: tensor.ByteSize() for tensor in self._proto.graph.initializer}
        return {
            node.output[0]: FloatLayer(
                node.name or node.output[0],
                node.op_type,
                sum(stored.get(name, 0) for name in weight_inputs(node)),
            )
            for node in self._proto.graph.node
            if node.output
        }

    def stored_layers(self, form: Form, model: Model) -> dict[str, StoredLayer]:  # noqa: ARG002  # the form says it
        index = GraphIndex(self._proto.graph)
        return {
            name: replace(layer, precision=_float_name(index, name)) if layer.precision == "fp32" else layer
            for name, layer in stored_layers(self._proto, form).items()
        }

    def softmax_axes(self) -> Sequence[int | None]:
        return softmax_axes(self._proto)

    def output_parts(self, feeds: Feeds) -> Sequence[Parts | None]:
        return output_parts(self._proto, feeds, threads=self.threads)

    def build(self, form: Form) -> OnnxModel | None:
        built = build(self._proto, form)
        return None if built is None else self._make(built)

    def wrong_rewrites(self, form: Form, noise: Callable[[Model], float]) -> WrongRewrites | None:
        built = build(self._proto, form)
        return None if built is None else find_wrong_in_codes(built, lambda proto: noise(self._make(proto)))

    def kernels(self, *, elementwise: bool) -> tuple[str, ...]:
        return kernel_names(self._proto, self.scheme, elementwise=elementwise)

    def operator_nodes(self) -> list[OperatorNode]:
        return operator_nodes(GraphIndex(self._proto.graph))

    def touched(self, kernels: Sequence[str]) -> list[str]:
        return touched_tensors(self._proto, kernels)

    def ranges(
        self, kernels: Sequence[str], samples: Callable[[], Iterator[Feeds]], progress: Callable[[], None]
    ) -> dict[str, Range]:
        return collect(self._proto, self.touched(kernels), samples, threads=self.threads, progress=progress)

    def histograms(
        self, kernels: Sequence[str], samples: Sequence[Feeds], ranges: Mapping[str, tuple[float, float]]
    ) -> dict[str, Histogram]:
        read = activation_reader(self._proto, self.touched(kernels), samples[0], threads=self.threads)
        return count_values(samples, read, ranges)

    def int8_layers(self) -> Sequence[str]:
        return forms.int8_layers(self._proto)

    def equalize(self, ranges: Mapping[str, Range]) -> tuple[Factors, dict[str, Range]]:
        factors = find_factors(self._proto, ranges)
        return factors, apply_to_ranges(self._proto, ranges, factors)

    def writer(self, factors: Factors) -> Callable[[Plan], OnnxModel]:
        scaled = onnx.shape_inference.infer_shapes(apply_factors(self._proto, factors))
        return lambda plan: self._make(write_qdq(scaled, plan))

    def block_noises(
        self, plan: Plan, factors: Factors, fidelity: Fidelity, expired: Callable[[], bool]
    ) -> Iterator[BlockNoise]:
        """Yield the noise of each block, estimated by error propagation or else measured."""
        scaled = onnx.shape_inference.infer_shapes(apply_factors(self._proto, factors))
        parts = blocks(self.operator_nodes(), plan.kernels)
        try:
            errors = [block_roundings(scaled, plan, block) for block in parts]
            noises = propagate(scaled, errors, fidelity, threads=self.threads)
        except ODD_GRAPH:
            yield from super().block_noises(plan, factors, fidelity, expired)
            return
        yield from (BlockNoise(block, noise) for block, noise in zip(parts, noises, strict=True))

    def weight_costs(
        self, layers: Sequence[str], fidelity: Fidelity, expired: Callable[[], bool]
    ) -> Iterator[LayerCost]:
        """Yield the cost of each layer, with a noise estimated by error propagation or else measured."""
        try:
            errors = [[layer_rounding(self._proto, layer)] for layer in layers]
            noises = propagate(self._proto, errors, fidelity, threads=self.threads)
        except ODD_GRAPH:
            yield from super().weight_costs(layers, fidelity, expired)
            return
        for layer, (error,), noise in zip(layers, errors, noises, strict=True):
            yield LayerCost(layer, noise, error.size)


def _float_name(index: GraphIndex, output: str) -> str:
    weight = index.initializers.get(weight_inputs(index.producers[output])[0])
    return "fp32" if weight is None else _FLOAT_TYPES.get(weight.data_type, "fp32")
