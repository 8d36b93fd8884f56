"""A whole model, read for cutting: the tensors that each node reads and writes, with dtypes and shapes.

It refuses models that cannot be cut: with control flow, sizes that depend on data, or weights in other files.
"""

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray

from edgekit_runtime.errors import CutError
from edgekit_runtime.tensors import DTYPES, TensorSpec

WHOLE_ONLY: Final = "it can only run whole: on the device, or on the server"
MAX_MODEL_BYTES: Final = (1 << 31) - 1  # limit of protobuf; larger models keep weights in other files
BATCH: Final = -1  # in a shape: the number of rows of the request
_SHAPE_OPS: Final = frozenset({"Shape", "Size"})
_LOG_FATAL_ONLY: Final = 4
_RANDOM: Final = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_INTEGER_SIZES: Final = 2  # generated integers are 0 or 1, which are indices almost everywhere


class SourceModel:
    """An ONNX model that can be cut.

    Attributes:
        content: the model's file; submodels refer to the weights in it.
        proto: the same, parsed.
        weights: names of all initializers, including graph inputs with a default.
        inputs: names of the inputs that an application gives.
        outputs: names of the graph's outputs.
        writer: tensor -> index of the node that writes it.
        shapes: output of a Shape or Size node -> its value; a batch in it is `BATCH`. Each side computes it
            from its own batch, so that a cut sends no tensor only for its shape.
        constant_nodes: nodes that read only weights and shapes. Each side that needs one has it, so they are
            never cut.
    """

    shapes: Mapping[str, NDArray[np.int64]] = MappingProxyType({})

    def __init__(self, content: bytes) -> None:
        """Read a model.

        Raises:
            CutError: the content is no ONNX model, or the model can only run whole.
        """
        self.content = content
        self.proto = parse_model(content)
        graph = self.proto.graph
        self.weights = frozenset(
            [tensor.name for tensor in graph.initializer]
            + [sparse.values.name for sparse in graph.sparse_initializer]
        )
        self.inputs = tuple(value.name for value in graph.input if value.name not in self.weights)
        self.outputs = tuple(value.name for value in graph.output)
        self.writer = self._find_writers()
        self.constant_nodes = self._find_constant_nodes()
        self.shapes = self._find_shapes()
        self.constant_nodes = self._find_constant_nodes()

    def _find_writers(self) -> dict[str, int]:
        """Check that each tensor has one writer, and that the nodes can run in their order."""
        writer: dict[str, int] = {}
        known = {"", *self.inputs, *self.weights}
        if len(known) != 1 + len(self.inputs) + len(self.weights):
            raise CutError("model: two inputs have the same name; export it again")
        for index, node in enumerate(self.proto.graph.node):
            if any(one.HasField("g") or one.graphs for one in node.attribute):
                raise CutError(
                    f"model: node {index} is a {node.op_type}, which is control flow; {WHOLE_ONLY}"
                )
            if missing := [name for name in node.input if name not in known]:
                raise CutError(f"model: node {index} ({node.op_type}) reads {missing[0]!r} before it is made")
            for name in filter(None, node.output):
                if name in known:
                    raise CutError(f"model: two nodes make the tensor {name!r}; export the model again")
                known.add(name)
                writer[name] = index
        return writer

    def _find_shapes(self) -> Mapping[str, NDArray[np.int64]]:
        """Return the shapes that a model computes, if they depend only on the batch."""
        nodes = [
            node
            for node in self.proto.graph.node
            if node.op_type in _SHAPE_OPS and not set(node.output) & set(self.outputs)
        ]
        shapes = {}
        for name in [node.output[0] for node in nodes if not self.is_constant(node.output[0])]:
            one, two = (values[name] for values in self.samples)
            if np.array_equal(one, two):
                shapes[name] = one
            elif one.ndim and (one[0], two[0]) == (1, 2) and np.array_equal(one[1:], two[1:]):
                shapes[name] = np.concatenate([[BATCH], one[1:]])
        return shapes

    def _find_constant_nodes(self) -> frozenset[int]:
        known = {"", *self.weights}
        found = set()
        for index, node in enumerate(self.proto.graph.node):
            is_shape = bool(node.output) and node.output[0] in self.shapes
            if node.op_type not in _RANDOM and (is_shape or all(name in known for name in node.input)):
                known.update(node.output)
                found.add(index)
        return frozenset(found)

    def is_constant(self, tensor: str) -> bool:
        """Return whether a tensor depends only on weights and shapes."""
        return tensor in self.weights or self.writer.get(tensor) in self.constant_nodes

    def spec(self, tensor: str) -> TensorSpec:
        """Return dtype and shape of an input or of a node's output; only axis 0 can be free.

        Raises:
            CutError: the tensor is not a plain one, or its shape depends on more than the batch.
        """
        one, two = (values.get(tensor) for values in self.samples)
        if one is None or two is None or one.dtype.name not in DTYPES:
            raise CutError(f"model: tensor {tensor!r} is no plain tensor, so it cannot be sent; {WHOLE_ONLY}")
        shape: tuple[int | str, ...] = one.shape
        if one.shape != two.shape:
            if one.ndim != two.ndim or one.shape[1:] != two.shape[1:]:
                raise CutError(
                    f"model: tensor {tensor!r} has shape {list(one.shape)} for one sample and"
                    f" {list(two.shape)} for two, expected that only axis 0 differs; {WHOLE_ONLY}"
                )
            is_batch = one.shape[0] == 1 and two.shape[0] == len(self.samples)
            shape = ("N" if is_batch else f"{tensor}_0", *one.shape[1:])
        return TensorSpec(tensor, one.dtype.name, shape)

    @cached_property
    def samples(self) -> tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]:
        """Every tensor of a run with a batch of 1, and of a run with a batch of 2 if the batch is free.

        onnxruntime runs the model because shape inference does not know all of its own operators.

        Raises:
            CutError: an input has a free size that is not the batch, or onnxruntime does not run the model.
        """
        one = self.run_all(1)
        return one, self.run_all(2) if self._is_batch_free else one

    @cached_property
    def _is_batch_free(self) -> bool:
        values = {value.name: value for value in self.proto.graph.input}
        free = False
        for name in self.inputs:
            tensor = values[name].type.tensor_type
            if not tensor.HasField("shape"):
                raise CutError(f"model: input {name!r} has no shape; {WHOLE_ONLY}")
            for axis, dim in enumerate(tensor.shape.dim):
                if dim.HasField("dim_value"):
                    continue
                if axis > 0:
                    raise CutError(
                        f"model: axis {axis} of input {name!r} is free, expected that only axis 0 is; fix it"
                        f" and cut again, otherwise {WHOLE_ONLY}"
                    )
                free = True
        return free

    def run_all(self, batch: int) -> dict[str, NDArray[Any]]:
        """Return every tensor of a run on generated inputs, including the inputs.

        Raises:
            CutError: onnxruntime does not run the model.
        """
        is_free = self._is_batch_free
        traced = onnx.ModelProto()
        traced.CopyFrom(self.proto)
        names = [name for name, index in self.writer.items() if index not in self.constant_nodes]
        traced.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in names if name not in self.outputs
        )
        stream = np.random.default_rng(0)
        feeds = {}
        for value in traced.graph.input:
            if value.name in self.weights:
                continue
            dims = value.type.tensor_type.shape.dim
            sizes = [dim.dim_value if dim.HasField("dim_value") or not is_free else batch for dim in dims]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            made = stream.random(sizes) if dtype.kind == "f" else stream.integers(0, _INTEGER_SIZES, sizes)
            feeds[value.name] = np.asarray(made).astype(dtype)
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = _LOG_FATAL_ONLY
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        settings.intra_op_num_threads = 1
        try:
            session = onnxruntime.InferenceSession(
                traced.SerializeToString(), settings, providers=["CPUExecutionProvider"], enable_fallback=0
            )
            values = session.run(names, feeds)
        except Exception as cause:  # its exceptions have no other common base
            raise CutError(f"model: onnxruntime does not run it with a batch of {batch}: {cause}") from cause
        return {**feeds, **{name: np.asarray(one) for name, one in zip(names, values, strict=True)}}


def parse_model(content: bytes) -> onnx.ModelProto:
    """Return a model that can be extracted, at least whole.

    Raises:
        CutError: it is no ONNX model, is too large or empty, or has weights in other files.
    """
    if len(content) > MAX_MODEL_BYTES:
        raise CutError(f"model: {len(content)} bytes, the most for a cut is {MAX_MODEL_BYTES}; {WHOLE_ONLY}")
    try:
        proto = onnx.load_from_string(content)
    except DecodeError as cause:
        raise CutError(f"model: no ONNX model: {cause}; give the content of a .onnx file") from cause
    if not proto.graph.node:
        raise CutError(f"model: it has no nodes, so there is nothing to cut; {WHOLE_ONLY}")
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise CutError(
                f"model: weight {tensor.name!r} lies in another file (as in models above 2 GB), expected it"
                f" in the model's own; {WHOLE_ONLY}"
            )
    return proto
