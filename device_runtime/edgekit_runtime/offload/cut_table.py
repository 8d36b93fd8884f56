"""The cut table of a package: the few plans that can be best under some conditions, each with its costs.

A plan is one way to run the model: all of it on the device, all of it on a server, or split. The table is an
artifact of the package, so the package's signature covers it. Nothing here chooses (`choose`) or measures.

Source: docs/reference/package-format.md, section "Cut table".
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Range, from_plain
from edgekit_runtime.errors import CutError
from edgekit_runtime.package.archive import OpenedPackage

CUT_TABLE_ROLE: Final = "cut-table"
CODED_PLANS_ROLE: Final = "coded-plans"
"""A list of the plans that have a decoder, which earlier runtimes refuse in a cut table."""
TABLE_ROLES: Final = (CUT_TABLE_ROLE, CODED_PLANS_ROLE)
MAX_PLANS: Final = 64
LOCAL: Final = "local"

Compression: TypeAlias = Literal["identity", "zstd"]
Objective: TypeAlias = Literal["latency", "energy", "throughput", "capacity"]
_Bytes: TypeAlias = Annotated[float, Range(0, 1 << 40)]
_Seconds: TypeAlias = Annotated[float, Range(0, 3600)]
_Joules: TypeAlias = Annotated[float, Range(0, 10**6)]
_Value: TypeAlias = Annotated[float, Range(-1e39, 1e39)]  # a float32


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """Costs of one request with a plan, without the link; measured for one row on unloaded machines.

    Attributes:
        device_s: time on the device: kernels, and coding of sent and received tensors.
        server_s: time on the server: kernels and decoding.
        upload_bytes, download_bytes: bytes of request and response on the link, with heads, TLS and the
            headers of packets (`wire_bytes`); means over the samples.
        request_s: part of `device_s` that a request takes beside kernels and coding.
        device_j: energy of the device in `device_s`, above idle; None if unknown.
        is_measured: whether the plan was run as it is; otherwise its times are sums over kernels.
        plain_bytes: bytes of the request without compression; None if it is not compressed, or unknown.
        compress_s, decompress_s: parts of `device_s` and of `server_s` for compression.
        server_request_s: part of `server_s` that a request takes beside kernels and coding.
    """

    device_s: _Seconds
    server_s: _Seconds = 0.0
    upload_bytes: _Bytes = 0.0
    download_bytes: _Bytes = 0.0
    request_s: _Seconds = 0.0
    device_j: _Joules | None = None
    is_measured: bool = False
    plain_bytes: _Bytes | None = None
    compress_s: _Seconds = 0.0
    decompress_s: _Seconds = 0.0
    server_request_s: _Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Escalation:
    """When a cascade sends a request to the server: if its small model is not sure.

    Attributes:
        output: the output of the head that holds scores of classes in its last axis.
        least_margin: least difference of the two highest scores at which the head's answer is used.
        share: share of the calibration samples that go to the server.
    """

    output: str
    least_margin: Annotated[float, Range(-1e6, 1e6)]
    share: Annotated[float, Range(0, 1)]


@dataclass(frozen=True, slots=True)
class InputCodes:
    """Values that a head can code: integers at equal steps, with one range for each channel or for all.

    Values beyond that range would be clipped, so a request with such values uses another plan.

    Attributes:
        lowest, highest: values of the first and the last code.
        step: distance between the values of two adjacent codes.
        is_grid: whether values must lie on those steps, as in all samples; otherwise they are rounded.

    Raises:
        ValueError: there are no channels, their numbers differ, or a step is 0.
    """

    lowest: tuple[_Value, ...]
    highest: tuple[_Value, ...]
    step: tuple[_Value, ...]
    axis: Annotated[int, Range(0, 64)] = 0
    is_grid: bool = False

    def __post_init__(self) -> None:
        if not len(self.lowest) == len(self.highest) == len(self.step) > 0 or min(self.step) <= 0:
            raise ValueError("codes need a range and a step above 0 for each channel")


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """One way to run the model.

    Attributes:
        name: name, unique in the table; `local` runs the whole model on the device.
        head: the submodel that runs on the device first; None if the inputs are sent as they are.
        tail: the name of the model on the server; None if nothing is sent.
        media: tensor that is sent -> codec and quality, such as `jpeg:90`. The tail takes its bytes.
        compression: compression of the request's body, used if it pays at the moment
            (`latency_model.as_sent`).
        escalation: escalation of a cascade; then `head` answers by itself if it is sure.
        codes: input of the model -> its values that the head can code; for other inputs, all values.
        decoder: the submodel that restores outputs on the device from the codes in a reply; None if outputs
            come as they are.
        answers_changed: share of the samples whose answer is not that of the whole model; None if unknown.
        leakage_db: lower bound of how well an attacker recovers the input from the sent tensors, as PSNR;
            None if unknown, if nothing is sent, or if an input itself is sent, with or without a coding.

    Raises:
        ValueError: the fields contradict each other.
    """

    name: str
    costs: PlanCosts
    head: str | None = None
    tail: str | None = None
    media: Mapping[str, str] = field(default_factory=dict)
    compression: Compression = "identity"
    escalation: Escalation | None = None
    answers_changed: Annotated[float, Range(0, 1)] | None = None
    leakage_db: Annotated[float, Range(-1000, 1000)] | None = None
    codes: Mapping[str, InputCodes] = field(default_factory=dict)
    decoder: str | None = None

    def __post_init__(self) -> None:
        if (self.name == LOCAL) != (self.tail is None):
            raise ValueError(f"plan '{self.name}': only the plan '{LOCAL}' has no tail")
        if self.tail is None and (self.head is not None or self.escalation is not None):
            raise ValueError(f"plan '{self.name}' sends nothing, so it has neither head nor escalation")
        if self.escalation is not None and self.head is None:
            raise ValueError(f"plan '{self.name}': a cascade needs a head")


@dataclass(frozen=True, slots=True)
class CutTable:
    """The plans of a package.

    Attributes:
        plans: the plans, at least one, with different names.
        objective: the objective for which the plans were chosen.
        device, server: machines that the costs were measured on, such as `Cortex-A76, 4 cores`.
        latency_limit_s: for capacity, limit of 99 % of requests; for energy, limit of a request.
        radio_w: power of the device's radio, above idle, from the request until the reply has come; with it,
            every plan has `device_j`.

    Raises:
        ValueError: there are no plans, too many, or two of one name; or a field that the objective needs is
            missing.
    """

    plans: tuple[OffloadPlan, ...]
    objective: Objective = "latency"
    device: str = ""
    server: str = ""
    latency_limit_s: _Seconds | None = None
    radio_w: Annotated[float, Range(0, 1000)] | None = None
    version: Annotated[int, Range(1, 1)] = 1

    def __post_init__(self) -> None:
        names = [plan.name for plan in self.plans]
        if not 1 <= len(names) <= MAX_PLANS:
            raise ValueError(f"holds {len(names)} plans, expected 1 to {MAX_PLANS}")
        if len(set(names)) != len(names):
            raise ValueError(f"two plans have the same name: {', '.join(names)}")
        if self.objective == "capacity" and self.latency_limit_s is None:
            raise ValueError("the objective capacity needs latency_limit_s")
        if self.objective == "energy" and self.radio_w is None:
            raise ValueError("the objective energy needs radio_w")
        if self.radio_w is not None and any(plan.costs.device_j is None for plan in self.plans):
            raise ValueError("with radio_w, every plan needs device_j")

    @property
    def local(self) -> OffloadPlan | None:
        """The plan that sends nothing; None if the model is too large for the device."""
        return next((plan for plan in self.plans if plan.tail is None), None)


def read_cut_table(package: OpenedPackage) -> CutTable | None:
    """Return the cut table of a verified package with all its plans, or None if it has none.

    Raises:
        CutError: the table is malformed, or names a submodel that is not in the package.
    """
    artifacts = package.manifest.artifacts
    paths = [artifact.path for role in TABLE_ROLES for artifact in artifacts if artifact.role == role]
    if not paths:
        return None
    where = f"{package.path}: {', '.join(paths)}"
    try:
        plain, *further = (json.loads(bytes(package.read(path))) for path in paths)
        for plans in further:
            plain["plans"] += plans
    except (ValueError, RecursionError, KeyError, TypeError) as cause:
        raise CutError(f"{where}: no JSON: {cause}; package the model again") from cause
    table = from_plain(CutTable, plain, where, CutError)
    submodel_names = {submodel.name for submodel in package.manifest.submodels}
    for plan in table.plans:
        for part in (plan.head, plan.decoder):
            if part is not None and part not in submodel_names:
                raise CutError(
                    f"{where}: plan '{plan.name}' needs the submodel '{part}', the package has none"
                )
    return table
