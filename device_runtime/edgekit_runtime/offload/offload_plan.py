"""A plan: one way to run a model between a device and a server, with its costs."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Final, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.records import dataclass

LOCAL: Final = "local"

Compression: TypeAlias = Literal["identity", "zstd"]
Seconds: TypeAlias = Annotated[float, Range(0, 3600)]
_Bytes: TypeAlias = Annotated[float, Range(0, 1 << 40)]
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
        request_s, server_request_s: the rest of `device_s` and of `server_s`, without kernels and coding.
        device_j: energy of the device in `device_s`, above idle; None if unknown.
        is_measured: whether the plan was run as it is; otherwise its times are sums over kernels.
        plain_bytes: bytes of the request without compression; None if it is not compressed, or unknown.
        compress_s, decompress_s: parts of `device_s` and of `server_s` for compression.
    """

    device_s: Seconds
    server_s: Seconds = 0.0
    upload_bytes: _Bytes = 0.0
    download_bytes: _Bytes = 0.0
    request_s: Seconds = 0.0
    device_j: _Joules | None = None
    is_measured: bool = False
    plain_bytes: _Bytes | None = None
    compress_s: Seconds = 0.0
    decompress_s: Seconds = 0.0
    server_request_s: Seconds = 0.0


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
        is_grid: whether values between two codes count as beyond the range; otherwise they are rounded.
        axis: axis of the channels.

    Raises:
        ValueError: there are no channels, the tuples differ in length, or a step is not above 0.
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
        media: sent tensor -> codec and quality, such as `jpeg:90`. The tail takes the coded bytes.
        compression: compression of the request's body, used if it pays at the moment
            (`latency_model.as_sent`).
        escalation: rule of a cascade: if `head` is sure, its answer is used; None for other plans.
        codes: input of the model -> values that the head can code; inputs that are not named have no limit.
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
