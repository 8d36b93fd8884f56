"""Converts sparse weights of an ONNX model to dense weights, because no pass supports sparse ones."""

import math

import numpy as np
import onnx
from onnx import checker, helper, numpy_helper

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.onnx_graph.traversal import graphs


def store_densely(model: onnx.ModelProto, max_bytes: int) -> None:
    """Replace sparse initializers and sparse values of Constant nodes by dense tensors in place.

    Raises:
        ModelError: A sparse tensor is invalid, or the resulting model is larger than `max_bytes`.
    """
    left_bytes = max_bytes - model.ByteSize()

    def widen(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
        nonlocal left_bytes
        name = sparse.values.name
        try:
            checker.check_sparse_tensor(sparse)
            values, positions = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
            left_bytes -= math.prod(sparse.dims) * values.itemsize
            if left_bytes < 0:
                raise ModelError(
                    f"sparse weight '{name}' {list(sparse.dims)}: as dense ones, which engines need, the"
                    f" weights are larger than {max_bytes} bytes; export a smaller model"
                )
            dense = np.zeros(tuple(sparse.dims), values.dtype)
            dense[np.unravel_index(positions, dense.shape) if positions.ndim == 1 else tuple(positions.T)] = (
                values
            )
        except (checker.ValidationError, ValueError, TypeError, IndexError) as err:
            first_line = str(err).strip().splitlines()[0]
            raise ModelError(f"sparse weight '{name}' is not valid ({first_line}); export it again") from err
        return numpy_helper.from_array(dense, name)

    for graph in list(graphs(model.graph)):
        graph.initializer.extend([widen(sparse) for sparse in graph.sparse_initializer])
        del graph.sparse_initializer[:]
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name == "sparse_value":
                    attribute.CopyFrom(helper.make_attribute("value", widen(attribute.sparse_tensor)))
