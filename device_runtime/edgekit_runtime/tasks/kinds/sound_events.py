"""Sound events and voice activity: the classes of a sound and their times, from scores of frames."""

from typing import Annotated, Literal

import numpy as np

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tasks.outputs import ScoreKind, read_output, to_scores
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, register


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundEventOptions:
    """Options of `sound_events`.

    Attributes:
        output: The output with scores. Empty for the first output.
        layout: `NTC` for [N, frames, classes] or [N, classes], `NCT` for [N, classes, frames].
        scores: `probabilities`, or the activation that converts logits (`softmax` or `sigmoid`).
        threshold: The minimum score at which an event begins.
        release: The minimum score at which an event continues, at most `threshold`.
        hop_s: The time between two frames in seconds. 0 stands for the length of the recording divided by
            the number of frames. If the length is unknown too, events have no times.
        min_event_s: The minimum duration of an event in seconds.
        max_events: The maximum number of events in an answer. Those with the highest scores are returned.
    """

    output: str = ""
    layout: Literal["NTC", "NCT"] = "NTC"
    scores: ScoreKind = "probabilities"
    threshold: Annotated[float, Range(0, 1)] = 0.5
    release: Annotated[float, Range(0, 1)] = 0.35
    hop_s: Annotated[float, Range(0, 3600)] = 0.0
    min_event_s: Annotated[float, Range(0, 3600)] = 0.0
    max_events: Annotated[int, Range(1, 1000)] = 100


@register(
    "sound_events",
    SoundEventOptions,
    "Labelled events with scores and times in seconds; with one class, voice activity.",
)
def _decode(outputs: Outputs, options: SoundEventOptions, context: Context) -> Decoded:
    expected = "[1, classes], or scores over time with the axes " + options.layout
    frames = np.atleast_2d(read_output(outputs, options.output, expected, (1, 2)))
    scores = to_scores(frames.T if options.layout == "NCT" and len(frames) > 1 else frames, options.scores)
    hop_s = options.hop_s or (context.duration_s or 0) / len(scores)
    if options.min_event_s and not hop_s:
        raise DataError("min_event_s needs hop_s: the length of the recording is not stated")
    release = min(options.release, options.threshold)
    events: list[tuple[float, int, int, int]] = []
    for index in np.flatnonzero(scores.max(axis=0) >= options.threshold).tolist():
        column = scores[:, index]
        edges = np.flatnonzero(np.diff(column >= release, prepend=False, append=False))
        begins, ends = edges[::2], edges[1::2]
        peaks = np.maximum.reduceat(column, begins)
        is_event = (peaks >= options.threshold) & (peaks < np.inf)
        is_event &= (ends - begins) * hop_s >= options.min_event_s
        rows = zip(peaks[is_event], begins[is_event], ends[is_event], strict=True)
        events += [(float(peak), int(begin), int(end), index) for peak, begin, end in rows]
    best = sorted(events, key=lambda event: -event[0])[: options.max_events]
    entries: list[JsonValue] = []
    for peak, begin, end, index in sorted(best, key=lambda event: event[1]):
        entry: Decoded = {"label": context.name_class(index), "index": index, "score": round(peak, 4)}
        times: Decoded = {"begin_s": round(begin * hop_s, 4), "end_s": round(end * hop_s, 4)}
        entries.append(entry | (times if hop_s else {}))
    return {"events": entries}
