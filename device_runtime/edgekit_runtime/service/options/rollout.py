"""Options of a canary and of a shadow, and of the gates that a candidate version must pass in either."""

from typing import Annotated, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.records import dataclass

ComparisonName: TypeAlias = Literal["agreement", "similarity"]
_Count: TypeAlias = Annotated[int, Range(1, (1 << 31) - 1)]
_Seconds: TypeAlias = Annotated[float, Range(0.001, 10**9)]
_Share: TypeAlias = Annotated[float, Range(1e-6, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Limits that a candidate must keep. For agreement, latency and energy, 0 means no limit.

    Attributes:
        min_agreement: least mean agreement with the current version (see `comparison`), 0..1. Without any
            compared answers there is no promotion.
        max_extra_errors: how much the share of failed answers may exceed the current version's share, 0..1.
        max_p50_ratio: limit of the median latency ratio, candidate to current version, over runs with equal
            inputs.
        max_p99_ratio: limit of the ratio of 99th percentiles of latency, candidate to current version.
        max_energy_ratio: limit of the ratio of median energies per request, candidate to current version. It
            has no effect where energy is not measured.
        error_burst: number of failed calls in a row that roll the candidate back at once.
        min_samples: calls that the candidate must have answered before it can be promoted.
        max_duration_s: time after which the trial is decided.
        alpha: chance of a false rollback, and of a false promotion.

    Raises:
        ValueError: a share is outside its range.
    """

    min_agreement: float = 0.9
    max_extra_errors: float = 0.01
    max_p50_ratio: float = 1.25
    max_p99_ratio: float = 1.5
    max_energy_ratio: float = 1.25
    error_burst: _Count = 5
    min_samples: _Count = 200
    max_duration_s: _Seconds = 86_400.0
    alpha: float = 0.01

    def __post_init__(self) -> None:
        for name, high in (("min_agreement", 1.0), ("max_extra_errors", 1.0), ("alpha", 0.5)):
            value = getattr(self, name)
            if not 0 < value < high and not (value == 0 and name == "min_agreement"):
                raise ValueError(f"{name} is {value}, expected more than 0 and less than {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    """Options of a canary.

    Attributes:
        share: share of the calls, more than 0 and at most 1.
        compared_share: share of the candidate's calls that both versions then run again for comparison (see
            `PairedRuns`), more than 0 and at most 1.
        retry: whether the version in use answers a call that the candidate fails.
        comparison: how answers are compared, or None to choose by the model.
    """

    share: _Share = 0.1
    compared_share: _Share = 0.25
    retry: bool = True
    comparison: ComparisonName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowOptions:
    """Options of a shadow.

    Attributes:
        share: share of the calls, more than 0 and at most 1.
        max_load: most real calls under way while the candidate runs.
        quiet_s: pause after the last real answer before the candidate may run.
        max_wait_s: longest wait of a copy; then the copy is dropped.
        max_pending: most copies that wait.
        max_copied_bytes: size limit of inputs that must be copied, since the client can reuse their memory. A
            call with larger inputs is left out: copying them could delay the response.
        comparison: how answers are compared, or None to choose by the model.
    """

    share: _Share = 0.1
    max_load: int = 0
    quiet_s: float = 0.001
    max_wait_s: _Seconds = 1.0
    max_pending: _Count = 4
    max_copied_bytes: int = 1 << 20
    comparison: ComparisonName | None = None
