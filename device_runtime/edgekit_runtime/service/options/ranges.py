"""What the numbers of a configuration may be, each finite: as its field declares, or else by its unit."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Range:
    """What a number may be; a field declares it as `Annotated[int, Range(1, 64)]`.

    Attributes:
        least, most: themselves allowed.
    """

    least: float
    most: float

    def __contains__(self, value: float) -> bool:
        """Whether `value` lies within; NaN does not, nor does an integer that no float can hold."""
        return self.least <= value <= self.most

    def __str__(self) -> str:
        """Return it for people."""
        return f"{self.least:.16g} to {self.most:.16g}"


# By how names end, the first that fits. Wide: what is sensible depends on device and model. Narrow enough for
# clocks, timers and the system's own integers to take.
_OF_UNITS: Final = {
    "_per_s": Range(0, 1 << 50),
    "_s": Range(0, 10**9),
    "_ms": Range(0, 10**9),
    "_hours": Range(0, 10**6),
    "_bytes": Range(0, 1 << 50),
    "_w": Range(0, 10**6),
    "_c": Range(-273, 10**4),
}
_OF_REST: Final = Range(0, (1 << 31) - 1)  # counts and shares


def range_of_unit(name: str) -> Range:
    """Return what a setting may be whose field declares no range."""
    return next((found for unit, found in _OF_UNITS.items() if name.endswith(unit)), _OF_REST)
