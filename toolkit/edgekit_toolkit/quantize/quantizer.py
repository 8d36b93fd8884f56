"""The interface of a quantizer to the search, and what quantizers of all formats do alike."""

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
    """A layer of the float model as a report lists it, with its operator type and bytes of constants."""

    label: str
    operator: str
    weight_bytes: int


class Quantizer(Protocol):
    """One float model, the forms that can be made of it, and the engine that runs them here.

    An implementation derives from this class.

    Attributes:
        model: the float model.
        threads: threads of one inference of the models.
        scheme: the quantized form that the target's engine runs fastest.
        wider: a form with wider codes, more accurate but slower on the target; None without one.
        labels: kind of form -> its name, for kinds without a plan, in the order in which forms are made.
    """

    model: Model
    threads: int
    scheme: Scheme
    wider: Scheme | None
    labels: Mapping[str, str]

    def source_form(self) -> tuple[str, Model]:
        """Return the form in the source's precision: its name, such as `float32`, and its model."""

    def why_no_forms(self) -> str | None:
        """Return why the source form is the only one of this model; None if others may be made."""

    def why_no_static_int8(self) -> str | None:
        """Return why no static int8 form is made of this model; None if some may be."""

    def float_layers(self) -> dict[str, FloatLayer]:
        """Return the layers of the float model, by the name of their first output."""

    def stored_layers(self, form: Form, model: Model) -> dict[str, StoredLayer]:
        """Return how each layer is stored in the form's model, by its first output in the float model.

        A layer that the form leaves alone has the float type of the source.
        """

    def softmax_axes(self) -> Sequence[int | None]:
        """Return for each output the axis of the softmax that makes it; None for an output without one."""

    def output_parts(self, feeds: Feeds) -> Sequence[Parts | None]:
        """Return for each output which tensor each value comes from, such as boxes or scores.

        An array numbers the joined tensors from 0, int64 of the output's shape for `feeds`. None if the
        output joins no tensors, or if the tensors are unknown.
        """

    def build(self, form: Form) -> Model | None:
        """Return the model in this form, or None if it has no layer that the form changes.

        Raises:
            EdgekitError: the form's model cannot be made.
        """

    def wrong_rewrites(self, form: Form, noise: Callable[[Model], float]) -> WrongRewrites | None:
        """Return the engine's rewrites that make the outputs of a static int8 form wrong; None if none do.

        Args:
            form: form that the engine refuses, or that is noisy.
            noise: measures the noise of a model, as a ratio of powers.

        Raises:
            BackendError: the engine does not run the form without its rewrites either.
        """

    def kernels(self, *, elementwise: bool) -> tuple[str, ...]:
        """Return the operators that can become integer kernels, in order, by the name of their first output.

        `elementwise`: whether to list all such operators, or only matrix products.
        """

    def operator_nodes(self) -> list[OperatorNode]:
        """Return the operators of the float model, in an order in which they can run."""

    def tail(self, kernels: Sequence[str]) -> frozenset[str]:
        """Return the operators in `kernels` that no matrix product follows, such as the decoding of boxes."""
        return tail_kernels(self.operator_nodes(), kernels)

    def unlike_joins(self, kernels: Sequence[str], ranges: Ranges) -> frozenset[str]:
        """Return the operators in `kernels` that join tensors whose ranges are too unlike for one scale."""
        return unlike_joins(self.operator_nodes(), kernels, ranges)

    def touched(self, kernels: Sequence[str]) -> list[str]:
        """Return the names of the activations whose range a plan with these kernels needs, sorted."""

    def ranges(
        self,
        kernels: Sequence[str],
        samples: Callable[[], Iterator[Feeds]],
        progress: Callable[[], None],
    ) -> dict[str, Range]:
        """Run the samples; return the range of each activation of `touched`, by name. See `ranges.gather`.

        Raises:
            DataError: there are no samples.
            BackendError: the model does not run on a sample.
        """

    def histograms(
        self, kernels: Sequence[str], samples: Sequence[Feeds], ranges: Mapping[str, tuple[float, float]]
    ) -> dict[str, Histogram]:
        """Run the samples; return a histogram of each activation in `ranges`, by name.

        `ranges`: (low, high), the ends of the histogram.

        Raises:
            BackendError: the model does not run on a sample.
        """

    def int8_layers(self) -> Sequence[str]:
        """Return the layers that `int8-weights` can change, by the name of their first output, in order."""

    def equalize(self, ranges: Mapping[str, Range]) -> tuple[Factors, dict[str, Range]]:
        """Return factors that equalize channels, and `ranges` after equalization; no factors if none help."""

    def writer(self, factors: Factors) -> Callable[[Plan], Model]:
        """Return a function that makes models of plans with these factors, to measure but not to package."""

    def block_noises(
        self, plan: Plan, factors: Factors, fidelity: Fidelity, expired: Callable[[], bool]
    ) -> Iterator[BlockNoise]:
        """Yield the noise that each block of the plan adds if only this block is quantized, measured alone.

        Args:
            plan: kernels and ranges.
            factors: channel factors of equalized tensors.
            fidelity: samples, and the weights of errors.
            expired: returns True when the work must end; blocks not measured by then are not yielded.
        """
        parts = blocks(self.operator_nodes(), plan.kernels)
        return measure_blocks(self.writer(factors), plan, parts, fidelity, expired)

    def weight_costs(
        self, layers: Sequence[str], fidelity: Fidelity, expired: Callable[[], bool]
    ) -> Iterator[LayerCost]:
        """Yield noise and saved bytes for int8 weights in one of `layers` at a time; see `block_noises`."""
        return measure_weights(self.build, layers, fidelity, expired)
