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
    """Options of a build, as in `backend.options` of a manifest.

    Attributes:
        precisions: The engines to build and measure. None selects int8 and fp16 for a quantized model, else
            fp16 and fp32. `int8` builds the model as it is. fp16 and fp32 remove the quantization.
        shapes: A dict from input name to the smallest, usual and largest shape, for inputs with free
            dimensions. If only the first dimension is free, the default is a batch of 1 to 8.
        workspace_bytes: The maximum GPU memory of a build, or None for no limit.
        timing_cache: The path of an artifact with TensorRT's timing cache, or None.
        threads: The number of threads of the fallback session.

    Raises:
        ValueError: `precisions` is empty, or the shapes of an input are not in ascending order.
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
        """Return the options on which the engine depends: `precisions`, `shapes` and `workspace_bytes`."""
        stated = to_plain(self)
        return {name: stated[name] for name in ("precisions", "shapes", "workspace_bytes")}


def _is_range(shapes: Shapes) -> bool:
    if len(shapes) != 3 or len({len(shape) for shape in shapes}) != 1:
        return False
    return all(1 <= low <= usual <= high for low, usual, high in zip(*shapes, strict=True))
