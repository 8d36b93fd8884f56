"""Finds optimisations of onnxruntime that change a model's results, by running it with and without them.

Quantized models round differently with and without integer kernels, so their outputs cannot be compared.
Instead, the noise of the outputs relative to the float model is compared. Optimisations that are only applied
on other processors are not found.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx

from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.row_sets import row_axes
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.onnx_graph.ort_options import (
    WHOLE_OPTIMISER,
    disable_optimizers,
    disabled_optimizers,
    ort_options,
)
from edgekit_toolkit.onnx_graph.traversal import computes_in_integers
from edgekit_toolkit.openings.sessions import open_ort
from edgekit_toolkit.passes.parity import Outputs, Tolerance, compare
from edgekit_toolkit.samples.generated import Feeds, scaled

# The names that `disabled_optimizers` of onnxruntime 1.31 knows. Rewrites on which others build come first:
# of two that are wrong only together, the later one is named. With all of them off, a model stays unchanged.
# Source: onnxruntime, core/optimizer/graph_transformer_utils.cc, and the names in its library.
OPTIMIZERS: Final = tuple(
    """
    ConstantFolding ConstantFoldingDQ ConstantSharing CommonSubexpressionElimination EliminateIdentity
    EliminateSlice EliminateDropout UnsqueezeElimination ExpandElimination CastElimination
    CastChainElimination PreShapeNodeElimination NoopElimination DoubleQDQPairsRemover
    RemoveDuplicateCastTransformer FreeDimensionOverrideTransformer WhereDummyDq
    EnsureUniqueDQForNodeUnit TransposeOptimizer TransposeOptimizer_CPUExecutionProvider ReshapeFusion
    DivMulFusion FuseReluClip GemmSumFusion GemmTransposeFusion NotWhereFusion ConvAddFusion
    ConvMulFusion ConvBNFusion Pad_Fusion MatMul_BatchNormalization_Fusion LabelEncoderFusion
    MatMulAddFusion GeluFusionL1 LayerNormFusionL1 QDQPropagationTransformer WeightBiasQuantization
    ClipQuantRewrite ReluQuantRewrite QDQS8ToU8Transformer QDQSelectorActionTransformer
    DQMatMulNBitsFusion GemmActivationFusion MatMulIntegerToFloatFusion DynamicQuantizeMatMulFusion
    ConvActivationFusion GeluFusionL2 LayerNormFusionL2 SimplifiedLayerNormFusion AttentionFusion
    EmbedLayerNormFusion GatherSliceToSplitFusion GatherToSliceFusion MatmulTransposeFusion
    BiasGeluFusion GroupQueryAttentionFusion GroupQueryAttentionPreNormFusion GqaValueLayoutTransformer
    SkipLayerNormFusion BiasSkipLayerNormFusion FastGeluFusion QuickGeluFusion BiasSoftmaxFusion
    BiasDropoutFusion MatMulScaleFusion MatMulActivationFusion Avx2WeightS8ToU8Transformer
    MatMulNBitsFusion MatMulNBitsMlpFusion MatMulNBitsQkvFusion SliceConcatToSpaceToDepthFusion
    QDQFinalCleanupTransformer FuseFp16InitializerToFp32NodeTransformer NchwcTransformer NhwcTransformer
    ConvAddActivationFusion
    """.split()  # a table of words reads better than 76 lines
)

# onnxruntime's exact rewrites move a MobileNet by 8.5e-5 of the outputs' range (docs/adr/0011), and more for
# inputs beyond the samples' range. A wrong rewrite moves outputs by percents.
_ROUNDING: Final = Tolerance(range_fraction=1e-3)
# Inputs of the other sign, and beyond the samples' range.
_FACTORS: Final = (-1.0, 2.0)
# Without these rewrites, a form with codes has no integer kernels.
_CODES_REWRITES: Final = frozenset({*WHOLE_OPTIMISER, "QDQSelectorActionTransformer"})
# Integer kernels move the noise of a form by less than this. A wrong rewrite costs far more.
_NOISIER: Final = 4.0
# About as much as rounding inside a deep model moves its values.
_NUDGE: Final = 1e-5


@dataclass(frozen=True, slots=True)
class WrongRewrites:
    """The names of the onnxruntime optimisations to disable for a model, and the reason.

    `names` is `WHOLE_OPTIMISER` if all optimisations must be disabled.
    """

    names: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        """A warning for the report."""
        if self.names == WHOLE_OPTIMISER:
            return (
                f"onnxruntime's optimiser changes what this model computes ({self.reason}), and not by a"
                " rewrite that is known here: onnxruntime runs it without any optimisation, which is slower"
            )
        return (
            f"onnxruntime's rewrite {', '.join(self.names)} changes what this model computes ({self.reason}):"
            " it is off wherever onnxruntime runs this package"
        )


def find_wrong_rewrites(model: onnx.ModelProto, feeds: Sequence[Feeds]) -> WrongRewrites | None:
    """Return the optimisations of onnxruntime to disable for a float model, or None if there are none.

    A session with the options of a device is compared with a session without optimisations, on `feeds`, and
    on the first feed multiplied by -1 and by 2. Rounding differences are ignored. For quantized models the
    result is None. Use `find_wrong_in_codes` for them.

    Args:
        model: The model after all passes. Optimisations that its metadata disables are tested too.
        feeds: One or more inputs.

    Raises:
        BackendError: The model does not run on the feeds without optimisations.
    """
    if computes_in_integers(model):
        return None
    model = disable_optimizers(model, ())
    content, options = model.SerializeToString(), ort_options(model)
    plain = PlainRun(open_ort(content, replace(options, optimise=False)), feeds)

    def difference(disabled: Sequence[str]) -> str:
        return plain.difference(content, replace(options, disabled_optimizers=tuple(disabled)))

    return _search(difference)


def find_wrong_in_codes(
    model: onnx.ModelProto, noise: Callable[[onnx.ModelProto], float]
) -> WrongRewrites | None:
    """Return the optimisations of onnxruntime to disable for a quantized model, or None if there are none.

    The result is also None if the integer kernels would have to be disabled, because the quantized model
    would then be slower than the float model.

    Args:
        model: The quantized model. Optimisations that are disabled for its float model remain disabled.
        noise: Returns the noise of a model compared with the float model, or raises BackendError.

    Raises:
        BackendError: The model does not run, even without optimisations.
    """
    off_for_floats = disabled_optimizers(model)
    limit = _NOISIER * noise(disable_optimizers(model, WHOLE_OPTIMISER))

    def difference(disabled: Sequence[str]) -> str:
        try:
            is_noisier = noise(disable_optimizers(model, (*off_for_floats, *disabled))) > limit
        except BackendError as error:
            return str(error).splitlines()[0]
        return f"with over {_NOISIER:g} x the noise of codes" if is_noisier else ""

    wrong = _search(difference)
    return None if wrong is None or not _CODES_REWRITES.isdisjoint(wrong.names) else wrong


def _search(difference: Callable[[Sequence[str]], str]) -> WrongRewrites | None:
    """Return a minimal set of rewrites that explains the model's difference; None without a difference."""
    reason = difference(())
    if not reason:
        return None
    if difference(OPTIMIZERS):
        return WrongRewrites(WHOLE_OPTIMISER, reason)
    return WrongRewrites(_smallest(OPTIMIZERS, lambda names: not difference(names)), reason)


