"""The reference of the drift statistics, `figures.reference` in a manifest.

The toolkit computes it from the calibration samples of the package. `sketches` compares later values with it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Final

from edgekit_runtime.canonical_json import Fields, JsonValue, Record
from edgekit_runtime.errors import ManifestError
from edgekit_runtime.records import dataclass

CLASSES: Final = 32  # further classes are folded: class number modulo this
CONFIDENCES: Final = 10
# Similar samples may have values this far outside the calibrated range, in shares of its span. The toolkit's
# warning about a range trap has the same margin.
MARGIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class ValueReference(Record):
    """The distribution of the values of one tensor when the package was made.

    Attributes:
        low, high: smallest and largest value.
        edges: inner edges of the bins, ascending. For the outer edges see `bounds`.
        shares: share of the values in each bin. There is one more bin than inner edges.

    Raises:
        ManifestError: a field has the wrong type or value.
    """

    low: float
    high: float
    edges: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_numbers((self.low, self.high, *self.edges, *self.shares))
        if len(self.shares) != len(self.edges) + 1 or len(self.shares) > CLASSES:
            raise ManifestError(
                f"figures.reference: {len(self.shares)} shares for {len(self.edges)} edges, expected one more"
            )
        if list(self.edges) != sorted(self.edges) or self.low > self.high:
            raise ManifestError("figures.reference: edges and range must ascend; make the package again")

    @property
    def bounds(self) -> tuple[float, ...]:
        """All edges of the bins: slightly below `low`, the inner edges, and slightly above `high`."""
        margin = MARGIN * (self.high - self.low) or 1e-6 * max(1.0, abs(self.high))
        return (self.low - margin, *self.edges, self.high + margin)


@dataclass(frozen=True, slots=True)
class ClassReference(Record):
    """The distribution of a classifier's outputs when the package was made.

    Attributes:
        is_probabilities: True if the outputs are probabilities, False if they are logits.
        confidence: histogram of the best class's probability, with `CONFIDENCES` equal bins, as shares.
        classes: share of the outputs in which each class is the best. Classes with the same number modulo
            `CLASSES` share a value.

    Raises:
        ManifestError: a field has the wrong type or value.
    """

    is_probabilities: bool = field(metadata={"key": "probabilities", "read": lambda value, *_: value is True})
    confidence: tuple[float, ...]
    classes: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_numbers((*self.confidence, *self.classes))
        if len(self.confidence) != CONFIDENCES or not 2 <= len(self.classes) <= CLASSES:
            raise ManifestError(
                f"figures.reference: {len(self.confidence)} confidences and {len(self.classes)} classes,"
                f" expected {CONFIDENCES} and 2 to {CLASSES}"
            )


def _check_numbers(numbers: Sequence[object]) -> None:
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ManifestError("figures.reference: expected finite numbers only; make the package again")


def parse_references(
    figures: Mapping[str, JsonValue],
) -> tuple[dict[str, ValueReference], dict[str, ValueReference | ClassReference]]:
    """Return two dicts from name to reference, for the inputs and for the outputs.

    Both are empty if the package has no references.

    Raises:
        ManifestError: `figures.reference` is malformed.
    """
    value: Any = figures.get("reference")
    if value is None:
        return {}, {}
    where = "manifest.json: figures.reference"
    fields = Fields(value, where, ManifestError)
    inputs, outputs = fields.take("inputs"), fields.take("outputs")
    if not isinstance(inputs, dict) or not isinstance(outputs, dict):
        raise ManifestError(f"{where}: inputs and outputs must be objects; make the package again")
    return (
        {name: ValueReference.from_json(item, f"{where}.inputs.{name}") for name, item in inputs.items()},
        {
            name: (
                ClassReference if isinstance(item, dict) and "classes" in item else ValueReference
            ).from_json(item, f"{where}.outputs.{name}")
            for name, item in outputs.items()
        },
    )
