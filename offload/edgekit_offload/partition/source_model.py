"""Analyses a model for cutting: the tensors that each node reads and writes, their dtypes and shapes.

Models are rejected if they contain control flow, sizes that depend on data, or weights in other files.
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

from edgekit_offload.profiling.fused_graph import is_plain, vary_values
from edgekit_runtime.errors import CutError
from edgekit_runtime.tensors import TensorSpec

WHOLE_ONLY: Final = "it can only run whole: on the device, or on the server"
MAX_MODEL_BYTES: Final = (1 << 31) - 1  # limit of protobuf. Larger models keep weights in other files
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
        content: The file of the model. Submodels refer to its weights.
        weights: The names of all initializers, including graph inputs with a default value.
        writer: A dict from a tensor to the index of the node that writes it.
        shapes: A dict from the output of a Shape or Size node to its value, in which `BATCH` stands for the
            batch size. Head and tail both compute this value, so it is not sent.
        constant_nodes: The nodes that depend only on weights and shapes. Head and tail each get a copy of the
            ones that they need.
    """

    shapes: Mapping[str, NDArray[np.int64]] = MappingProxyType({})

    def __init__(self, content: bytes, proto: onnx.ModelProto | None = None) -> None:
        """Read a model, which may be parsed already.

        Raises:
            CutError: the content is no ONNX model, or the model can only run whole.
        """
        self.content = content
        self.proto = parse_model(content, proto)
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
        written = {"", *self.inputs, *self.weights}
        if len(written) != 1 + len(self.inputs) + len(self.weights):
            raise CutError("model: two inputs have the same name; export it again")
        for index, node in enumerate(self.proto.graph.node):
            if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
                raise CutError(
                    f"model: node {index} is a {node.op_type}, which is control flow; {WHOLE_ONLY}"
                )
            if missing := [name for name in node.input if name not in written]:
                raise CutError(f"model: node {index} ({node.op_type}) reads {missing[0]!r} before it is made")
            for name in filter(None, node.output):
                if name in written:
                    raise CutError(f"model: two nodes make the tensor {name!r}; export the model again")
                written.add(name)
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
            single, two, _ = (values[name] for values in self.samples)
            if np.array_equal(single, two):
                shapes[name] = single
            elif single.ndim and (single[0], two[0]) == (1, 2) and np.array_equal(single[1:], two[1:]):
                shapes[name] = np.concatenate([[BATCH], single[1:]])
        return shapes

    def _find_constant_nodes(self) -> frozenset[int]:
        constants = {"", *self.weights}
        constant_nodes = set()
        for index, node in enumerate(self.proto.graph.node):
            is_shape = bool(node.output) and node.output[0] in self.shapes
            if node.op_type not in _RANDOM and (is_shape or all(name in constants for name in node.input)):
                constants.update(node.output)
                constant_nodes.add(index)
        return frozenset(constant_nodes)

    def is_constant(self, tensor: str) -> bool:
        return tensor in self.weights or self.writer.get(tensor) in self.constant_nodes

    def spec(self, tensor: str) -> TensorSpec:
        """Return the dtype and shape of an input or of the output of a node.

        The batch is called `N`. Each other free dimension has a unique name.

        Raises:
            CutError: The value is an ONNX `sequence` or `optional`, its dtype cannot be sent (such as
                `string`), or its rank depends on the data.
        """
        runs: list[Any] = [values.get(tensor) for values in self.samples]
        if not all(map(is_plain, runs)):
            raise CutError(f"model: tensor {tensor!r} is no plain tensor, so it cannot be sent; {WHOLE_ONLY}")
        single, two, other = runs
        if not single.ndim == two.ndim == other.ndim:
            raise CutError(f"model: the rank of tensor {tensor!r} depends on the data; {WHOLE_ONLY}")
        shape: list[int | str] = []
        for axis, sizes in enumerate(zip(single.shape, two.shape, other.shape, strict=True)):
            symbol = "N" if (axis, *sizes) == (0, 1, 2, 1) else f"{tensor}_{axis}"
            shape.append(sizes[0] if len(set(sizes)) == 1 else symbol)
        return TensorSpec(tensor, single.dtype.name, tuple(shape))

    def sent_spec(self, tensor: str) -> TensorSpec:
        """Return the dtype and shape of a tensor that is sent over the link. Only axis 0 can be free.

        Raises:
            CutError: The value is an ONNX `sequence` or `optional`, its dtype cannot be sent (such as
                `string`), or its shape depends on more than the batch.
        """
        spec, (single, _, other) = self.spec(tensor), self.samples
        if (
            any(isinstance(size, str) for size in spec.shape[1:])
            or single[tensor].shape != other[tensor].shape
        ):
            raise CutError(
                f"model: the size of tensor {tensor!r} {list(spec.shape)} depends on more than the batch, so"
                f" it cannot be sent; {WHOLE_ONLY}"
            )
        return spec

    @cached_property
    def samples(self) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]:
        """The values of all tensors by name in three runs.

        The first run has batch size 1, the second has batch size 2 if possible, and the third has other
        inputs. The model is run because shape inference does not support all operators of onnxruntime.

        Raises:
            CutError: A free dimension of an input is not the batch, or onnxruntime does not run the model.
        """
        symbols = self._free_symbols
        single = self.run_all({})
        two = self.run_all(dict.fromkeys(symbols, 2)) if symbols else single
        if len(symbols) > 1 and self._try({name: 2 + number for number, name in enumerate(symbols)}):
            raise CutError(
                f"model: {', '.join(symbols)} are free independently of each other, expected one batch; fix"
                f" all but one and cut again, otherwise {WHOLE_ONLY}"
            )
        other = self._try({}, varied=True) or single
        return single, two, other

    @cached_property
    def _free_symbols(self) -> tuple[str, ...]:
        """The names of the free sizes of axis 0."""
        values = {value.name: value for value in self.proto.graph.input}
        symbols: dict[str, None] = {}
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
                symbols[dim.dim_param or f"{name}_0"] = None
        return tuple(symbols)

    def _try(self, sizes: Mapping[str, int], *, varied: bool = False) -> dict[str, Any] | None:
        """Return what `run_all` returns, or None if the model does not run so."""
        try:
            return self.run_all(sizes, varied=varied)
        except CutError:
            return None

    def run_all(self, sizes: Mapping[str, int], *, varied: bool = False) -> dict[str, Any]:
        """Run the model on generated inputs, and return the values of all tensors and inputs by name.

        Args:
            sizes: The sizes of free dimensions by name, 1 by default.
            varied: Whether to change the generated floats with `vary_values`, which reveals the sizes that
                depend on values. If False, floats are in 0..1.

        Raises:
            CutError: onnxruntime does not run the model.
        """
        self._free_symbols  # noqa: B018  # checks the inputs
        stream = np.random.default_rng(0)
        feeds = {}
        for value in self.proto.graph.input:
            if value.name in self.weights:
                continue
            dims = value.type.tensor_type.shape.dim
            shape = [
                dim.dim_value
                if dim.HasField("dim_value")
                else sizes.get(dim.dim_param or f"{value.name}_0", 1)
                for dim in dims
            ]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            is_float = dtype.kind == "f"
            generated = stream.random(shape) if is_float else stream.integers(0, _INTEGER_SIZES, shape)
            feeds[value.name] = np.asarray(generated).astype(dtype)
            if varied:
                feeds[value.name] = vary_values(feeds[value.name], 0)
        try:
            names = [output.name for output in self._traced.get_outputs()]
            values = self._traced.run(names, feeds)
        except Exception as cause:  # its exceptions have no other common base
            batch = next(iter(sizes.values()), 1)
            raise CutError(f"model: onnxruntime does not run it with a batch of {batch}: {cause}") from cause
        return {**feeds, **dict(zip(names, values, strict=True))}

    @cached_property
    def _traced(self) -> onnxruntime.InferenceSession:
        """A session that returns every tensor, except constants that are no outputs."""
        traced = onnx.ModelProto()
        traced.CopyFrom(self.proto)
        traced.graph.output.extend(
            onnx.ValueInfoProto(name=name)
            for name, index in self.writer.items()
            if index not in self.constant_nodes and name not in self.outputs
        )
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = _LOG_FATAL_ONLY
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        settings.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(
            traced.SerializeToString(), settings, providers=["CPUExecutionProvider"], enable_fallback=0
        )


def parse_model(content: bytes, proto: onnx.ModelProto | None = None) -> onnx.ModelProto:
    """Return a parsed model from which submodels can be extracted. `proto` is used if it is given.

    Raises:
        CutError: The content is not an ONNX model, is too large or empty, or has weights in other files.
    """
    if len(content) > MAX_MODEL_BYTES:
        raise CutError(f"model: {len(content)} bytes, the most for a cut is {MAX_MODEL_BYTES}; {WHOLE_ONLY}")
    try:
        proto = onnx.load_from_string(content) if proto is None else proto
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
