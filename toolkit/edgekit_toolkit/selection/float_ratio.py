"""Latency of a candidate relative to the float model: modelled for the target, and measured here."""

from dataclasses import dataclass

from edgekit_toolkit.selection.choice import SAME_LATENCY


@dataclass(frozen=True, slots=True)
class FloatRatio:
    """Latency of a candidate as a multiple of that of the float model.

    Attributes:
        modelled: ratio modelled for the target; None if one latency cannot be modelled, or if latency here
            holds for the target.
        uncertainty: factor by which `modelled` may be off.
        here: ratio to the float candidate of the same engine, measured in turns on this machine.
        here_to_source: ratio to the source model, measured in the same way.
    """

    modelled: float | None
    uncertainty: float
    here: float
    here_to_source: float


def find_slowdown(ratio: FloatRatio, target: str) -> list[str]:
    """Return a warning if the candidate is slower here than the float model, or nothing.

    Args:
        ratio: latency of the chosen candidate over the float model's.
        target: name of the target.
    """
    against = {"float32": ratio.here, "the source model": ratio.here_to_source}
    slower = [f"{value:.2f} x {name}" for name, value in against.items() if value > 1 + SAME_LATENCY]
    if not slower:
        return []
    warning = f"slower on this machine: it takes {' and '.join(slower)} (measured here)"
    if ratio.modelled is None:
        return [f"{warning}; no form that keeps every limit is clearly faster"]
    note = (
        f"{warning}, {ratio.modelled:.2f} x float32 as predicted for {target}, which may be off by"
        f" {ratio.uncertainty:.2g} x; measure on {target} before you rely on it"
    )
    return [note]
