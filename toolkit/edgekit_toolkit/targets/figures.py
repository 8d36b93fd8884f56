"""Numbers with their sources: `Figure` and `Source`, and the checks that records share."""

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
        key: key by which figures refer to it.
        title: title of the document, or a name for a derivation or a measurement.
        date: date of the document or of the measurement, ISO 8601 (a year or a month will do).
        where: page, section or address of the figure; empty for our own.
        derivation: how an estimate was derived or a measurement was made; empty for a plain citation.
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
    """One number with its unit, its status and the key of its source.

    Attributes:
        value: finite, at least 0.
        unit: B, Hz, W, MAC/s, B/s, s, or 1 for a count or a ratio.
        status: `datasheet` (the vendor says so), `published` (a third party measured it), `measured` (we
            measured it, the source says how), `estimated` (derived, the source says how).
        source: key of a `Source` of the same target.
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
    """Raise TargetError unless the figures `names` have this unit and are above 0 (0 too if `zero`)."""
    for name in names:
        figure: Figure = getattr(record, name)
        if figure.unit != unit:
            raise TargetError(f"{name}.unit: expected {unit!r}, got {figure.unit!r}")
        if figure.value == 0 and not zero:
            raise TargetError(f"{name}.value: expected more than 0, got 0")
