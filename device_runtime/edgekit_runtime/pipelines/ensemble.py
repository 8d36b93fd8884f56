"""Several classifiers of one picture as one: the mean of their scores, or the share of their votes."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from edgekit_runtime.tasks.task import Decoded

_SHOWN = 5  # classes of an answer, as of `classification`


def combine_answers(answers: Sequence[Decoded], field: str, how: str) -> Decoded:
    """Return one answer for those of several models to the same picture.

    Args:
        answers: answers of one task, whose models have the same labels.
        field: their list of labels and scores, the best first.
        how: one of `package.pipeline.ENSEMBLES`.
    """
    scores: dict[tuple[str, int], float] = defaultdict(float)
    for answer in answers:
        entries: Any = answer[field]
        for entry in entries[:1] if how == "vote" else entries:
            scores[entry["label"], entry["index"]] += (1.0 if how == "vote" else entry["score"]) / len(
                answers
            )
    ranked = sorted(scores.items(), key=lambda item: -item[1])
    return {
        field: [
            {"label": label, "index": index, "score": round(score, 6)}
            for (label, index), score in ranked[:_SHOWN]
        ]
    }