class PlainRun:
    """The outputs of a session without optimisations, with which other sessions are compared."""

    def __init__(self, session: OrtSession, feeds: Sequence[Feeds]) -> None:
        self._session = session
        self._cases = [*((feed, session.run(feed)) for feed in feeds), *self._beyond(feeds[0])]
        self._axes = row_axes([feed for feed, _ in self._cases], [outputs for _, outputs in self._cases])

    def _beyond(self, feed: Feeds) -> Iterator[tuple[Feeds, Outputs]]:
        for factor in _FACTORS:
            other = scaled(feed, factor)
            try:
                yield other, self._session.run(other)
            except BackendError:  # the model takes no such inputs
                continue

    def difference(self, content: bytes, options: OrtOptions) -> str:
        """Return a description of an error or of a difference in the outputs, or an empty string."""
        try:
            session = open_ort(content, options)
            for case in list(self._cases):
                feed, expected = case
                parity = compare(expected, session.run(feed), _ROUNDING, self._axes)
                if parity.ok:
                    continue
                if not self._is_fragile(feed, expected):
                    return parity.reason
                self._cases.remove(case)
        except BackendError as error:
            return str(error).splitlines()[0]
        return ""

    def _is_fragile(self, feed: Feeds, expected: Outputs) -> bool:
        """Whether rounding alone moves the outputs that far, as it does if classes are nearly tied."""
        signs = np.random.default_rng(0)
        nudged = {
            name: np.asarray(array * (1 + _NUDGE * signs.choice((-1.0, 1.0), array.shape)), array.dtype)
            if array.dtype.kind == "f"
            else array
            for name, array in feed.items()
        }
        return not compare(expected, self._session.run(nudged), _ROUNDING, self._axes).ok


def _smallest(names: Sequence[str], suffices: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """Return a subset of `names` from which none can be left out; the first ones are removed first.

    Source: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002), by halves.
    """
    suspects = tuple(names)
    size = len(suspects) // 2
    while size:
        start = 0
        while start < len(suspects):
            fewer = suspects[:start] + suspects[start + size :]
            if fewer and suffices(fewer):
                suspects = fewer
            else:
                start += size
        size //= 2
    return suspects
