"""A `.tflite` model for LiteRT. This module requires the LiteRT package."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, Final

from numpy.typing import NDArray

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
from edgekit_toolkit.costs.peak_memory import MemoryEstimate
from edgekit_toolkit.costs.target_model import NodeCost
from edgekit_toolkit.costs.tflite_operators import tflite_costs
from edgekit_toolkit.models.input_codes import tflite_code_ranges
from edgekit_toolkit.models.integer_division import tflite_divides_by_inputs
from edgekit_toolkit.models.model import ModelSize, Runner, Specs, StoredTensor
from edgekit_toolkit.openings.sessions import open_litert
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.range_trap import CodeRange
from edgekit_toolkit.tflite.flatbuffer import (
    TYPES,
    operator_name,
    operators,
    parsed,
    shape_of,
    stored_bytes,
    tensor_name,
)
from edgekit_toolkit.tflite.flatbuffer import Model as ParsedModel
from edgekit_toolkit.tflite.summary import DYNAMIC, TfliteSummary, summarise

_RANDOM: Final = frozenset({"MULTINOMIAL", "RANDOM_STANDARD_NORMAL", "RANDOM_UNIFORM"})


class TfliteModel:
    """A `.tflite` model, see `Model`."""

    engine: str = "litert"
    file_name = "model.tflite"
    has_fixed_sizes = True
    needs_feature: str = ""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.size_bytes = len(content)

    @property
    def options(self) -> Mapping[str, JsonValue]:
        """An empty dict, because LiteRT's default options suit every model."""
        return {}

    @cached_property
    def _parsed(self) -> ParsedModel:
        return parsed(self.content)

    @cached_property
    def summary(self) -> TfliteSummary:
        return summarise(self._parsed)

    @property
    def size(self) -> ModelSize:
        """The number of operators, and the number of values in constants."""
        model = self._parsed
        constants = [
            tensor for graph in model.subgraphs for tensor in graph.tensors if stored_bytes(model, tensor)
        ]
        parameters = sum(math.prod(shape_of(tensor)) for tensor in constants)
        return ModelSize(None, sum(1 for _ in operators(model)), parameters)

    def stored_tensors(self) -> Iterator[StoredTensor]:
        """Yield the constants that are not sparse. A shared buffer is yielded once."""
        model = self._parsed
        tensors = (tensor for graph in model.subgraphs for tensor in graph.tensors)
        for tensor in {tensor.buffer: tensor for tensor in tensors if tensor.sparsity is None}.values():
            if size_bytes := stored_bytes(model, tensor):
                yield StoredTensor(shape_of(tensor), TYPES[tensor.type].lower(), size_bytes)

    def specs(self, outputs: Sequence[str] | None = None) -> Specs:
        """Return the specs of the inputs, and the specs of the outputs in the order of `outputs`."""
        with closing(open_litert(self.content)) as session:
            named = {spec.name: spec for spec in session.outputs}
            return session.inputs, tuple(named[name] for name in outputs or named)

    def open(
        self,
        outputs: Sequence[str] | None = None,
        *,
        threads: int,
        rewrites: bool = True,  # noqa: ARG002  # LiteRT has none that change results
    ) -> Runner:
        session = self.open_session(threads=threads)

        def run(feeds: Feeds) -> list[NDArray[Any]]:
            values = session.run(feeds)
            return [values[name] for name in outputs or values]

        return run

    def open_session(self, *, threads: int) -> LiteRtSession:
        return open_litert(self.content, LiteRtOptions(threads=threads))

    def computes_in_codes(self) -> bool:
        dynamic = any(layer.precision == DYNAMIC for layer in self.summary.layers.values())
        return dynamic or self.summary.integer_operators > 0

    def divides_by_inputs(self) -> bool:
        return tflite_divides_by_inputs(self._parsed)

    def random_nodes(self) -> tuple[str, ...]:
        model = self._parsed
        return tuple(
            f"{operator_name(model, operator)} '{tensor_name(graph.tensors[operator.outputs[0]])}'"
            for graph, _, operator in operators(model)
            if operator_name(model, operator) in _RANDOM
        )

    def saturating_nodes(self) -> tuple[str, ...]:
        """Return an empty tuple, because LiteRT accumulates in 32 bits on every processor."""
        return ()

    def input_code_ranges(self) -> dict[str, CodeRange]:
        return tflite_code_ranges(self.content)

    def node_costs(self, dims: Mapping[str, int], *, float_outputs: bool = False) -> list[NodeCost]:  # noqa: ARG002  # the file states its outputs
        return tflite_costs(self._parsed, dims)

    def estimate_memory(self, dims: Mapping[str, int], *, blocked_layout: bool) -> MemoryEstimate | None:
        """Return None. LiteRT's memory depends little on the processor, so it is measured on this machine."""
