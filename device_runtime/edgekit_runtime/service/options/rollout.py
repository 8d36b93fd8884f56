"""How a new version takes over from the one in use: at once, as a canary, or as a shadow; only options."""

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from edgekit_runtime.errors import ManifestError

RolloutKind: TypeAlias = Literal["swap", "canary", "shadow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Limits that a candidate must keep; None switches a gate off.

    Attributes:
        min_agreement: least mean agreement with the current version (see `agreement`), 0..1; a version is
            not promoted without any comparison.
        max_extra_errors: how far the share of failed answers may lie above the current version's, 0..1.
        max_p50_ratio: of the latency to that of the current version with the same inputs, median over pairs.
        max_p99_ratio: of the latency that one pair in a hundred exceeds to the current version's.
        max_energy_ratio: median energy per request relative to the current version's, where it is
            measured.
        error_burst: failed answers in a row that roll back at once.
        min_samples: answers of the candidate before it can be promoted.
        max_duration_s: time after which the verdict falls.
        alpha: chance of a false rollback, and of a false promotion.

    Raises:
        ManifestError: a value is outside its range.
    """

    min_agreement: float | None = 0.9
    max_extra_errors: float = 0.01
    max_p50_ratio: float | None = 1.25
    max_p99_ratio: float | None = 1.5
    max_energy_ratio: float | None = 1.25
    error_burst: int = 5
    min_samples: int = 200
    max_duration_s: float = 86_400.0
    alpha: float = 0.01

    def __post_init__(self) -> None:
        _require_between("min_agreement", self.min_agreement, 0, 1)
        _require_between("max_extra_errors", self.max_extra_errors, 0, 1)
        _require_between("alpha", self.alpha, 0, 0.5)
        for name in ("max_p50_ratio", "max_p99_ratio", "max_energy_ratio", "max_duration_s"):
            _require_between(name, getattr(self, name), 0, math.inf)
        if self.error_burst < 1 or self.min_samples < 1:
            raise ManifestError(
                f"canary: error_burst is {self.error_burst} and min_samples {self.min_samples},"
                " expected at least 1"
            )


def _require_between(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low < value < high:
        raise ManifestError(f"canary: {name} is {value}, expected more than {low:g} and less than {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowOptions:
    """When a call is copied for the candidate.

    Attributes:
        share: of the calls, more than 0 and at most 1.
        max_load: real calls that may be under way while the candidate runs.
        quiet_s: how long no real call must have been answered before the candidate is asked.
        max_wait_s: a copy that waited longer is dropped.
        max_pending: copies that wait; more are not made.
        max_copied_bytes: calls whose inputs lie in a borrowed buffer and are larger than this get no copy:
            where the model does not run on a thread, copying delays the reply.
    """

    share: float = 0.1
    max_load: int = 0
    quiet_s: float = 0.001
    max_wait_s: float = 1.0
    max_pending: int = 4
    max_copied_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ManifestError(f"shadow: share is {self.share}, expected more than 0 and at most 1")
        if self.max_load < 0 or self.max_pending < 1 or self.quiet_s < 0 or self.max_wait_s <= 0:
            raise ManifestError(
                f"shadow: expected max_load, quiet_s >= 0, max_pending >= 1, max_wait_s > 0, got {self}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What happens to a new version of one model.

    Attributes:
        kind: `swap` puts it in the place of the old one, `canary` gives it a share of the calls first, and
            `shadow` copies of a share of them.
        share: of the calls, for a canary.
        compared_share: of the candidate's calls in a canary, that both versions run again, see `PairedRuns`.
        retry: whether the version in use answers what a canary fails to.
        gates: that it must keep to take over.
        shadow: when calls are copied for a shadow.
        comparison: `agreement` or `similarity`, or None to choose by the model.

    Raises:
        ManifestError: a share is out of range.
    """

    kind: RolloutKind = "swap"
    share: float = 0.1
    compared_share: float = 0.25
    retry: bool = True
    gates: Gates = field(default_factory=Gates)
    shadow: ShadowOptions = field(default_factory=ShadowOptions)
    comparison: str | None = None

    def __post_init__(self) -> None:
        for name in ("share", "compared_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ManifestError(
                    f"canary: {name} is {getattr(self, name)}, expected more than 0 and at most 1"
                )
