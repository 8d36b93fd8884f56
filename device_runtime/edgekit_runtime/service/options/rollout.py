"""How a new version takes over from the one in use: at once, as a canary, or as a shadow; only options."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from edgekit_runtime.errors import ManifestError
from edgekit_runtime.service.rollout.gates import Gates
from edgekit_runtime.service.rollout.shadow_lane import ShadowOptions

RolloutKind: TypeAlias = Literal["swap", "canary", "shadow"]


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
