"""Text: a line of characters, from the greedy decoding of a CTC output."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from edgekit_runtime.errors import DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tasks.outputs import ScoreKind, read_output, to_scores
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, register


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options of `text`.

    Attributes:
        output: The output with a value for each frame and character. Empty for the first output.
        layout: `NTC` for [N, frames, characters], `NCT` for [N, characters, frames].
        blank: The position of the blank among the characters. The blank needs no label. If the last
            character has no label either, it is a space, as in PaddleOCR.
        space: The label that stands for a space, such as the bar of wav2vec 2.0.
        scores: `probabilities`, or the activation that converts logits, which is usually `softmax`.
    """

    output: str = ""
    layout: Literal["NTC", "NCT"] = "NTC"
    blank: Literal["first", "last"] = "first"
    space: str = ""
    scores: ScoreKind = "probabilities"


def read_text(outputs: Outputs, options: TextOptions, labels: Sequence[str]) -> tuple[str, float]:
    """Return the text and its score. Repeated characters count once unless a blank separates them.

    The score is the mean score of the characters, as in CTCLabelDecode of PaddleOCR.

    Raises:
        DataError: The output is missing, has another shape, or does not fit the number of labels.
    """
    expected = f"[1, frames, characters] with the axes {options.layout}"
    frames = read_output(outputs, options.output, expected, (1, 2, 3))
    frames = frames[:, 0] if frames.ndim == 3 and frames.shape[1] == 1 else frames  # [T, N, C] of PyTorch
    frames = np.atleast_2d(frames)
    if frames.ndim != 2:
        raise DataError(f"the output is {list(frames.shape)}, expected {expected}")
    frames = frames.T if options.layout == "NCT" else frames
    count = frames.shape[1]
    labels = (*labels, " ") if len(labels) == count - 2 and options.blank == "first" else labels
    if count - len(labels) not in (0, 1):
        raise DataError(
            f"the output has {count} characters with the blank and there are {len(labels)} labels,"
            f" expected {count - 1}, or {count} with the blank, one character a line"
        )
    blank = 0 if options.blank == "first" else count - 1
    best = frames.argmax(axis=1)
    is_character = (best != blank) & (best != np.roll(best, 1))
    is_character[0] = best[0] != blank
    scores = to_scores(frames[is_character], options.scores).max(axis=1)
    offset = int(options.blank == "first" and len(labels) < count)
    characters = [labels[index - offset] for index in best[is_character]]
    text = "".join(" " if options.space and label == options.space else label for label in characters)
    return text, float(scores.mean()) if len(scores) else 0.0


@register("text", TextOptions, "A line of text with its score, from the frames of a CTC model.")
def _decode(outputs: Outputs, options: TextOptions, context: Context) -> Decoded:
    text, score = read_text(outputs, options, context.labels)
    return {"text": text, "score": round(score, 4)}
