"""Options of the TensorRT backend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions.options import parse_options, require_count
from edgekit_runtime.system.machine import MAX_THREADS

PRECISIONS: Final = ("int8", "fp16", "fp32")


@dataclass(frozen=True, slots=True)
class TensorRtOptions:
    """How an engine is built; the `backend.options` of a manifest.

    Attributes:
        precisions: which engines to build and measure, out of `PRECISIONS`; None for int8 and fp16 of a
            quantized model, fp16 and fp32 of another. `int8` is the model as it is; the others leave its
            quantization of activations out.
        shapes: input name -> smallest, usual and largest shape, for inputs with free dimensions; where only
            the first is free, batches of 1 to 8 are the default.
        workspace_bytes: most GPU memory for building, or None for TensorRT's choice (all of it).
        timing_cache: path of an artifact with TensorRT's timing cache, or None.
        threads: unused here; the session that runs until the engine is ready takes it.

    Raises:
        BackendError: a field has the wrong type or value.
    """

    precisions: Sequence[str] | None = None
    shapes: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict, hash=False)
    workspace_bytes: int | None = None
    timing_cache: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        require_count("tensorrt", "workspace_bytes", self.workspace_bytes)
        require_count("tensorrt", "threads", self.threads, MAX_THREADS)
        given = self.precisions
        if given is not None and not (
            isinstance(given, (list, tuple)) and given and all(name in PRECISIONS for name in given)
        ):
            raise BackendError(
                f"backend 'tensorrt': precisions is {given!r}, expected null or a list out of {PRECISIONS}"
            )
        if not isinstance(self.shapes, Mapping) or not all(map(_is_range, self.shapes.values())):
            raise BackendError(
                f"backend 'tensorrt': shapes is {self.shapes!r}, expected for each input three shapes of one"
                " rank with 1 <= smallest <= usual <= largest"
            )
        if self.timing_cache is not None and not isinstance(self.timing_cache, str):
            raise BackendError(
                f"backend 'tensorrt': timing_cache is {self.timing_cache!r}, expected null or an artifact"
            )

    @classmethod
    def from_json(cls, options: Mapping[str, JsonValue], threads: int | None = None) -> "TensorRtOptions":
        """Return the options in a manifest.

        Raises:
            BackendError: an option is unknown or wrong.
        """
        return parse_options(cls, "tensorrt", options, threads)

    def to_json(self) -> dict[str, JsonValue]:
        """Return what decides how the engine comes out."""
        shapes: dict[str, JsonValue] = {
            name: [list(shape) for shape in shapes] for name, shapes in self.shapes.items()
        }
        precisions: JsonValue = None if self.precisions is None else list(self.precisions)
        return {"precisions": precisions, "shapes": shapes, "workspace_bytes": self.workspace_bytes}


def _is_range(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        return False
    if not all(isinstance(shape, (list, tuple)) and len(shape) == len(value[0]) for shape in value):
        return False
    sizes = list(zip(*value, strict=True))
    counts = all(isinstance(size, int) and not isinstance(size, bool) for row in sizes for size in row)
    return counts and all(1 <= low <= usual <= high for low, usual, high in sizes)
