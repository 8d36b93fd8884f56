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
    """Costs of a plan for a request of one row, without the link. The machines have no other load.

    Attributes:
        device_s: time on the device to run kernels and to encode and decode tensors.
        server_s: time on the server to run kernels and to decode tensors.
        upload_bytes, download_bytes: size of request and response on the link, with heads, TLS and packet
            headers (`wire_bytes`), as the mean over the samples.
        request_s, server_request_s: the parts of `device_s` and `server_s` for other work, such as HTTP.
        device_j: energy of the device during `device_s`, above idle, or None if unknown.
        is_measured: True if the plan was measured as a whole, False if its times are sums over kernels.
        plain_bytes: size of the request without compression, or None if it is not compressed or unknown.
        compress_s, decompress_s: the parts of `device_s` and `server_s` for compression.
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
    """The rule of a cascade: a request is sent to the server if the small model's answer is uncertain.

    Attributes:
        output: output of the head whose last axis contains class scores.
        least_margin: minimum difference of the two highest scores at which the head's answer is used.
        share: share of the calibration samples that are sent to the server.
    """

    output: str
    least_margin: Annotated[float, Range(-1e6, 1e6)]
    share: Annotated[float, Range(0, 1)]


@dataclass(frozen=True, slots=True)
class InputCodes:
    """The equally spaced values that a head can encode. All channels have one range, or each has its own.

    Values outside the range would be clipped, so a request with such values uses another plan.

    Attributes:
        lowest, highest: values of the first and the last code.
        step: distance between the values of two adjacent codes.
        is_grid: whether values between two codes count as outside the range. If not, they are rounded.
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
        name: name, unique in the table. `local` runs the whole model on the device.
        head: submodel that runs on the device first, or None if the inputs are sent unchanged.
        tail: name of the model on the server, or None if nothing is sent.
        media: a dict from each tensor that is sent as a file to codec and quality, such as `jpeg:90`. The
            tail receives the encoded bytes.
        compression: compression of the request's body. It is used only while it saves time, see
            `latency_model.as_sent`.
        escalation: rule of a cascade, or None for other plans. A cascade uses the answer of `head` if the
            rule allows it.
        codes: a dict from each input of the model to the values that the head can encode. Inputs that are not
            in the dict have no limit.
        decoder: submodel that restores the outputs on the device from the codes in a reply, or None if
            outputs are sent unchanged.
        answers_changed: share of the samples whose answer differs from that of the whole model, or None if
            unknown.
        leakage_db: lower bound of the quality, as PSNR, with which an attacker can recover the input from the
            sent tensors. None if unknown, if nothing is sent, or if an input is sent, even if it is encoded.

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
