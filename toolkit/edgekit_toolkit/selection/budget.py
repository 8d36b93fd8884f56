"""Parses the limits of a package, and compares measured figures with them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

import click

# Without a limit on the drop, the fastest candidate would win however wrong its answers are.
DEFAULT_LIMITS: Mapping[str, float] = {"size": 10e6, "drop": 1.0}
# The unit in which each limit is kept, and the factors of the units in which it may be given.
_BYTES = {"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
UNITS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "size": ("bytes", _BYTES),
    "transport": ("bytes", _BYTES),
    "latency": ("ms", {"us": 1e-3, "µs": 1e-3, "ms": 1, "s": 1e3}),
    "memory": ("bytes", _BYTES),
    "energy": ("mJ", {"uJ": 1e-3, "µJ": 1e-3, "mJ": 1, "J": 1e3}),
    "drop": ("points", {"%": 1, "pt": 1}),
}
_EXAMPLES = {
    "size": "size=2MB or size=500kB",
    "transport": "transport=400kB",
    "latency": "latency=5ms or latency=0.1s",
    "memory": "memory=64MB or memory=64MiB",
    "energy": "energy=20mJ or energy=0.5J",
    "drop": "drop=1% or drop=1pt, a point of the metric",
}
_NUMBER = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-zµ%]*)")


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a package: a dict from a figure to its largest allowed value, in the unit of `UNITS`."""

    limits: Mapping[str, float]

    def __post_init__(self) -> None:
        for name, value in self.limits.items():
            if name not in UNITS or not math.isfinite(value) or value < 0:
                raise ValueError(f"limit {name!r} = {value!r}")

    def violations(self, figures: Mapping[str, float]) -> tuple[str, ...]:
        """Return the names of the limits that `figures`, in the units of `UNITS`, exceed.

        NaN exceeds every limit.

        Raises:
            KeyError: `figures` lacks a figure that has a limit.
        """
        # Not `>`: NaN would keep every limit.
        return tuple(name for name, most in self.limits.items() if not figures[name] <= most)

    def excess(self, figures: Mapping[str, float]) -> float:
        """Return the sum of (figure - limit) / limit over the exceeded limits, or 0 if none is exceeded.

        Raises:
            KeyError: `figures` lacks a figure that has a limit.
        """
        return sum(
            (figures[name] - self.limits[name]) / max(self.limits[name], 1e-9)
            for name in self.violations(figures)
        )


def parse_budget(text: str) -> Budget:
    """Parse limits such as `size=10MB,transport=2MB,latency=5ms,memory=64MB,energy=20mJ,drop=1%`.

    The defaults are `size=10MB` and `drop=1%`. Other figures have no limit by default.

    Every limit except 0 needs a unit, because `size=2` might mean 2 MB or 2 bytes, and `drop=0.01` might mean
    0.01 % or 1 %.

    Raises:
        click.BadParameter: A limit is unknown, is given twice, is not a number, or has no valid unit.
    """
    limits: dict[str, float] = {}
    for part in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in UNITS or not equals:
            raise click.BadParameter(f"{part!r}: expected NAME=VALUE with NAME one of {', '.join(UNITS)}")
        if name in limits:
            raise click.BadParameter(f"{name} is given twice")
        match = _NUMBER.fullmatch(value)
        unit, factors = UNITS[name]
        if match is not None and not match.group(2) and Decimal(match.group(1)):
            raise click.BadParameter(
                f"{part!r}: has no unit; give one of {', '.join(factors)}, for example {_EXAMPLES[name]}"
            )
        suffix = (match.group(2) or next(iter(factors))) if match else ""
        if match is None or suffix not in factors:
            raise click.BadParameter(
                f"{part!r}: expected a number and one of {', '.join(factors)} (kept in {unit})"
            )
        # As a decimal: in binary, 4.35 times 100 is less than 435.
        limits[name] = float(Decimal(match.group(1)) * Decimal(str(factors[suffix])))
        if not math.isfinite(limits[name]):
            raise click.BadParameter(f"{part!r}: is more than a number can hold; leave the limit out")
    return Budget({**DEFAULT_LIMITS, **limits})
