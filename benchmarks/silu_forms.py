"""What SiLU of an int8 model costs on onnxruntime in several forms: processor time of one thread.

    python benchmarks/silu_forms.py MODEL.onnx

All forms run in turns. Ranges are those of generated inputs: times do not depend on them, accuracy would.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Final

import onnx
from onnx import helper

from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.index import GraphIndex, copy_model
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, Scheme
from edgekit_toolkit.samples.generated import Feeds, generate_feeds
from turns import take_turns

TURNS: Final = 26
_FLOAT_SILU: Final = replace(ASYMMETRIC, elementwise=ASYMMETRIC.elementwise - {"Sigmoid", "Mul"})
_SCHEMES: Final[Mapping[str, Scheme]] = {
    "int8 Sigmoid, int8 Mul: the product": ASYMMETRIC,
    "int8 Sigmoid and Mul, outputs are codes where kernels read them": replace(
        ASYMMETRIC, quantizes_outputs=False
    ),
    "only Mul in the plan": replace(ASYMMETRIC, elementwise=ASYMMETRIC.elementwise - {"Sigmoid"}),
    "only Sigmoid in the plan": replace(ASYMMETRIC, elementwise=ASYMMETRIC.elementwise - {"Mul"}),
    "Sigmoid and Mul in float": _FLOAT_SILU,
    "Sigmoid and Mul in float, outputs are codes where kernels read them": replace(
        _FLOAT_SILU, quantizes_outputs=False
    ),
}


def gates(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto]]:
    """Yield the Sigmoid and the Mul of each SiLU."""
    index = GraphIndex(model.graph)
    for mul in model.graph.node:
        for gate, data in (mul.input[:2], mul.input[1::-1]) if mul.op_type == "Mul" else ():
            sigmoid = index.producers.get(gate)
            if sigmoid is not None and sigmoid.op_type == "Sigmoid" and list(sigmoid.input) == [data]:
                yield sigmoid, mul


def quantize(model: onnx.ModelProto, scheme: Scheme, feeds: list[Feeds], floats: int = 0) -> onnx.ModelProto:
    """Return the int8 form with the first `floats` convolutions and their activations in float."""
    quantizer = OnnxQuantizer(model, scheme, threads=1)
    kernels = quantizer.kernels(elementwise=True)
    ranges = quantizer.ranges(kernels, lambda: iter(feeds), lambda: None)
    first = [node.output[0] for node in model.graph.node if node.op_type == "Conv"][:floats]
    index = GraphIndex(model.graph)
    released = {*first, *(reader.output[0] for name in first for reader in index.consumers(name))}
    whole = {name: limits.whole() for name, limits in ranges.items()}
    built = quantizer.build(Form(forms.STATIC_INT8, Plan(scheme, frozenset(kernels) - released, whole)))
    assert built is not None
    return built.proto


def fuse(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a form with each float SiLU as onnxruntime's own operator, which its optimiser does not find."""
    result = copy_model(model)
    for sigmoid, mul in list(gates(result)):
        fused = helper.make_node(
            "QuickGelu", sigmoid.input[:], mul.output[:], domain="com.microsoft", alpha=1.0
        )
        mul.CopyFrom(fused)
        result.graph.node.remove(sigmoid)
    result.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return result


def harden(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with hard-swish for SiLU: other results, only for its time."""
    result = copy_model(model)
    for sigmoid, _ in gates(result):
        sigmoid.op_type = "HardSigmoid"
    return result


def main() -> None:
    source = onnx.shape_inference.infer_shapes(onnx.load(Path(sys.argv[1])))
    feeds = generate_feeds(OnnxModel(source).specs()[0], 2, 0)
    model = onnx.shape_inference.infer_shapes(optimise(source, batch=1, feeds=feeds).model)
    protos = {"float32": source, "float32 after the passes": model}
    protos |= {name: quantize(model, scheme, feeds) for name, scheme in _SCHEMES.items()}
    protos["QuickGelu in float between pairs"] = fuse(protos["Sigmoid and Mul in float"])
    for count in (1, 2, 3):
        protos[f"the product, {count} of its first convolutions in float"] = quantize(
            model, ASYMMETRIC, feeds, count
        )
    hard = onnx.shape_inference.infer_shapes(harden(model))
    protos["hard-swish instead, one int8 product"] = quantize(hard, ASYMMETRIC, feeds)
    protos["hard-swish, first 2 convolutions in float"] = quantize(hard, ASYMMETRIC, feeds, 2)
    calls = {
        name: partial(OnnxModel(proto).open_session(threads=1).run, feeds[0])
        for name, proto in protos.items()
    }
    times_s = take_turns(calls, TURNS, thread_time)
    reference_s = times_s["float32"]
    for name, values in times_s.items():
        median = statistics.median(values) / statistics.median(reference_s)
        print(f"| {name} | {1e3 * min(values):.1f} | {min(values) / min(reference_s):.2f}, {median:.2f} |")


if __name__ == "__main__":
    main()
