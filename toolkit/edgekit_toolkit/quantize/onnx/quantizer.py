"""ONNX models in the search: quantized by our own writer, run by onnxruntime."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import onnx

from edgekit_toolkit.models.model import Model, Runner
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.models.ort_session import run_session, session_for
from edgekit_toolkit.onnx_graph.index import GraphIndex, opset
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.onnx_graph.stored_layer import StoredLayer
from edgekit_toolkit.onnx_graph.traversal import computes_in_integers, float_types, nodes
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form, build, stored_layers, weight_inputs
from edgekit_toolkit.quantize.onnx.equalize import apply_factors, apply_to_ranges, find_factors
from edgekit_toolkit.quantize.onnx.qdq import write_qdq
from edgekit_toolkit.quantize.plan import Plan, kernel_names, touched_tensors
from edgekit_toolkit.quantize.quantizer import Factors, FloatLayer
from edgekit_toolkit.quantize.ranges import Histogram, Range, activation_reader, collect, count_values
from edgekit_toolkit.quantize.scheme import Scheme
from edgekit_toolkit.quantize.sensitivity import Block, blocks, softmax_axes
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.shards import Batching

_MIN_QDQ_OPSET: Final = 13
_FLOAT_TYPES: Final = {
    onnx.TensorProto.FLOAT16: "fp16",
    onnx.TensorProto.BFLOAT16: "bf16",
    onnx.TensorProto.DOUBLE: "fp64",
}


class OnnxQuantizer:
    """See `Quantizer`.

    Attributes:
        model: the optimised float model, shapes inferred.
        scheme: the quantized form that the target's engine runs.
        labels: of the forms without a plan.
    """

    labels: Mapping[str, str] = {
        forms.FLOAT16_WEIGHTS: "float16 weights",
        forms.INT8_WEIGHTS: "int8 weights, float arithmetic",
        forms.INT4_WEIGHTS: "int4 weights in blocks of 32, float arithmetic",
        forms.DYNAMIC_INT8: "dynamic int8 matrix products",
    }

    def __init__(self, model: onnx.ModelProto, scheme: Scheme, *, threads: int) -> None:
        self.model = model
        self.scheme = scheme
        self._threads = threads

    def source_form(self) -> tuple[str, onnx.ModelProto]:
        """Return the model itself, called after the floats that it computes in."""
        types = float_types(self.model)
        label = " and ".join(types) if types and not self._is_quantized() else "as it is"
        return label, build(self.model, Form(forms.FLOAT32)) or self.model

    def why_no_forms(self) -> str | None:
        """Return why no other form is made of this model; None where some may be."""
        if self._is_quantized():  # codes of codes would only lose
            return "the model is already quantized"
        types = float_types(self.model)
        if types and "float32" not in types:
            return (
                f"the model computes in {' and '.join(types)}, and they are made of float32 models; give that"
                " one to have them"
            )
        return None

    def _is_quantized(self) -> bool:
        return computes_in_integers(self.model) or any(
            node.op_type == "DequantizeLinear" for node in nodes(self.model)
        )

    def why_no_static_int8(self) -> str | None:
        """Return why no static int8 form is made of it; None where some may be."""
        version = opset(self.model)
        if version >= _MIN_QDQ_OPSET:
            return None
        return f"the model stays at opset {version}, {_MIN_QDQ_OPSET} is needed"

    def batch(self) -> int:
        """Return how many samples one set of inputs holds."""
        return Batching.of(tensor_specs(self.model)[0]).size or 1

    def open(self, model: onnx.ModelProto) -> Runner:
        """Return a call that runs `model` in onnxruntime."""
        return partial(run_session, session_for(model, threads=self._threads))

    def as_model(self, model: onnx.ModelProto) -> OnnxModel:
        """Return a model as the packager handles it."""
        return OnnxModel(model)

    def float_layers(self) -> dict[str, FloatLayer]:
        """Return the nodes of the float model, by the name of their first output."""
        stored = {tensor.name: tensor.ByteSize() for tensor in self.model.graph.initializer}
        return {
            node.output[0]: FloatLayer(
                node.name or node.output[0],
                node.op_type,
                sum(stored.get(name, 0) for name in weight_inputs(node)),
            )
            for node in self.model.graph.node
            if node.output
        }

    def stored_layers(self, form: Form, model: Model) -> dict[str, StoredLayer]:  # noqa: ARG002  # the form says it
        """Return how each layer is stored in the form's model, by its first output in the float model."""
        index = GraphIndex(self.model.graph)
        return {
            name: replace(layer, precision=_float_name(index, name)) if layer.precision == "fp32" else layer
            for name, layer in stored_layers(self.model, form).items()
        }

    def size_bytes(self, model: onnx.ModelProto) -> int:
        """Return the size of a model's file."""
        return int(model.ByteSize())

    def softmax_axes(self) -> Sequence[int | None]:
        """Return for each output the axis of the softmax that makes it, or None."""
        return softmax_axes(self.model)

    def build(self, form: Form) -> onnx.ModelProto | None:
        """Return the form's model, or None where the form changes nothing."""
        return build(self.model, form)

    def kernels(self, *, elementwise: bool) -> tuple[str, ...]:
        """Return what can become an integer kernel, in order."""
        return kernel_names(self.model, self.scheme, elementwise=elementwise)

    def ranges(
        self, kernels: Sequence[str], samples: Callable[[], Iterator[Feeds]], progress: Callable[[], None]
    ) -> dict[str, Range]:
        """Return the extremes of the activations that a plan with these kernels needs."""
        names = touched_tensors(self.model, kernels)
        return collect(self.model, names, samples, threads=self._threads, progress=progress)

    def histograms(
        self, kernels: Sequence[str], samples: Sequence[Feeds], ranges: Mapping[str, tuple[float, float]]
    ) -> dict[str, Histogram]:
        """Return how the values of the activations of these kernels are spread over their ranges."""
        names = touched_tensors(self.model, kernels)
        read = activation_reader(self.model, names, samples[0], threads=self._threads)
        return count_values(samples, read, ranges)

    def int8_layers(self) -> Sequence[str]:
        """Return the layers whose weights can be int8, by their first output."""
        return forms.int8_layers(self.model)

    def equalize(self, ranges: Mapping[str, Range]) -> tuple[Factors, dict[str, Range]]:
        """Return channel factors, and the ranges with them."""
        factors = find_factors(self.model, ranges)
        return factors, apply_to_ranges(self.model, ranges, factors)

    def writer(self, factors: Factors) -> Callable[[Plan], onnx.ModelProto]:
        """Return a call that writes a plan for the model with these factors."""
        return partial(write_qdq, onnx.shape_inference.infer_shapes(apply_factors(self.model, factors)))

    def blocks(self, plan: Plan) -> list[Block]:
        """Return the plan's kernels, grouped by the matrix product that they follow."""
        names = (node.output[0] for node in self.model.graph.node if node.output)
        return blocks(self.model, [name for name in names if name in plan.kernels])


def _float_name(index: GraphIndex, output: str) -> str:
    weight = index.initializers.get(weight_inputs(index.producers[output])[0])
    return "fp32" if weight is None else _FLOAT_TYPES.get(weight.data_type, "fp32")
