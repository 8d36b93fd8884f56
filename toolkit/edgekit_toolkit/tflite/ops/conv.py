"""Convolutions in 1, 2 and 3 dimensions: plain, grouped and depthwise."""

import numpy as np

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.forms import NEW, Form, channels_last
from edgekit_toolkit.tflite.layout.rules import Rule
from edgekit_toolkit.tflite.ops.sliding import padded, strides_of, windows_of
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step, fused
from edgekit_toolkit.tflite.view import Graph, Node


def _is_depthwise(node: Node, graph: Graph) -> bool:
    """Whether each input channel has filters of its own: [C * multiplier, 1, ...] weights in C groups."""
    groups = node.attributes.get("group", 1)
    return bool(
        groups > 1 and groups == graph.shape(node.inputs[0])[1] and graph.shape(node.inputs[1])[1] == 1
    )


def _weight_form(node: Node, graph: Graph) -> Form:
    """Return TFLite's form: [O, H, W, I], depthwise [1, H, W, O], and over three axes [D, H, W, I, O]."""
    rank = len(graph.shape(node.inputs[1]))
    if rank == 5:
        return (2, 3, 4, 1, 0)
    if _is_depthwise(node, graph):
        return (1, NEW, 2, 0) if rank == 3 else (1, 2, 3, 0)
    return channels_last(rank)


def _rule(node: Node, graph: Graph) -> Rule:
    shape = graph.shape(node.inputs[0])
    if len(shape) not in {3, 4, 5}:
        raise RefusedError(f"a convolution over {len(shape) - 2} axes has no kernel in TFLite, 1 to 3 have")
    form = channels_last(len(shape))
    reads = (form, _weight_form(node, graph), (0,))
    return Rule(form, shape, lambda _: reads, lambda _: (form,))


@writes("Conv", rule=_rule, fuses=True)
def write_conv(step: Step) -> None:
    """Write CONV_2D, DEPTHWISE_CONV_2D or CONV_3D. A PAD is added if neither SAME nor VALID fits."""
    sliding = windows_of(step, step.shape(1)[2:])
    tensor, padding = padded(step, step.read(0), sliding)
    inputs = [tensor, step.read(1), _bias(step)]
    fields = {**strides_of(sliding, padding), **fused(step.node.activation)}
    if len(step.shape(0)) == 5:
        _write_3d(step, inputs)
        return
    fields |= {"dilationHFactor": sliding.dilations[0], "dilationWFactor": sliding.dilations[1]}
    if _is_depthwise(step.node, step.graph):
        fields["depthMultiplier"] = step.shape(1)[0] // step.shape(0)[1]
        options = Options("DepthwiseConv2DOptions", fields)
        version = 2 if max(sliding.dilations) > 1 else 1
        step.give(step.emit("DEPTHWISE_CONV_2D", inputs, step.held(), options, version=version))
        return
    version = 6 if step.attribute("group", 1) > 1 else 1
    step.give(step.emit("CONV_2D", inputs, step.held(), Options("Conv2DOptions", fields), version=version))


def _write_3d(step: Step, inputs: list[Tensor]) -> None:
    sliding = windows_of(step, step.shape(1)[2:])
    if step.attribute("group", 1) != 1:
        raise RefusedError("grouped convolutions over three axes have no kernel in TFLite")
    fields = {f"stride{axis}": stride for axis, stride in zip("DHW", sliding.strides, strict=True)}
    fields |= {f"dilation{axis}Factor": step_ for axis, step_ in zip("DHW", sliding.dilations, strict=True)}
    fields |= {
        "padding": strides_of(sliding, sliding.padding or "VALID")["padding"],
        **fused(step.node.activation),
    }
    step.give(step.emit("CONV_3D", inputs, step.held(), Options("Conv3DOptions", fields)))


def _bias(step: Step) -> Tensor:
    if step.has(2):
        return step.read(2)
    return step.builder.constant(np.zeros(step.shape(1)[0], np.float32))
