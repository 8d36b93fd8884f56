"""The interface of models that can be packaged. `OnnxModel` and `TfliteModel` implement it."""

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
    """The size of a model's graph.

    Attributes:
        opset: The version of the ONNX operator set, or None for other formats.
        nodes: The number of nodes. In an ONNX model, nodes inside control flow are not counted.
        parameters: The number of values in all constants.
    """

    opset: int | None
    nodes: int
    parameters: int


class StoredTensor(NamedTuple):
    """A constant of a model. `dtype` is the name of the numpy type, or else the format's name of the type."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


class Model(Protocol):
    """An immutable model.

    Attributes:
        engine: The name of the engine that runs the model on this machine.
        file_name: The name of the model's file in a package.
        has_fixed_sizes: Whether the format has no free dimensions that can be set when the model is opened.
        options: The backend options that differ from the defaults, as in a manifest.
        needs_feature: The Linux name of a processor feature that the arithmetic of the model needs, such as
            `asimdhp`. The model then runs on an emulated processor on this machine. Empty if the model needs
            no such feature.
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
        """Yield the constants outside control flow."""

    def specs(self, outputs: Sequence[str] | None = None) -> Specs:
        """Return the specs of the inputs and of the outputs.

        Args:
            outputs: The order of the outputs. It is only used if the format does not define an order.

        Raises:
            BackendError: The engine refuses the model.
        """

    def open(self, outputs: Sequence[str] | None = None, *, threads: int, rewrites: bool = True) -> Runner:
        """Return a function that runs the model on a dict of inputs and returns a list of outputs.

        Args:
            outputs: The names of the outputs to return, or None for all outputs in the order of the model.
            threads: The number of threads of one inference.
            rewrites: Whether the engine may optimise the graph. Models with integer arithmetic are always
                optimised. Otherwise, their products would not be exact on all processors.

        Raises:
            BackendError: The engine refuses the model.
        """

    def open_session(self, *, threads: int) -> Session:
        """Open the model in the same kind of session as on a device.

        Raises:
            BackendError: The engine refuses the model.
        """

    def computes_in_codes(self) -> bool:
        """Return whether any operator computes with 8-bit codes, including codes computed at run time."""

    def divides_by_inputs(self) -> bool:
        """Return whether the divisor of any integer division may be 0 or -1."""

    def random_nodes(self) -> tuple[str, ...]:
        """Return the operator and the output name of each node that produces random values."""

    def saturating_nodes(self) -> tuple[str, ...]:
        """Return the first output of each node whose 8-bit products saturate here but not on the target."""

    def input_code_ranges(self) -> dict[str, CodeRange]:
        """Return the range of each input that the model quantizes directly, by the name of the input.

        Raises:
            BackendError: The engine refuses the model.
        """

    def node_costs(self, dims: Mapping[str, int], *, float_outputs: bool = False) -> list[NodeCost]:
        """Return the cost of each kernel of one inference, see `onnx_operators.node_costs`.

        Raises:
            ModelError: The cost of an operator cannot be computed.
        """

    def estimate_memory(self, dims: Mapping[str, int], *, blocked_layout: bool) -> MemoryEstimate | None:
        """Estimate the memory of the model without the engine, or return None if it must be measured.

        `engine_bytes` of the estimate is 0.
        For the arguments see `optimise_as_engine`.

        Raises:
            EdgekitError: The engine refuses the model, or a free dimension has no size.
        """
