"""A `.tflite` model that LiteRT computes in float16 if the processor supports it."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from edgekit_toolkit.models.model import Runner
from edgekit_toolkit.models.tflite import TfliteModel
from edgekit_toolkit.openings.emulated_processor import EMULATED
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.tflite.flatbuffer import pack, parse

_ENTRY: Final = "reduced_precision_support"
_VALUE: Final = b"fp16accfp16"  # products and sums in half precision


class HalfPrecisionModel(TfliteModel):
    """A float model that LiteRT may compute in float16, see `Model`.

    A processor without float16 arithmetic computes the same file in float32. So `open` always runs the model
    on an emulated processor that has float16 arithmetic.
    """

    needs_feature = "asimdhp"

    @classmethod
    def of(cls, floats: bytes) -> "HalfPrecisionModel":
        """Return a copy of a float `.tflite` file with the metadata that allows LiteRT to use float16."""
        model = parse(floats)
        buffer, entry = schema.BufferT(), schema.MetadataT()
        buffer.data = np.frombuffer(_VALUE, np.uint8)
        entry.name, entry.buffer = _ENTRY, len(model.buffers)
        model.buffers.append(buffer)
        model.metadata = [*(model.metadata or []), entry]
        return cls(pack(model))

    def open(
        self,
        outputs: Sequence[str] | None = None,
        *,
        threads: int,  # noqa: ARG002  # they change no result
        rewrites: bool = True,  # noqa: ARG002  # LiteRT has none that change results
    ) -> Runner:
        names = [spec.name for spec in self.specs()[1]]

        def run(feeds: Feeds) -> list[NDArray[Any]]:
            values = dict(zip(names, EMULATED.run(self.engine, self.content, feeds), strict=True))
            return [values[name] for name in outputs or names]

        return run
