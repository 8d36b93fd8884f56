"""The interface of a quantizer to the search, and the code that is common to all formats."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.models.model import Model
from edgekit_toolkit.onnx_graph.traversal import StoredLayer
from edgekit_toolkit.passes.wrong_rewrites import WrongRewrites
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.precise import OperatorNode, Ranges, blocks, tail_kernels, unlike_joins
from edgekit_toolkit.quantize.ranges import Histogram, Range
from edgekit_toolkit.quantize.scheme import Scheme
from edgekit_toolkit.quantize.sensitivity import (
    BlockNoise,
    Fidelity,
    LayerCost,
    Parts,
    measure_blocks,
    measure_weights,
)
from edgekit_toolkit.samples.generated import Feeds

Factors = Mapping[str, NDArray[np.float32]]


class FloatLayer(NamedTuple):
    """A layer of the float model for reports, with its operator and the size of its constants."""

    label: str
    operator: str
    weight_bytes: int


class Quantizer(Protocol):
    """Builds the forms of a float model for one engine.

    Implementations derive from this class.

    Attributes:
        model: The float model.
        threads: The number of threads of one inference.
        scheme: The quantization scheme that is fastest in the engine of the target.
        wider: A scheme with more bits that is more accurate but slower, or None.
        labels: A dict from the kinds of forms without a plan to their names. The search builds them in this
            order.
    """

    model: Model
    threads: int
    scheme: Scheme
    wider: Scheme | None
    labels: Mapping[str, str]

    def source_form(self) -> tuple[str, Model]:
        """Return the label, such as `float32`, and the model in the precision of the source."""

    def why_no_forms(self) -> str | None:
        """Return why only the source form can be built, or None if other forms can be built."""

    def why_no_static_int8(self) -> str | None:
        """Return why static int8 forms cannot be built, or None if they can."""

    def float_layers(self) -> dict[str, FloatLayer]:
        """Return the layers of the float model, by the first output of the layer."""

    def stored_layers(self, form: Form, model: Model) -> dict[str, StoredLayer]:
        """Return the storage of each layer in the model of a form.

        The keys are the first outputs of the layers in the float model. Layers that the form does not change
        have the float type of the source.
        """

    def softmax_axes(self) -> Sequence[int | None]:
        """Return the axis of the softmax that computes each output, or None for an output without softmax."""

    def output_parts(self, feeds: Feeds) -> Sequence[Parts | None]:
        """Return the origin of each value in outputs that join several tensors, such as boxes and scores.

        The joined tensors are numbered from 0. For each output, the result is an int64 array with the shape
        of the output for `feeds`, which contains the tensor number of each value. It is None for an output
        that joins no tensors or cannot be traced.
        """

    def build(self, form: Form) -> Model | None:
        """Return the model in this form, or None if the form changes no layer.

        Raises:
            EdgekitError: The model cannot be built.
        """

    def wrong_rewrites(self, form: Form, noise: Callable[[Model], float]) -> WrongRewrites | None:
        """Return the engine's optimisations that make the outputs of a static int8 form wrong, or None.

        Args:
            form: A form that the engine refuses or that is noisy.
            noise: Measures the noise of a model as a ratio of powers.

        Raises:
            BackendError: The engine does not run the form, even without optimisations.
        """

    def kernels(self, *, elementwise: bool) -> tuple[str, ...]:
        """Return the first outputs of the operators that integer kernels can run, in order.

        If `elementwise` is False, only matrix products are returned.
        """

    def operator_nodes(self) -> list[OperatorNode]:
        """Return the operators of the float model in topological order."""

    def tail(self, kernels: Sequence[str]) -> frozenset[str]:
        """Return the operators in `kernels` that no matrix product follows, such as the decoding of boxes."""
        return tail_kernels(self.operator_nodes(), kernels)

    def unlike_joins(self, kernels: Sequence[str], ranges: Ranges) -> frozenset[str]:
        """Return the concatenations in `kernels` whose input ranges differ too much for one scale."""
        return unlike_joins(self.operator_nodes(), kernels, ranges)

    def touched(self, kernels: Sequence[str]) -> list[str]:
        """Return the sorted names of the float activations that the `kernels` read or write."""

    def ranges(
        self,
        kernels: Sequence[str],
        samples: Callable[[], Iterator[Feeds]],
        progress: Callable[[], None],
    ) -> dict[str, Range]:
        """Run the samples and return a dict from the activations in `touched` to their ranges.

        Activations without a range are left out, see `ranges.gather`.

        Raises:
            DataError: There are no samples.
            BackendError: The model does not run on a sample.
        """

    def histograms(
        self, kernels: Sequence[str], samples: Sequence[Feeds], ranges: Mapping[str, tuple[float, float]]
    ) -> dict[str, Histogram]:
        """Run the samples and return a dict from the activations in `ranges` to their histograms.

        `ranges` contains the limits (low, high) of the histograms.

        Raises:
            BackendError: The model does not run on a sample.
        """

    def int8_layers(self) -> Sequence[str]:
        """Return the first outputs of the layers that can have int8 weights, in order."""

    def equalize(self, ranges: Mapping[str, Range]) -> tuple[Factors, dict[str, Range]]:
        """Return the channel factors of an equalization, and the ranges after it. There may be no factors."""

    def writer(self, factors: Factors) -> Callable[[Plan], Model]:
        """Return a function that quantizes the model by a plan, for measurements of noise.

        `factors` are the channel factors of equalized tensors.
        """

    def block_noises(
        self, plan: Plan, factors: Factors, fidelity: Fidelity, expired: Callable[[], bool]
    ) -> Iterator[BlockNoise]:
        """Yield the noise of each block of the plan if only this block is quantized.

        Args:
            plan: The kernels and ranges.
            factors: The channel factors of equalized tensors.
            fidelity: The samples and the weights of output errors.
            expired: Returns True when the search limit is reached. The remaining blocks are then not yielded.
        """
        parts = blocks(self.operator_nodes(), plan.kernels)
        return measure_blocks(self.writer(factors), plan, parts, fidelity, expired)

    def weight_costs(
        self, layers: Sequence[str], fidelity: Fidelity, expired: Callable[[], bool]
    ) -> Iterator[LayerCost]:
        """Yield the noise and saved bytes for each layer if only that layer has int8 weights.

        See `block_noises` for `fidelity` and `expired`.
        """
        return measure_weights(self.build, layers, fidelity, expired)
