"""Figures with their sources, and checks for them."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import TargetError

Status = Literal["datasheet", "published", "measured", "estimated"]


@dataclass(frozen=True, slots=True)
class Source:
    """A source of figures.

    Attributes:
        key: The key by which figures refer to the source.
        title: The title of the document, or a name for a derivation or a measurement.
        date: The date of the document or measurement in ISO 8601. A year or a month is enough.
        where: The page, section or address of the figure, empty for our own figures.
        derivation: How the figure was estimated or measured, empty for a plain citation.
    """

    key: str
    title: str
    date: str
    where: str = ""
    derivation: str = ""

    def __post_init__(self) -> None:
        for name in ("key", "title"):
            if not getattr(self, name).strip():
                raise TargetError(f"{name}: expected text, got nothing")
        if not re.fullmatch(r"\d{4}(-\d{2}){0,2}", self.date):
            raise TargetError(f"date: expected YYYY, YYYY-MM or YYYY-MM-DD, got {self.date!r}")
        if not (self.where.strip() or self.derivation.strip()):
            raise TargetError("where: expected a place or a derivation, got neither")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit, its status and its source.

    Attributes:
        value: The number, finite and at least 0.
        unit: B, Hz, W, MAC/s, B/s or s, or 1 for counts and ratios.
        status: `datasheet` if the vendor states it, `published` if a third party measured it, `measured` if
            we measured it, or `estimated` if it was derived. For the last two, the source describes the
            method.
        source: The key of a `Source` of the same target.
    """

    value: Annotated[float, Range(0, 1e18)]
    unit: str
    status: Status
    source: str

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) or self.value < 0:
            raise TargetError(f"value: expected a finite number of at least 0, got {self.value}")
        object.__setattr__(self, "value", float(self.value))  # TOML also has whole numbers


def check_figures(record: object, unit: str, *names: str, zero: bool = False) -> None:
    """Check that the attributes `names` of a record are figures above 0 with the unit `unit`.

    If `zero` is True, a figure may be 0.

    Raises:
        TargetError: A figure has another unit, or is 0 although `zero` is False.
    """
    for name in names:
        figure: Figure = getattr(record, name)
        if figure.unit != unit:
            raise TargetError(f"{name}.unit: expected {unit!r}, got {figure.unit!r}")
        if figure.value == 0 and not zero:
            raise TargetError(f"{name}.value: expected more than 0, got 0")
