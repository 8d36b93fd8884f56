"""Arithmetic, comparison and choice between tensors that are broadcast to each other."""
from edgekit_toolkit.tflite.builder import Options
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.rules import elementwise
from edgekit_toolkit.tflite.step import Step

@writes("Add","Sub","Mul","Div", rule=elementwise, fuses=True)
def write_binary(step: Step) -> None:
    """Write."""
    step.give(step.binary(step.node.op_type.upper(), step.read(0), step.read(1), step.node.activation))
