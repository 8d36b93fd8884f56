"""The windows of convolutions and pooling, and their padding in ONNX and TFLite."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.refusal import RefusedError

Pads: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The windows of a convolution or pooling. Each attribute has one entry per spatial axis.

    Attributes:
        kernel: The window size without dilation.
        outputs: The number of windows.
        pads: The number of elements to add before and after the input, so that all windows fit.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    outputs: tuple[int, ...]
    pads: Pads

    @property
    def spans(self) -> tuple[int, ...]:
        """The window size with dilation."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def same(self) -> Pads:
        """The padding before and after each axis with TFLite's option SAME."""
        result = []
        for size, span, stride in zip(self.sizes, self.spans, self.strides, strict=True):
            total = max((-(-size // stride) - 1) * stride + span - size, 0)
            result.append((total // 2, total - total // 2))
        return tuple(result)

    @property
    def padding(self) -> str | None:
        """The TFLite option `SAME` or `VALID` that equals `pads`, or None if neither does."""
        if not any(before or after for before, after in self.pads):
            return "VALID"
        alike = tuple(-(-size // stride) for size, stride in zip(self.sizes, self.strides, strict=True))
        return "SAME" if self.pads == self.same and alike == self.outputs else None

    def counts(self, attributes: "WindowAttributes", *, counts_padding: bool) -> NDArray[np.float64]:
        """Return the number of elements by which ONNX divides the sum of each window, float64 [outputs...].

        With `ceil_mode`, windows can reach beyond the padding of the model. Elements there are never counted.
        """
        stated = attributes.pads or ([] if attributes.auto_pad.startswith("SAME") else [0])
        result = np.ones(())
        for axis, size in enumerate(self.sizes):
            before, after = self.pads[axis]
            # A signal is an image of one row here, and the model states the padding of its one axis.
            after = stated[axis - len(self.sizes)] if len(stated) > 1 else 0 if stated else after
            low, high = (-before, size + after) if counts_padding else (0, size)
            begins = np.arange(self.outputs[axis])[:, None] * self.strides[axis] - before
            positions = begins + np.arange(self.kernel[axis]) * self.dilations[axis]
            result = np.multiply.outer(result, ((positions >= low) & (positions < high)).sum(1))
        return result


def windows(
    sizes: Sequence[int], kernel: Sequence[int], attributes: "WindowAttributes", outputs: Sequence[int]
) -> Windows:
    """Return the windows of an ONNX node, with the padding converted to numbers of elements.

    Args:
        sizes: The spatial size of the input.
        kernel: The window size without dilation.
        attributes: The attributes of the node.
        outputs: The spatial size of the output by shape inference. With `ceil_mode`, the last window may end
            beyond the padding of the model.

    Raises:
        RefusedError: The padding is negative, or `outputs` includes windows that the ONNX standard does not
            have.
    """
    rank = len(sizes)
    strides = tuple(attributes.strides or [1] * rank)
    dilations = tuple(attributes.dilations or [1] * rank)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = []
    for axis in range(rank):
        reach = (outputs[axis] - 1) * strides[axis] + spans[axis]  # elements that the windows cover
        if attributes.auto_pad in {"SAME_UPPER", "SAME_LOWER"}:
            standard = -(-sizes[axis] // strides[axis])
            if outputs[axis] != standard:
                raise RefusedError(
                    f"its result is inferred to have {outputs[axis]} elements along axis {axis + 2}, and the"
                    f" ONNX standard has {standard} for auto_pad; export it with ceil_mode=0"
                )
            total = max(reach - sizes[axis], 0)
            before = total // 2 if attributes.auto_pad == "SAME_UPPER" else total - total // 2
            pads.append((before, total - before))
        else:
            before = attributes.pads[axis] if attributes.pads else 0
            after = attributes.pads[axis + rank] if attributes.pads else 0
            if before < 0 or after < 0:
                raise RefusedError(f"pads {attributes.pads} are negative")
            whole = (sizes[axis] + before + after - spans[axis]) // strides[axis] + 1
            if outputs[axis] > whole and whole * strides[axis] >= sizes[axis] + before:
                raise RefusedError(
                    f"its result is inferred to have {outputs[axis]} elements along axis {axis + 2}, of which"
                    " the last would see nothing but padding; export it with ceil_mode=0"
                )
            # Padding that no window reaches is left out, so that more windows match SAME or VALID.
            pads.append((before, max(reach - sizes[axis] - before, 0)))
    return Windows(
        sizes=tuple(sizes),
        kernel=tuple(kernel),
        strides=strides,
        dilations=dilations,
        outputs=tuple(outputs),
        pads=tuple(pads),
    )


@dataclass(frozen=True, slots=True)
class WindowAttributes:
    """The attributes of an ONNX node that determine its windows. Missing attributes are None."""

    strides: Sequence[int] | None
    dilations: Sequence[int] | None
    pads: Sequence[int] | None
    auto_pad: str
