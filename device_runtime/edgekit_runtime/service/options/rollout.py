"""Options of canary and shadow rollouts, and of the gates that a candidate version must pass."""

from typing import Annotated, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Count, PositiveSeconds, Range
from edgekit_runtime.records import dataclass

ComparisonName: TypeAlias = Literal["agreement", "similarity"]
_Share: TypeAlias = Annotated[float, Range(1e-6, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Limits that a candidate must keep. For agreement, latency and energy, 0 means no limit.

    Attributes:
        min_agreement: The minimum mean agreement with the current version, 0 to 1 (see `comparison`). Without
            compared answers, the candidate is not promoted.
        max_extra_errors: How much the candidate's share of failed answers may exceed the current version's
            share, 0 to 1.
        max_p50_ratio: The limit of the candidate's latency divided by the current version's latency, as the
            median over runs with equal inputs.
        max_p99_ratio: The limit of the candidate's 99th latency percentile divided by that of the current
            version.
        max_energy_ratio: The limit of the candidate's median energy per request divided by that of the
            current version. It has no effect if energy is not measured.
        error_burst: The number of consecutive failed calls after which the candidate is rolled back at once.
        min_samples: The number of calls that the candidate must answer before it can be promoted.
        max_duration_s: The maximum duration of the trial. Then the candidate is promoted or rolled back.
        alpha: The maximum probability of a wrong rollback, and of a wrong promotion.

    Raises:
        ValueError: `min_agreement`, `max_extra_errors` or `alpha` is out of range.
    """

    min_agreement: float = 0.9
    max_extra_errors: float = 0.01
    max_p50_ratio: float = 1.25
    max_p99_ratio: float = 1.5
    max_energy_ratio: float = 1.25
    error_burst: Count = 5
    min_samples: Count = 200
    max_duration_s: PositiveSeconds = 86_400.0
    alpha: float = 0.01

    def __post_init__(self) -> None:
        for name, high in (("min_agreement", 1.0), ("max_extra_errors", 1.0), ("alpha", 0.5)):
            value = getattr(self, name)
            if not 0 < value < high and not (value == 0 and name == "min_agreement"):
                raise ValueError(f"{name} is {value}, expected more than 0 and less than {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    """Options of a canary rollout.

    Attributes:
        share: The share of the calls that the candidate answers, more than 0 and at most 1.
        compared_share: The share of the candidate's calls that are compared, more than 0 and at most 1. Both
            versions run such a call again (see `PairedRuns`).
        retry: Whether the version in use answers the calls on which the candidate failed.
        comparison: How answers are compared, or None to choose by the model.
    """

    share: _Share = 0.1
    compared_share: _Share = 0.25
    retry: bool = True
    comparison: ComparisonName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowOptions:
    """Options of a shadow rollout.

    Attributes:
        share: The share of the calls that are copied, more than 0 and at most 1.
        max_load: The candidate runs only while at most this number of real calls are running.
        quiet_s: How long the candidate waits after the last real answer.
        max_wait_s: How long a copy may wait. After that, it is dropped.
        max_pending: The maximum number of waiting copies.
        max_copied_bytes: The size limit of inputs that must be copied because the client may reuse their
            memory. Calls with larger inputs are skipped, because copying could delay the response.
        comparison: How answers are compared, or None to choose by the model.
    """

    share: _Share = 0.1
    max_load: int = 0
    quiet_s: float = 0.001
    max_wait_s: PositiveSeconds = 1.0
    max_pending: Count = 4
    max_copied_bytes: int = 1 << 20
    comparison: ComparisonName | None = None
