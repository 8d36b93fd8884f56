"""The interface of a quantizer to the search: one implementation for ONNX, one for LiteRT."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.models.model import Model
from edgekit_toolkit.onnx_graph.traversal import StoredLayer
from edgekit_toolkit.passes.wrong_rewrites import WrongRewrites
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.plan import Plan, Ranges
from edgekit_toolkit.quantize.ranges import Histogram, Range
from edgekit_toolkit.quantize.scheme import Scheme
from edgekit_toolkit.quantize.sensitivity import BlockNoise, Fidelity, LayerCost, Parts
from edgekit_toolkit.samples.generated import Feeds

Factors = Mapping[str, NDArray[np.float32]]


class FloatLayer(NamedTuple):
    """A layer of the float model, as a report lists it."""

    label: str
    operator: str
    weight_bytes: int


class Quantizer(Protocol):
    """One float model, the forms that can be made of it, and the engine that runs them here.

    Attributes:
        threads: threads of one inference of the models.
        scheme: the quantized form that the target's engine runs fastest.
        wider: a form with more bits, more accurate and slower there; None if there is none.
        labels: kinds of forms without a plan, in the order in which they are made, with their names.
    """

    @property
    def model(self) -> Model: ...  # see the class

    @property
    def threads(self) -> int: ...  # see the class

    @property
    def scheme(self) -> Scheme: ...  # see the class

    @property
    def wider(self) -> Scheme | None: ...  # see the class

    @property
    def labels(self) -> Mapping[str, str]: ...  # see the class

    def source_form(self) -> tuple[str, Model]:
        """Return name and model of the form that keeps the precision of the source."""

    def why_no_forms(self) -> str | None:
        """Return why no other form is made of this model; None if some may be."""

    def why_no_static_int8(self) -> str | None:
        """Return why no static int8 form is made of it; None if some may be."""

    def float_layers(self) -> dict[str, FloatLayer]:
        """Return the layers of the float model, by the name of their first output."""

    def stored_layers(self, form: Form, model: Model) -> dict[str, StoredLayer]:
        """Return how each layer is stored in the form's model, by its first output in the float model.

        A layer that the form leaves alone has the float type of the source.
        """

    def softmax_axes(self) -> Sequence[int | None]:
        """Return for each output the axis of the softmax that makes it, or None."""

    def output_parts(self, feeds: Feeds) -> Sequence[Parts | None]:
        """Return for each output the index of the source tensor of each value, int64 [values].

        None if all values come from one tensor, or if that is not known.
        """

    def build(self, form: Form) -> Model | None:
        """Return the form's model, or None if the model has no layer that the form changes.

        Raises:
            EdgekitError: it cannot be made.
        """

    def wrong_rewrites(self, form: Form, noise: Callable[[Model], float]) -> WrongRewrites | None:
        """Return the engine's rewrites that are wrong for a static form, or None.

        Args:
            form: form that the engine refuses, or that is noisy.
            noise: measures the noise of a model.

        Raises:
            BackendError: the engine does not run the form without its rewrites either.
        """

    def kernels(self, *, elementwise: bool) -> tuple[str, ...]:
        """Return the operators that can become integer kernels, in order: all, or only matrix products."""

    def tail(self, kernels: Sequence[str]) -> frozenset[str]:
        """Return the kernels that no matrix product follows: the decoding of boxes and scores."""

    def unlike_joins(self, kernels: Sequence[str], ranges: Ranges) -> frozenset[str]:
        """Return the kernels that join tensors of ranges too unlike for one scale."""

    def touched(self, kernels: Sequence[str]) -> list[str]:
        """Return the activations whose range a plan with these kernels needs."""

    def ranges(
        self,
        kernels: Sequence[str],
        samples: Callable[[], Iterator[Feeds]],
        progress: Callable[[], None],
    ) -> dict[str, Range]:
        """Return the extremes of the activations that a plan with these kernels needs; see `ranges.gather`.

        Raises:
            DataError: there are no samples.
            BackendError: the model does not run on a sample.
        """

    def histograms(
        self, kernels: Sequence[str], samples: Sequence[Feeds], ranges: Mapping[str, tuple[float, float]]
    ) -> dict[str, Histogram]:
        """Return histograms of these activations over their ranges, from a few samples.

        Raises:
            BackendError: the model does not run on a sample.
        """

    def int8_layers(self) -> Sequence[str]:
        """Return the layers that `int8-weights` can change, in order, by their first output."""

    def equalize(self, ranges: Mapping[str, Range]) -> tuple[Factors, dict[str, Range]]:
        """Return factors that equalize channels, and the ranges with them; no factors if none help."""

    def writer(self, factors: Factors) -> Callable[[Plan], Model]:
        """Return a call that writes a plan for the model with these factors, only for measurements."""

    def block_noises(
        self, plan: Plan, factors: Factors, fidelity: Fidelity, expired: Callable[[], bool]
    ) -> Iterator[BlockNoise]:
        """Yield the noise that each block of the plan adds if only this block is quantized.

        Args:
            plan: kernels and ranges.
            factors: channel factors of equalized tensors.
            fidelity: samples, and the weights of errors.
            expired: returns whether the work must end. Blocks that are not yielded are unknown.
        """

    def weight_costs(
        self, layers: Sequence[str], fidelity: Fidelity, expired: Callable[[], bool]
    ) -> Iterator[LayerCost]:
        """Yield noise and saving of int8 weights in each layer alone; see `block_noises`."""
