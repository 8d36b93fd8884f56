"""Cuts a model into a head for the device and a tail for the server.

The outputs of the head are the inputs of the tail. If the device computes some outputs of the model itself,
the head has these outputs too. Large weights stay in the file of the whole model, and submodels refer to
them. The cuts are chosen in `planning`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgekit_offload.partition.coding import (
    RAW,
    CodedTensor,
    Coding,
    Nodes,
    build_model,
    code_reply,
    code_tensor,
    describe,
)
from edgekit_offload.partition.source_model import BATCH, WHOLE_ONLY, SourceModel, parse_model
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.offload_plan import InputCodes
from edgekit_runtime.tensors import DTYPES, TensorSpec

DECODER_SUFFIX: Final = ".reply.head"  # of the decoder of replies, which devices alone run, as heads
WEIGHTS_PATH: Final = "model.onnx"  # the toolkit's name of the model in a package
_SMALL_BYTES: Final = 1024  # weights up to this size stay in the submodel. A reference takes 100 bytes
_DEFAULT_DOMAINS: Final = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class Part:
    """The head or tail of a model.

    Attributes:
        content: An ONNX model. Its large weights are external data in the file of the whole model.
        inputs, outputs: The tensors of this part.
        reads_weights: Whether it refers to the file of the whole model.
    """

    content: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    reads_weights: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModels:
    """A model that was cut into head and tail.

    Attributes:
        head: The model for the device, or None if the inputs are sent unchanged.
        sent: The tensors that are sent, which are the inputs of the tail.
        coded: The names of the model's tensors that are sent, before coding.
        codes: The values that the head can code, by tensor. A tensor without an entry may have any values.
        decoder: The model with which the device decodes outputs in a reply, or None if none is coded.
    """

    head: Part | None
    tail: Part
    sent: tuple[TensorSpec, ...]
    coded: tuple[str, ...]
    codes: Mapping[str, InputCodes] = field(default_factory=dict)
    decoder: Part | None = None


def split_model(
    model: bytes | SourceModel,
    device_nodes: Collection[int],
    coding: Coding = RAW,
    *,
    weights_path: str = WEIGHTS_PATH,
) -> SplitModels:
    """Cut a model into head and tail.

    With the coding `raw`, head and tail together give the exact outputs of the whole model if the engine runs
    the same kernels. A fusion of nodes across the cut may change the last bits.

    Args:
        model: The content of the model's file, or a `SourceModel`, which saves time for several cuts.
        device_nodes: The indices of the nodes that run on the device, in the order of the file. Nodes that
            read only weights need not be included.
        coding: The coding of the tensors that are sent.
        weights_path: The path of the whole model's file in the package.

    Raises:
        CutError: The model cannot be cut, a node of the device needs a node of the server, or there are no
            nodes or tensors for the server.
    """
    whole = model if isinstance(model, SourceModel) else SourceModel(model)
    device, server = _sides(whole, device_nodes)
    tail_outputs = _tail_outputs(whole, server, takes_all=not device and coding.kind == RAW.kind)
    head_outputs = [name for name in whole.outputs if name not in tail_outputs]
    crossing = _crossing(whole, device, server, tail_outputs)
    opset = _find_opset(whole.proto)
    specs = {name: whole.sent_spec(name) for name in crossing}
    coded = {name: code_tensor(specs[name], coding, opset) for name in crossing}
    outputs = {name: whole.spec(name) for name in tail_outputs}
    # The coding of an upload is that of its input alone.
    replied = {name: code_reply(spec, coding, opset) if device else None for name, spec in outputs.items()}
    uploads = [tensor for tensor in coded.values() if tensor is not None]
    replies = [tensor for tensor in replied.values() if tensor is not None]
    _check_names(whole, [*uploads, *replies])
    sent = _sent_specs(specs, coded)
    sent_names = {spec.name for spec in sent}
    builder = _Builder(whole, weights_path)
    head = None
    if device or head_outputs or uploads:
        head_specs = [*sent, *(whole.spec(name) for name in head_outputs if name not in sent_names)]
        head = builder.build(device, head_specs, after=[tensor.encode for tensor in uploads])
    tail = builder.build(
        server,
        _sent_specs(outputs, replied),
        inputs=sent,
        after=[tensor.encode for tensor in replies],
        before=[tensor.decode for tensor in uploads],
        renamed={name: tensor.restored for name, tensor in coded.items() if tensor is not None},
    )
    return SplitModels(
        head=head,
        tail=tail,
        sent=sent,
        coded=tuple(crossing),
        codes=coding.codes_of(list(specs.values())),
        decoder=_decoder(replied, outputs),
    )


def _tail_outputs(whole: SourceModel, server: Collection[int], *, takes_all: bool) -> list[str]:
    """Return the outputs of the tail.

    A constant, or an input that is also an output, belongs to the side that runs if only one side runs.
    """
    written = {name for index in server for name in whole.proto.graph.node[index].output}
    return [name for name in whole.outputs if takes_all or name in written]


def _find_opset(proto: onnx.ModelProto) -> int:
    return int(next(opset.version for opset in proto.opset_import if opset.domain in _DEFAULT_DOMAINS))


def _sent_specs(
    specs: Mapping[str, TensorSpec], coded: Mapping[str, CodedTensor | None]
) -> tuple[TensorSpec, ...]:
    """Return the specs of the values sent for tensors, some of which are coded."""
    sent = [(specs[name],) if tensor is None else tensor.sent for name, tensor in coded.items()]
    return tuple(spec for parts in sent for spec in parts)


def _decoder(replied: Mapping[str, CodedTensor | None], outputs: Mapping[str, TensorSpec]) -> Part | None:
    """Return the model that restores the coded outputs under their own names."""
    coded = {name: tensor for name, tensor in replied.items() if tensor is not None}
    if not coded:
        return None
    for name, tensor in coded.items():
        tensor.decode.add("Identity", [tensor.restored], name)
    inputs = tuple(spec for tensor in coded.values() for spec in tensor.sent)
    specs = tuple(outputs[name] for name in coded)
    content = build_model([tensor.decode for tensor in coded.values()], inputs, specs)
    return Part(content, inputs, specs, reads_weights=False)


def whole_upload(
    model: bytes | SourceModel, coding: Coding = RAW, *, weights_path: str = WEIGHTS_PATH
) -> SplitModels:
    """Return the split with the whole model on the server. If there is a head, it only codes inputs.

    The arguments are those of `split_model`. If the model cannot be cut because of control flow or sizes that
    depend on data, the whole model is the tail.

    Raises:
        CutError: The content is not a model, a tensor has no rank, or the coding cannot be used.
    """
    try:
        return split_model(model, (), coding, weights_path=weights_path)
    except CutError:
        content = model.content if isinstance(model, SourceModel) else model
        return _upload_as_it_is(content, coding, weights_path)


def _upload_as_it_is(content: bytes, coding: Coding, weights_path: str) -> SplitModels:
    """Return the upload of a model of which only inputs and outputs are known."""
    proto = parse_model(content)
    weights = {tensor.name for tensor in proto.graph.initializer}
    weights |= {sparse.values.name for sparse in proto.graph.sparse_initializer}
    inputs = [_read_spec(value) for value in proto.graph.input if value.name not in weights]
    inferred = onnx.shape_inference.infer_shapes(proto).graph.output
    outputs = tuple(_read_spec(value) for value in inferred)
    opset = _find_opset(proto)
    coded = [(spec, code_tensor(spec, coding, opset)) for spec in inputs]
    sent = tuple(part for spec, tensor in coded for part in ((spec,) if tensor is None else tensor.sent))
    file = _WeightsFile(content, weights_path)
    stored = [file.refer(tensor) for tensor in proto.graph.initializer]
    nodes = list(proto.graph.node)
    for part in ("node", "initializer", "input"):
        proto.graph.ClearField(part)
    coded_inputs = [spec for spec, tensor in coded if tensor is not None]
    coders = [tensor for _, tensor in coded if tensor is not None]
    for spec, coder in zip(coded_inputs, coders, strict=True):
        coder.decode.add("Identity", [coder.restored], spec.name)
        proto.graph.node.extend(coder.decode.nodes)
        proto.graph.initializer.extend(coder.decode.constants)
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(stored)
    proto.graph.input.extend(map(describe, sent))
    reads_weights = any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in stored)
    tail = Part(proto.SerializeToString(deterministic=True), sent, outputs, reads_weights)
    head = None
    if coders:
        coding_model = build_model(
            [coder.encode for coder in coders], coded_inputs, [s for o in coders for s in o.sent]
        )
        sent_codes = tuple(spec for coder in coders for spec in coder.sent)
        head = Part(coding_model, tuple(coded_inputs), sent_codes, reads_weights=False)
    return SplitModels(
        head=head,
        tail=tail,
        sent=sent,
        coded=tuple(spec.name for spec in inputs),
        codes=coding.codes_of(coded_inputs),
    )


def _read_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    """Return an input or output as the file describes it; a free size keeps its name.

    Raises:
        CutError: the value is no tensor, or has no rank.
    """
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        raise CutError(f"model: {value.name!r} is no tensor of a known rank, so it cannot be sent")
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type).name
    if dtype not in DTYPES:
        raise CutError(f"model: {value.name!r} holds {dtype}, which cannot be sent")
    sizes = [
        dim.dim_value if dim.dim_value > 0 else dim.dim_param or f"{value.name}_{axis}"
        for axis, dim in enumerate(kind.shape.dim)
    ]
    return TensorSpec(value.name, dtype, tuple(sizes))


def _sides(whole: SourceModel, device_nodes: Collection[int]) -> tuple[list[int], list[int]]:
    """Nodes of both sides in the order of the file, without constant ones."""
    count = len(whole.proto.graph.node)
    if wrong := [index for index in device_nodes if not 0 <= index < count]:
        raise CutError(f"cut: node {wrong[0]} is not in the model, which has {count}")
    on_device = set(device_nodes) - whole.constant_nodes
    # Nodes that no output needs run nowhere: a server would get tensors for them, and return nothing.
    moving = [index for index in _needed(whole) if index not in whole.constant_nodes]
    device = [index for index in moving if index in on_device]
    server = [index for index in moving if index not in on_device]
    if not server:
        raise CutError("cut: all nodes are on the device, so there is nothing to cut; run the model locally")
    behind = set(server)
    for index in device:
        for name in whole.proto.graph.node[index].input:
            if whole.writer.get(name) in behind:
                raise CutError(
                    f"cut: node {index} on the device reads {name!r}, which node {whole.writer[name]} makes"
                    " on the server; data flows from the device to the server only"
                )
    return device, sorted({*server, *_widening(whole, device, server)})


def _widening(whole: SourceModel, device: Sequence[int], server: Sequence[int]) -> set[int]:
    """DequantizeLinear nodes of the device that the server also runs: it gets the 8-bit tensors they read."""
    read = {name for index in server for name in whole.proto.graph.node[index].input}
    widening = set()
    for index in device:
        node = whole.proto.graph.node[index]
        if node.op_type != "DequantizeLinear" or set(node.output) & set(whole.outputs):
            continue
        if node.output[0] in read and all(whole.is_constant(name) for name in node.input[1:] if name):
            widening.add(index)
    return widening


def _needed(whole: SourceModel) -> list[int]:
    """Nodes that an output depends on, in the order of the file."""
    needed: set[int] = set()
    waiting = list(whole.outputs)
    while waiting:
        name = waiting.pop()
        index = whole.writer.get(name)
        if index is not None and index not in needed:
            needed.add(index)
            waiting += [] if name in whole.shapes else whole.proto.graph.node[index].input
    return sorted(needed)


def _crossing(
    whole: SourceModel, device: Sequence[int], server: Sequence[int], outputs: Sequence[str]
) -> list[str]:
    """Tensors that the server reads or returns and does not make: inputs, and what the device makes."""
    written = {name for index in server for name in whole.proto.graph.node[index].output}
    read = {name for index in server for name in whole.proto.graph.node[index].input if name} | {*outputs}
    crossing = [name for name in whole.inputs if name in read]
    for index in device:
        crossing += [name for name in whole.proto.graph.node[index].output if name in read - written]
    if not crossing:
        raise CutError(f"cut: the server would get nothing; {WHOLE_ONLY}")
    return crossing


def _check_names(whole: SourceModel, coded: Iterable[CodedTensor]) -> None:
    existing = {*whole.weights, *whole.inputs, *whole.writer}
    for tensor in coded:
        added = [
            name for nodes in (tensor.encode, tensor.decode) for node in nodes.nodes for name in node.output
        ]
        if clashes := existing & set(added):
            raise CutError(f"cut: the model has a tensor {min(clashes)!r} already; rename it and cut again")


class _WeightsFile:
    """The whole model's file, in which submodels name the places of their weights."""

    def __init__(self, content: bytes, path: str) -> None:
        self._content, self._path = content, path
        self._locations: dict[str, tuple[int, int] | None] = {}
        self._cursor = 0

    def refer(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """Return a weight as external data in the file, or unchanged if it is small or not in the file."""
        location = self._find(tensor)
        if location is None:
            return tensor
        external = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        external.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", self._path), ("offset", location[0]), ("length", location[1])):
            external.external_data.add(key=key, value=str(value))
        return external

    def _find(self, tensor: onnx.TensorProto) -> tuple[int, int] | None:
        """Offset and length of a weight's bytes in the file; None if it is small or not there.

        Any equal bytes will do, so a search cannot be wrong. Weights lie in the order of the graph, so the
        search continues where the last one ended.
        """
        if tensor.name not in self._locations:
            self._locations[tensor.name] = None
            if tensor.data_type != onnx.TensorProto.STRING:
                data = tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
                if len(data) > _SMALL_BYTES:
                    offset = self._content.find(data, self._cursor)
                    if offset < 0:
                        offset = self._content.find(data)
                    if offset >= 0:
                        self._cursor = offset
                        self._locations[tensor.name] = (offset, len(data))
        return self._locations[tensor.name]


class _Builder:
    def __init__(self, whole: SourceModel, weights_path: str) -> None:
        self._whole = whole
        self._weights = _WeightsFile(whole.content, weights_path)

    def build(
        self,
        indices: Sequence[int],
        outputs: Sequence[TensorSpec],
        *,
        inputs: Sequence[TensorSpec] | None = None,
        before: Sequence[Nodes] = (),
        after: Sequence[Nodes] = (),
        renamed: dict[str, str] | None = None,
    ) -> Part:
        """Return a part.

        Args:
            indices: nodes of the part, without constant ones.
            outputs: outputs of the part.
            inputs: inputs of the part; None for the inputs of the model that it reads.
            before: added nodes that decode.
            after: added nodes that encode.
            renamed: names that its own nodes read under another name.
        """
        whole, graph = self._whole, self._whole.proto.graph
        output_names = {spec.name for spec in outputs}
        read = {name for index in indices for name in graph.node[index].input} | output_names
        read |= {name for nodes in after for node in nodes.nodes for name in node.input}
        constants = self._constants(read)
        shapes = sorted({graph.node[index].output[0] for index in constants} & {*whole.shapes})
        copied = sorted({*indices, *constants} - {whole.writer[name] for name in shapes})
        read |= {name for index in copied for name in graph.node[index].input}
        if inputs is None:
            inputs = [whole.spec(name) for name in whole.inputs if name in read]
            if any(BATCH in whole.shapes[name] for name in shapes) and not _find_batch(inputs):
                specs = [whole.spec(name) for name in whole.inputs]
                inputs += [spec for spec in specs if _find_batch([spec])][:1]
        part = onnx.ModelProto()
        part.CopyFrom(_without_graph(whole.proto))
        part.graph.name = graph.name or "part"
        for nodes in before:
            part.graph.node.extend(nodes.nodes)
            part.graph.initializer.extend(nodes.constants)
        _make_shapes(part.graph, {name: whole.shapes[name] for name in shapes}, inputs)
        for index in copied:
            node = part.graph.node.add()
            node.CopyFrom(graph.node[index])
            for position, name in enumerate(node.input):
                node.input[position] = (renamed or {}).get(name, name)
        for nodes in after:
            part.graph.node.extend(nodes.nodes)
            part.graph.initializer.extend(nodes.constants)
        reads_weights = self._add_weights(part, read)
        part.graph.input.extend(map(describe, inputs))
        part.graph.output.extend(map(describe, outputs))
        self._drop_unused(part)
        content = part.SerializeToString(deterministic=True)
        return Part(content, tuple(inputs), tuple(outputs), reads_weights)

    def _constants(self, read: set[str]) -> list[int]:
        """The constant nodes that make the tensors that are read."""
        constants: set[int] = set()
        waiting = list(read)
        while waiting:
            name = waiting.pop()
            index = self._whole.writer.get(name)
            if index is not None and index in self._whole.constant_nodes and index not in constants:
                constants.add(index)
                waiting += [] if name in self._whole.shapes else self._whole.proto.graph.node[index].input
        return sorted(constants)

    def _add_weights(self, part: onnx.ModelProto, read: set[str]) -> bool:
        graph, is_external = self._whole.proto.graph, False
        for tensor in graph.initializer:
            if tensor.name not in read:
                continue
            added = part.graph.initializer.add()
            added.CopyFrom(self._weights.refer(tensor))
            is_external |= added.data_location == onnx.TensorProto.EXTERNAL
        part.graph.sparse_initializer.extend(
            sparse for sparse in graph.sparse_initializer if sparse.values.name in read
        )
        part.graph.quantization_annotation.extend(
            annotation for annotation in graph.quantization_annotation if annotation.tensor_name in read
        )
        return is_external

    @staticmethod
    def _drop_unused(part: onnx.ModelProto) -> None:
        called = {(node.domain, node.op_type) for node in part.graph.node}
        while True:
            bodies = [function for function in part.functions if (function.domain, function.name) in called]
            more = called | {(node.domain, node.op_type) for body in bodies for node in body.node}
            if more == called:
                break
            called = more
        del part.functions[:]
        part.functions.extend(bodies)


def _find_batch(specs: Iterable[TensorSpec]) -> str | None:
    return next((spec.name for spec in specs if spec.shape[:1] == ("N",)), None)


def _make_shapes(
    graph: onnx.GraphProto, shapes: Mapping[str, NDArray[np.int64]], inputs: Iterable[TensorSpec]
) -> None:
    """Add shapes to a part as constants; a batch in them is read from one of the part's inputs.

    Raises:
        CutError: no input has the batch.
    """
    free = {name: shape for name, shape in shapes.items() if BATCH in shape}
    for name in shapes.keys() - free.keys():
        graph.initializer.append(numpy_helper.from_array(shapes[name], name))
    if not free:
        return
    batch = _find_batch(inputs)
    if batch is None:
        raise CutError(f"cut: the shape {min(free)!r} needs the batch, and nothing that is sent has it")
    first = min(free)
    own_shape, own_batch, zero = (f"{first}.{part}" for part in ("sent", "batch", "zero"))
    graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), zero))
    graph.node.append(helper.make_node("Shape", [batch], [own_shape]))
    graph.node.append(helper.make_node("Gather", [own_shape, zero], [own_batch]))
    for name, shape in free.items():
        graph.initializer.append(numpy_helper.from_array(shape[1:], f"{name}.rest"))
        graph.node.append(helper.make_node("Concat", [own_batch, f"{name}.rest"], [name], axis=0))


def _without_graph(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model without its graph, which holds the weights."""
    result = onnx.ModelProto()
    for descriptor, value in proto.ListFields():
        if descriptor.name == "graph":
            continue
        if descriptor.is_repeated:
            getattr(result, descriptor.name).extend(value)
        else:
            setattr(result, descriptor.name, value)
    return result
