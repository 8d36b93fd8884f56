"""Refuses readable ONNX models that cannot be used. Each error states the place and what to do next.

This module changes nothing and runs nothing.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.onnx_graph.index import DEFAULT_DOMAINS, STANDARD_DOMAINS
from edgekit_toolkit.onnx_graph.specs import real_inputs
from edgekit_toolkit.onnx_graph.traversal import FLOAT_TYPES, nodes, stored_tensors

MIN_OPSET: Final = 7  # the oldest that onnxruntime promises to run
_PRODUCTS: Final = frozenset({"Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN"})


def check_names(message: Message) -> None:
    """Check that all names in an ONNX model, or in a part of it, are text. protobuf does not check that.

    Raises:
        ModelError: A name is not UTF-8.
    """
    for field, value in _fields(message):
        is_single = isinstance(value, str | bytes | Message)
        for item in [value] if is_single else value:
            if field.type == field.TYPE_MESSAGE:
                check_names(item)
            elif isinstance(item, bytes):  # what protobuf gives for a string that is not UTF-8
                raise ModelError(f"{field.full_name} is not UTF-8 text; the file is damaged, export it again")


def _fields(message: Message) -> Iterator[tuple[FieldDescriptor, Any]]:
    """Yield the fields of text and messages that are set."""
    if isinstance(message, onnx.TensorProto):  # listing its fields would copy the values
        descriptors = message.DESCRIPTOR.fields_by_name
        yield descriptors["name"], message.name
        yield descriptors["external_data"], message.external_data
        return
    for field, value in message.ListFields():
        if field.type in (field.TYPE_STRING, field.TYPE_MESSAGE):
            yield field, value


def check_interface(model: onnx.ModelProto) -> None:
    """Check that the model has nodes, inputs, and outputs with unique names.

    Raises:
        ModelError: There is no node, no input or no output, or two outputs have the same name.
    """
    if not model.graph.node:
        raise ModelError("the model has no nodes: nothing would run; export it again")
    if not real_inputs(model.graph):
        raise ModelError("the model has no inputs: it always gives the same; export it with example inputs")
    if not model.graph.output:
        raise ModelError("the model has no outputs; export it again with named outputs")
    names = [value.name for value in model.graph.output]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ModelError(f"the output '{twice}' is listed twice; export the model with each output once")


def check_operators(model: onnx.ModelProto) -> None:
    """Check that every operator is defined by the operator sets that the model imports.

    Raises:
        ModelError: An operator set is missing, too old or too new, or an operator has a custom domain or is
            not in its operator set.
    """
    versions = {item.domain: int(item.version) for item in model.opset_import}
    default = next((versions[domain] for domain in DEFAULT_DOMAINS if domain in versions), None)
    if default is None:
        raise ModelError("the model imports no standard operator set (opset); it is damaged, export it again")
    newest = onnx.defs.onnx_opset_version()
    if not MIN_OPSET <= default <= newest:
        age = "old" if default < MIN_OPSET else "new"
        raise ModelError(
            f"opset {default} is too {age}: {MIN_OPSET} to {newest} are read; export with opset_version=17"
        )
    for node in nodes(model):
        if node.domain not in STANDARD_DOMAINS:
            raise ModelError(
                f"operator '{node.op_type}' of the custom domain '{node.domain}' at {_place(node)}: only"
                " standard ONNX operators run on every target; export it with these"
            )
        version = default if node.domain in DEFAULT_DOMAINS else versions.get(node.domain, 0)
        if not _is_defined(node, version):
            raise ModelError(
                f"operator '{node.op_type}' at {_place(node)} is not in {_domain(node)} opset {version};"
                " export with another opset_version, or with standard operators"
            )


def check_weights(model: onnx.ModelProto) -> None:
    """Check that all stored floats are finite.

    Infinity is allowed in scalars, which are usually bounds, and in tensors with only zeros and infinities,
    which are usually masks. -inf is also allowed in all tensors that are not inputs of a matrix product,
    convolution or recurrent layer.

    Raises:
        ModelError: A weight is NaN or infinite. The message states the tensor and the number of such values.
    """
    factors = {name for node in nodes(model) if node.op_type in _PRODUCTS for name in node.input}
    for name, tensor in stored_tensors(model):
        if tensor.data_type not in FLOAT_TYPES:
            continue
        values = _values(name, tensor)
        finite = np.isfinite(values)
        is_mask = not values[finite].any() or (name not in factors and values.max() < np.inf)
        if finite.all() or (not np.isnan(values).any() and (values.size == 1 or is_mask)):
            continue
        nans = int(np.count_nonzero(np.isnan(values)))
        raise ModelError(
            f"weight '{name}' {list(tensor.dims)} has {nans} NaN and {values.size - int(finite.sum()) - nans}"
            f" infinite values of {values.size}: training diverged or the file is damaged; export a sound"
            " checkpoint"
        )


def explain_refusal(model: onnx.ModelProto, refusal: BaseException) -> ModelError:
    """Return an error that explains why onnxruntime refused `model`, with operator, node and domain."""
    text = str(refusal)
    engine = f"onnxruntime {onnxruntime.__version__}"
    kernel = re.search(r"implementation for (\S+?)\((\d+)\) node with name '(.*?)'", text)
    if kernel:
        failing = [node for node in nodes(model) if (node.op_type, node.name) == (kernel[1], kernel[3])]
        location = f"{_place(failing[0])} ({_domain(failing[0])})" if failing else f"node '{kernel[3]}'"
        return ModelError(
            f"operator '{kernel[1]}' (version {kernel[2]}) at {location} does not run in {engine} on the CPU"
            " with these element types; export it with float32, or with other operators"
        )
    newer = re.search(r"Opset (\d+) is under development", text)
    if newer:
        return ModelError(f"opset {newer[1]} is too new for {engine}; export with opset_version=17")
    return ModelError(f"{engine} refuses the model: {text.strip()}; export the model again or report this")


def _place(node: onnx.NodeProto) -> str:
    return f"node '{node.name}'" if node.name else f"the node that makes '{', '.join(node.output)}'"


def _domain(node: onnx.NodeProto) -> str:
    return node.domain or "ai.onnx"


def _is_defined(node: onnx.NodeProto, version: int) -> bool:
    domain = "" if node.domain in DEFAULT_DOMAINS else node.domain
    try:
        onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return False
    return True


def _values(name: str, tensor: onnx.TensorProto) -> NDArray[np.floating]:
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as err:
        count = math.prod(int(size) for size in tensor.dims)
        raise ModelError(
            f"weight '{name}' {list(tensor.dims)} does not hold its {count} values ({err}); the file is"
            " damaged, export it again"
        ) from err
