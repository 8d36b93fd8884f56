"""Small summaries of values and of class scores, and their distance from a reference.

A summary takes a few hundred bytes, regardless of the number of values.
"""

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Final

import numpy as np

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.drift.reference import CLASSES, CONFIDENCES, ClassReference, ValueReference
from edgekit_runtime.errors import ManifestError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import Array

_LEAST_SHARE: Final = 0.002  # smaller shares count as this: few samples cannot distinguish them from 0
_LEAST_PROBABILITY: Final = 1e-12
_LEAST_LOGIT: Final = -80.0  # relative to the best. Less adds nothing, and -inf would give NaN


@dataclass(slots=True)
class Moments:
    """Count, mean and spread of a stream, in constant memory.

    Attributes:
        count: number of values. It may be a fraction after `halve`.
        squares: sum of the squared differences between the values and the mean.
        low, high: smallest and largest value, initially infinity and minus infinity.

    Source: T. Chan, G. Golub, R. LeVeque, Updating formulae and a pairwise algorithm for computing sample
    variances (1979), equation 2.1. For a single value it is Welford's formula.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def merge(self, other: "Moments") -> None:
        total = self.count + other.count
        if not other.count:
            return
        apart = other.mean - self.mean
        self.squares += other.squares + apart * apart * self.count * other.count / total
        self.mean += apart * other.count / total
        self.count = total
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    def halve(self) -> None:
        """Halve the weight of all values so far. The smallest and largest value stay the same."""
        self.count /= 2
        self.squares /= 2

    @property
    def std(self) -> float:
        """Standard deviation of the values, or 0 for fewer than two values."""
        return math.sqrt(self.squares / self.count) if self.count > 1 else 0.0


@dataclass(slots=True)
class ValueSketch:
    """Summary of the values of one tensor.

    Attributes:
        bins: number of values below the bins of the reference, in each of these bins, and above them. It is
            empty without a reference.
        not_finite: number of tensors with NaN or infinity. These values are not in the other statistics.
    """

    reference: ValueReference | None = None
    moments: Moments = field(default_factory=Moments)
    bins: list[float] = field(default_factory=list)
    not_finite: int = 0
    _bounds: Array = field(init=False)

    def __post_init__(self) -> None:
        bounds = self.reference.bounds if self.reference else ()
        self._bounds = np.array(bounds, np.float32)
        self.bins = self.bins or [0.0] * (len(bounds) + 1 if bounds else 0)

    def add(self, values: Array) -> None:
        """Count values.

        Args:
            values: float32 [count], not empty. The array is overwritten.
        """
        values.sort()
        if not (math.isfinite(values[-1]) and math.isfinite(values[0])):  # NaN comes last
            self.not_finite += 1
            values = values[np.isfinite(values)]
            if not values.size:
                return
        count = values.size
        low, high = float(values[0]), float(values[-1])
        if self.bins:
            before = 0
            for bin_index, until in enumerate([*values.searchsorted(self._bounds).tolist(), count]):
                self.bins[bin_index] += until - before
                before = until
        wide = values.astype(np.float64)
        mean = float(np.add.reduce(wide)) / count
        wide -= mean  # first, because squares of values far from 0 would hide the spread
        self.moments.merge(Moments(count, mean, float(wide.dot(wide)), low, high))

    def halve(self) -> None:
        self.moments.halve()
        self.bins = [count / 2 for count in self.bins]

    def to_json(self) -> dict[str, JsonValue]:
        """Return `count`, `mean`, `std`, `low`, `high` and `not_finite`.

        With a reference, the result also has `bins`, `outside` and `psi`. `outside` is the share of values
        outside the reference's range. For `psi` see `find_distance`. Both are None if there are no values.
        """
        moments = self.moments
        stated: dict[str, JsonValue] = {
            "count": round(moments.count),
            "mean": _digits(moments.mean),
            "std": _digits(moments.std),
            "low": _digits(moments.low) if moments.count else None,
            "high": _digits(moments.high) if moments.count else None,
            "not_finite": self.not_finite,
        }
        if self.reference is None:
            return stated
        total = sum(self.bins)
        outside = self.bins[0] + self.bins[-1]
        return {
            **stated,
            "bins": [round(count) for count in self.bins],
            "outside": round(outside / total, 4) if total else None,
            "psi": find_distance(self.bins, (0.0, *self.reference.shares, 0.0)),
        }


@dataclass(slots=True)
class ClassSketch:
    """Summary of the outputs of a classifier.

    Attributes:
        count: number of classes.
        is_probabilities: whether the outputs are probabilities, or None if this is not known yet.
        confidence: histogram of the best class's probability, with `CONFIDENCES` equal bins.
        classes: number of outputs in which each class is the best. Classes with the same number modulo
            `CLASSES` share a value.
        entropy: moments of the entropy of the outputs, divided by the largest possible entropy. A uniform
            output has the value 1.
    """

    count: int
    reference: ClassReference | None = None
    is_probabilities: bool | None = None
    confidence: list[float] = field(default_factory=lambda: [0.0] * CONFIDENCES)
    classes: list[float] = field(default_factory=list)
    entropy: Moments = field(default_factory=Moments)

    def __post_init__(self) -> None:
        self.classes = self.classes or [0.0] * min(self.count, CLASSES)
        if self.reference is not None:
            self.is_probabilities = self.reference.is_probabilities
            if len(self.reference.classes) != len(self.classes):
                raise ManifestError(
                    f"figures.reference: {len(self.reference.classes)} classes, expected {len(self.classes)}"
                    f" of a model with {self.count}"
                )

    def add(self, scores: Array) -> None:
        """Count one output, unless its best score is not finite.

        Args:
            scores: float [classes], logits or probabilities.
        """
        scores = scores.astype(np.float32, copy=False)  # the least probability is 0 in float16
        if self.is_probabilities is None:
            self.is_probabilities = are_probabilities(scores)
        if self.is_probabilities:
            scores = np.log(np.maximum(scores, _LEAST_PROBABILITY))
        best = int(scores.argmax())  # the index of a NaN, if there is one
        if not math.isfinite(scores[best]):
            return
        apart = np.maximum(scores - scores[best], _LEAST_LOGIT)
        weights = np.exp(apart)
        total = float(weights.sum())
        confidence = 1.0 / total
        entropy = (math.log(total) - float(weights.dot(apart)) / total) / math.log(max(self.count, 2))
        self.entropy.merge(Moments(1, entropy, 0.0, entropy, entropy))
        self.confidence[min(int(confidence * CONFIDENCES), CONFIDENCES - 1)] += 1
        self.classes[best % len(self.classes)] += 1

    def halve(self) -> None:
        self.entropy.halve()
        self.confidence = [count / 2 for count in self.confidence]
        self.classes = [count / 2 for count in self.classes]

    def to_json(self) -> dict[str, JsonValue]:
        """Return the counts `confidence` and `classes`, and the mean `entropy`.

        With a reference, the result also has `confidence_psi` and `classes_psi`, see `find_distance`.
        """
        stated: dict[str, JsonValue] = {
            "confidence": [round(count) for count in self.confidence],
            "classes": [round(count) for count in self.classes],
            "entropy": _digits(self.entropy.mean),
        }
        if self.reference is None:
            return stated
        return {
            **stated,
            "confidence_psi": find_distance(self.confidence, self.reference.confidence),
            "classes_psi": find_distance(self.classes, self.reference.classes),
        }


def are_probabilities(scores: Array) -> bool:
    return float(scores.min()) >= 0 and abs(float(scores.sum(dtype=np.float64)) - 1) < 1e-2


def find_distance(counts: Sequence[float], shares: Sequence[float]) -> float | None:
    """Return the population stability index of counts compared with the shares of a reference.

    The index is 0 if the distributions are equal. As a rule of thumb, 0.1 is a moderate and 0.25 a
    significant change. Chance alone gives about (b - 1) / n for n values in b bins. The result is None
    if all counts are 0.

    Source: B. Yurdakul, Statistical properties of population stability index (2018), sections 1 and 3.
    """
    total = sum(counts)
    if not total:
        return None
    distance = 0.0
    for count, share in zip(counts, shares, strict=True):
        observed_share = max(count / total, _LEAST_SHARE)
        expected = max(share, _LEAST_SHARE)
        distance += (observed_share - expected) * math.log(observed_share / expected)
    return round(distance, 4)


def _digits(value: float) -> float:
    return float(f"{value:.6g}")
