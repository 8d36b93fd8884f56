"""Options of the TensorRT backend."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Final, Literal, get_args

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import Range, to_plain
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.engines import MAX_THREADS

Precision = Literal["int8", "fp16", "fp32"]
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TensorRtOptions:
    """Options of a build; the `backend.options` of a manifest.

    Attributes:
        precisions: engines to build and measure, out of `PRECISIONS`. None builds int8 and fp16 for a
            quantized model, else fp16 and fp32. `int8` is the model as it is; fp16 and fp32 remove its
            quantization.
        shapes: input name -> smallest, usual and largest shape, for inputs with free dimensions; if only the
            first is free, batches of 1 to 8 are the default.
        workspace_bytes: most GPU memory for building, or None for TensorRT's choice (all of it).
        timing_cache: path of an artifact with TensorRT's timing cache, or None.
        threads: threads of the fallback session; the engine does not use them.

    Raises:
        ValueError: `precisions` is empty, or a range of shapes is not in ascending order.
    """

    precisions: tuple[Precision, ...] | None = None
    shapes: Mapping[str, Shapes] = field(default_factory=dict, hash=False)
    workspace_bytes: Annotated[int | None, Range(1, 1 << 50)] = None
    timing_cache: str | None = None
    threads: Annotated[int | None, Range(1, MAX_THREADS)] = None

    def __post_init__(self) -> None:
        if self.precisions == ():
            raise ValueError(f"precisions is empty, expected null or some of {PRECISIONS}")
        if not all(map(_is_range, self.shapes.values())):
            raise ValueError(
                f"shapes is {self.shapes!r}, expected for each input three shapes of one rank with"
                " 1 <= smallest <= usual <= largest"
            )

    def to_json(self) -> dict[str, JsonValue]:
        """Return `precisions`, `shapes` and `workspace_bytes`, on which the engine depends."""
        stated = to_plain(self)
        return {name: stated[name] for name in ("precisions", "shapes", "workspace_bytes")}


def _is_range(shapes: Shapes) -> bool:
    if len(shapes) != 3 or len({len(shape) for shape in shapes}) != 1:
        return False
    return all(1 <= low <= usual <= high for low, usual, high in zip(*shapes, strict=True))
