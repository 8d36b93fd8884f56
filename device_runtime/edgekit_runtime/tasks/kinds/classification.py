"""Classification: the labels of the best classes with their scores."""

from typing import Annotated

import numpy as np

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.records import dataclass
from edgekit_runtime.tasks.outputs import ScoreKind, read_output, to_scores
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, register


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOptions:
    """Options of `classification`.

    Attributes:
        output: The output with a value for each class. Empty for the first output.
        scores: `probabilities`, or the activation that converts logits (`softmax` or `sigmoid`).
        top: The number of classes in an answer.
        min_score: The minimum score of a class in an answer.
        background: The number of background classes at the start, such as 1 for TensorFlow's ImageNet models.
            They have no labels and are never in an answer.
    """

    output: str = ""
    scores: ScoreKind = "probabilities"
    top: Annotated[int, Range(1, 100)] = 5
    min_score: Annotated[float, Range(0, 1)] = 0.0
    background: Annotated[int, Range(0, 1)] = 0


def _decode(outputs: Outputs, options: ClassificationOptions, context: Context) -> Decoded:
    values = read_output(outputs, options.output, "[1, classes]", (1, 2, 3)).ravel()
    values = to_scores(values, options.scores)[options.background :]
    best = np.argsort(-values, kind="stable")[: options.top]
    return {
        "classes": [
            {"label": context.name_class(int(index)), "index": int(index), "score": float(values[index])}
            for index in best
            if values[index] >= options.min_score and np.isfinite(values[index])
        ]
    }


CLASSIFICATION = register(
    "classification", ClassificationOptions, "The best classes with their scores.", entries="classes"
)(_decode)
