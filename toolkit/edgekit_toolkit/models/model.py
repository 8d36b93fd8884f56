"""The interface of a model of any format to the packager; `OnnxModel` and `TfliteModel` implement it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.sessions import Session
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.costs.peak_memory import MemoryEstimate
from edgekit_toolkit.costs.target_model import NodeCost
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.range_trap import CodeRange

# Outputs of a model for one set of inputs, in the requested order.
Runner = Callable[[Feeds], list[NDArray[Any]]]
Specs: TypeAlias = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]


class ModelSize(NamedTuple):
    """Counts of a model's graph.

    Attributes:
        opset: ONNX operator set; None for other formats.
        nodes: number of nodes; in an ONNX model only nodes outside control flow.
        parameters: number of values in its constants.
    """

    opset: int | None
    nodes: int
    parameters: int


class StoredTensor(NamedTuple):
    """A constant of a model; `dtype` is numpy's name, or the format's name where numpy has none."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


class Model(Protocol):
    """An immutable model.

    Attributes:
        engine: name of the engine that runs it on this machine.
        file_name: name of its file in a package.
        has_fixed_sizes: whether the format has no free dimensions that can be bound when it runs.
        options: backend options that differ from the defaults, as a manifest states them.
        needs_feature: processor feature, as Linux names it, without which the engine would compute in other
            arithmetic. An emulated processor with this feature runs the model here. Empty if no feature is
            needed.
    """

    engine: str
    file_name: str
    has_fixed_sizes: bool
    needs_feature: str

    @property
    def content(self) -> bytes: ...  # see the class

    @property
    def size_bytes(self) -> int: ...  # see the class

    @property
    def options(self) -> Mapping[str, JsonValue]: ...  # see the class

    @property
    def size(self) -> ModelSize: ...  # see the class

    def stored_tensors(self) -> Iterator[StoredTensor]:
        """Yield the constants, without those inside control flow."""

    def specs(self, outputs: Sequence[str] | None = None) -> Specs:
        """Return the specs of inputs and outputs.

        If the format does not order its outputs, they are in the order of `outputs`.

        Raises:
            BackendError: the engine refuses the model.
        """

    def open(self, outputs: Sequence[str] | None = None, *, threads: int, rewrites: bool = True) -> Runner:
        """Return a function that runs the model here on inputs by name, and returns outputs as a list.

        Args:
            outputs: names of the outputs in the list; by default all in the model's order.
            threads: threads of one inference.
            rewrites: whether the engine's optimiser may run, if the engine offers that choice. A model that
                multiplies codes is always optimised, because its products are exact on every processor only
                then.

        Raises:
            BackendError: the engine refuses the model.
        """

    def open_session(self, *, threads: int) -> Session:
        """Return the session that a device would open.

        Raises:
            BackendError: the engine refuses the model.
        """

    def computes_in_codes(self) -> bool:
        """Whether the model computes with 8-bit codes anywhere, codes made at run time included."""

    def divides_by_inputs(self) -> bool:
        """Whether some integer division has a divisor that is not constant, or that holds 0 or -1."""

    def random_nodes(self) -> tuple[str, ...]:
        """Return, for each node whose values differ between runs, a text with its operator and output."""

    def saturating_nodes(self) -> tuple[str, ...]:
        """Return first outputs of nodes whose sums of 8-bit products saturate here and not on the target."""

    def input_code_ranges(self) -> dict[str, CodeRange]:
        """Return the range of each input that the model quantizes directly, by the input's name.

        Raises:
            BackendError: the engine refuses the model.
        """

    def node_costs(self, dims: Mapping[str, int], *, float_outputs: bool = False) -> list[NodeCost]:
        """Return the work of each kernel of one inference; for the arguments see `onnx_operators.node_costs`.

        Raises:
            ModelError: the work cannot be counted.
        """

    def estimate_memory(self, dims: Mapping[str, int], *, blocked_layout: bool) -> MemoryEstimate | None:
        """Estimate the memory that the model adds, with `engine_bytes` 0; return None if it must be measured.

        `dims`, `blocked_layout`: see `optimise_as_engine`.

        Raises:
            EdgekitError: the engine refuses the model, or a free dimension has no size.
        """
