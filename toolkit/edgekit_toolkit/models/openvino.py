"""An ONNX model for OpenVINO. The OpenVINO package is imported only when a model is opened."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from edgekit_runtime.canonical_json import JsonValue
from edgekit_toolkit.costs.peak_memory import MemoryEstimate
from edgekit_toolkit.models.model import Runner
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.openings.sessions import open_openvino
from edgekit_toolkit.samples.generated import Feeds

if TYPE_CHECKING:
    from edgekit_runtime.sessions.openvino import OpenVinoSession


class OpenVinoModel(OnnxModel):
    """An ONNX model that OpenVINO runs, see `Model`."""

    engine = "openvino"

    @property
    def options(self) -> Mapping[str, JsonValue]:
        return {}

    def open(
        self,
        outputs: Sequence[str] | None = None,
        *,
        threads: int,
        rewrites: bool = True,  # noqa: ARG002  # OpenVINO's cannot be chosen
    ) -> Runner:
        session = self.open_session(threads=threads)
        names = list(outputs or (spec.name for spec in self.specs()[1]))

        def run(feeds: Feeds) -> list[NDArray[Any]]:
            values = session.run(feeds)
            return [values[name] for name in names]

        return run

    def open_session(self, *, threads: int) -> "OpenVinoSession":  # type: ignore[override]
        return open_openvino(self.content, threads, self.options)

    def estimate_memory(self, dims: Mapping[str, int], *, blocked_layout: bool) -> MemoryEstimate | None:
        """Return None, because there is no estimate for OpenVINO. The memory must be measured."""


class BFloat16Model(OpenVinoModel):
    """A float model that OpenVINO computes in bfloat16 if the processor supports it, see `Model`."""

    @property
    def options(self) -> Mapping[str, JsonValue]:
        return {"precision": "bfloat16"}

    def computes_in_codes(self) -> bool:
        """Return True, because bfloat16 has an error similar to that of 8-bit codes."""
        return True
