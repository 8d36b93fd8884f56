"""Pipeline: the answers of the stages of a pipeline."""

from edgekit_runtime.canonical_json import decode_json
from edgekit_runtime.errors import DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, register


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The task `pipeline` has no options. Each stage has the options of its own task."""


@register(
    "pipeline",
    PipelineOptions,
    "The answers of the stages, each within that of the stage that it takes its input from.",
)
def _decode(outputs: Outputs, _options: PipelineOptions, _context: Context) -> Decoded:
    (answer,) = outputs.values()
    return decode_json(answer.tobytes(), "answer of a pipeline", DataError)
