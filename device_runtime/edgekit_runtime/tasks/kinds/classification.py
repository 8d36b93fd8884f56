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
        output: name of the output with a value for each class; empty for the first output.
        scores: what the values are: `probabilities`, or logits for a `softmax` or a `sigmoid`.
        top: number of classes in an answer.
        min_score: classes of a lower score are left out.
        background: number of classes at the start that are no answer, such as 1 for TensorFlow's ImageNet
            models; labels do not name them.
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
