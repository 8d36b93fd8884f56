"""Windows that slide over an image, and their padding in ONNX and in TFLite. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.refusal import RefusedError

Pads: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The windows of a convolution or pooling, one entry for each spatial axis.

    Attributes:
        kernel: sizes of a window, without dilation.
        outputs: how many windows there are.
        pads: numbers of elements added before and after the input, enough for all windows.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    outputs: tuple[int, ...]
    pads: Pads

    @property
    def spans(self) -> tuple[int, ...]:
        """Sizes of a window with its dilation."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def same(self) -> Pads:
        """How much TFLite's option SAME pads, before and after each axis."""
        result = []
        for size, span, stride in zip(self.sizes, self.spans, self.strides, strict=True):
            total = max((-(-size // stride) - 1) * stride + span - size, 0)
            result.append((total // 2, total - total // 2))
        return tuple(result)

    @property
    def padding(self) -> str | None:
        """`SAME` or `VALID` if that TFLite option pads as `pads`; None if the input must be padded first."""
        if not any(before or after for before, after in self.pads):
            return "VALID"
        alike = tuple(-(-size // stride) for size, stride in zip(self.sizes, self.strides, strict=True))
        return "SAME" if self.pads == self.same and alike == self.outputs else None

    def counts(self, attributes: "WindowAttributes", *, counts_padding: bool) -> NDArray[np.float64]:
        """Return the number of elements by which ONNX divides each window's sum, float64 [outputs...].

        Elements that only `ceil_mode` adds, beyond the padding that the model states, never count.
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
    """Return the windows of an ONNX node, with their padding as numbers of elements.

    `kernel` is without dilation. `outputs`: spatial sizes of the result, as shape inference found them; with
    `ceil_mode` the last window may end beyond the padding that the model states.

    Raises:
        RefusedError: the padding is negative; or `outputs` count more windows than the ONNX standard and
            onnxruntime, which have none that begins after the image.
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
    """The attributes of an ONNX node that determine its windows; None for a missing attribute."""

    strides: Sequence[int] | None
    dilations: Sequence[int] | None
    pads: Sequence[int] | None
    auto_pad: str
