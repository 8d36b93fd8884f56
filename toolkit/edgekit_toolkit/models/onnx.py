"""An ONNX model for onnxruntime."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import onnx

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_toolkit.costs.onnx_operators import node_costs
from edgekit_toolkit.costs.peak_memory import MemoryEstimate, estimate_peak_memory
from edgekit_toolkit.costs.target_model import NodeCost
from edgekit_toolkit.models.input_codes import onnx_code_ranges
from edgekit_toolkit.models.integer_division import onnx_divides_by_inputs
from edgekit_toolkit.models.model import ModelSize, Runner, Specs, StoredTensor
from edgekit_toolkit.models.ort_session import run_session, session_for
from edgekit_toolkit.models.saturating_products import find_saturating
from edgekit_toolkit.onnx_graph.index import opset
from edgekit_toolkit.onnx_graph.ort_options import ort_options, stated_options
from edgekit_toolkit.onnx_graph.specs import free_dims, tensor_specs
from edgekit_toolkit.onnx_graph.traversal import bodies, computes_in_integers, random_nodes
from edgekit_toolkit.openings.sessions import open_ort
from edgekit_toolkit.samples.range_trap import CodeRange


class OnnxModel:
    """An ONNX model, see `Model`.

    Attributes:
        proto: The model. It must not be changed.
    """

    engine: str = "ort"
    file_name = "model.onnx"
    has_fixed_sizes = False
    needs_feature = ""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto = proto

    @cached_property
    def content(self) -> bytes:
        return bytes(self.proto.SerializeToString(deterministic=True))

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata that the exporter stored in the file, such as `task`."""
        return {entry.key: entry.value for entry in self.proto.metadata_props}

    @property
    def size_bytes(self) -> int:
        """The size of the model's file in bytes. It is computed without serializing the model."""
        return int(self.proto.ByteSize())

    @property
    def options(self) -> Mapping[str, JsonValue]:
        return stated_options(self.proto)

    @property
    def size(self) -> ModelSize:
        """The operator set, the number of top-level nodes, and the number of values in initializers."""
        graph = self.proto.graph
        parameters = sum(math.prod(tensor.dims) for tensor in graph.initializer)
        return ModelSize(opset(self.proto), len(graph.node), parameters)

    def stored_tensors(self) -> Iterator[StoredTensor]:
        for tensor in self.proto.graph.initializer:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).name
            yield StoredTensor(tuple(tensor.dims), dtype, tensor.ByteSize())

    def specs(self, outputs: Sequence[str] | None = None) -> Specs:  # noqa: ARG002  # the graph has an order
        """Return the specs of the inputs and outputs in the order of the graph. `outputs` is ignored."""
        return tensor_specs(self.proto)

    def open(self, outputs: Sequence[str] | None = None, *, threads: int, rewrites: bool = True) -> Runner:
        optimise = rewrites or computes_in_integers(self.proto)
        session = session_for(self.proto, threads=threads, optimise=optimise)
        return partial(run_session, session, names=outputs)

    def open_session(self, *, threads: int) -> OrtSession:
        return open_ort(self.content, replace(ort_options(self.proto), threads=threads))

    def computes_in_codes(self) -> bool:
        return computes_in_integers(self.proto)

    def divides_by_inputs(self) -> bool:
        return onnx_divides_by_inputs(self.proto)

    def random_nodes(self) -> tuple[str, ...]:
        return tuple(f"{node.op_type} '{node.output[0]}'" for node in random_nodes(self.proto))

    def saturating_nodes(self) -> tuple[str, ...]:
        return find_saturating(self.proto)

    def input_code_ranges(self) -> dict[str, CodeRange]:
        return onnx_code_ranges(self.proto)

    def node_costs(self, dims: Mapping[str, int], *, float_outputs: bool = False) -> list[NodeCost]:
        bound = {name: dims.get(name, 1) for name in free_dims(tensor_specs(self.proto)[0])}
        return node_costs(self.proto, bound, float_outputs=float_outputs)

    def estimate_memory(self, dims: Mapping[str, int], *, blocked_layout: bool) -> MemoryEstimate | None:
        """Return the estimate for onnxruntime, or None for a model with control flow."""
        if any(map(bodies, self.proto.graph.node)):
            return None
        return estimate_peak_memory(self.proto, engine_bytes=0, dims=dims, blocked_layout=blocked_layout)
