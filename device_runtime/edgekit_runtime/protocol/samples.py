"""Samples from the field: the orders of a fleet, and the file format of a sample.

An order says how many requests of a model to keep, and which ones:

    SampleOrder(id="o-7", model="detector", triggers=(SampleTrigger(kind="uncertain", threshold=0.2),),
                per_day=20.0, max_bytes=50 << 20, ends_at=..., public_key="...")

A trigger draws each fitting request with a probability p, which is set before the request arrives. If several
triggers fit, the sample has the probability 1 - (1 - p1)(1 - p2)... A sample of probability q represents
1 / q requests, which makes unbiased estimates possible.

    write_sample(sample)    returns the plain file: header, unchanged input, answer
    read_sample(data)       parses a plain file from an untrusted source

A device stores and sends the plain file encrypted with the public key of the order, so that only the fleet
can open it: `encryption.key_wrapping.seal(plain, public_key, sample_info(id))`. It is uploaded with the
device's certificate:

    HEAD /samples/ID    200: all bytes are stored
                        204: `Upload-Offset` bytes are stored
                        404: no bytes are stored
    PUT /samples/ID     sends bytes FIRST to LAST, with `Content-Range: bytes FIRST-LAST/SIZE`
                        201: all bytes are stored, and the device deletes the sample
                        202: the device continues at `Upload-Offset`
                        409: the offset was wrong, and the device continues at `Upload-Offset`
                        403, 410, 413, 422: rejected, and the device deletes the sample
                        other statuses: the device tries again later
"""

import json
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Final

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import Range, from_plain, to_plain
from edgekit_runtime.errors import DataError
from edgekit_runtime.records import dataclass

SAMPLES_FILE: Final = "samples.json"
"""The file in the agent's folder with the fleet's orders, which the service follows."""

TRIGGERS: Final[Mapping[str, str]] = {
    "uncertain": "the two best scores, or the score of a box and its complement, differ by at most the"
    " threshold (0.2)",
    "disagreement": "the version on trial, or where a server answered the model here, answers otherwise",
    "drift": "an input or output lies in a range that the package's reference does not have",
    "random": "drawn at random, at one rate for all requests: enough alone for unbiased estimates",
    "kept": "the application asked for it",
}
"""A dict from kinds of triggers to the requests that they draw."""

MAX_ORDERS: Final = 16
MAX_TRIGGERS: Final = 8
MAX_SAMPLE_BYTES: Final = 16 << 20
MAX_SEALED_BYTES: Final = MAX_SAMPLE_BYTES + (1 << 20)
"""The maximum size of a sealed sample with header and answer."""
SAMPLE_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
ORDER_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
MAX_ANSWER_BYTES: Final = 512 << 10
_MAX_HEADER_BYTES: Final = 64 << 10
_MAX_DEPTH: Final = 32  # of an answer
_MAX_RANK: Final = 32
_LENGTHS: Final = (4, 8, 8)  # bytes of the lengths of header, input and answer at the beginning
_MAGIC: Final = b"edgekit-sample/1\n"
_MAX_TENSORS: Final = 64
_MAX_TEXT: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTrigger:
    """A reason to keep a request.

    Attributes:
        kind: A key of `TRIGGERS`. A device ignores an unknown kind and reports it.
        threshold: For `uncertain`, the maximum difference between the two best scores of an answer.
        per_day: The number of samples that this trigger may draw per day, or None for `per_day` of the order.
    """

    kind: str
    threshold: Annotated[float | None, Range(0, 1)] = None
    per_day: Annotated[float | None, Range(0.001, 10**6)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """An order of the fleet for samples of a model.

    Attributes:
        id: The id of the order in the fleet, made of letters, digits, `_` and `-`.
        model: The name of the model.
        per_day: The number of samples per day and device for all triggers together.
        max_bytes: The maximum total size of the samples that wait on the device to be sent.
        max_sample_bytes: The maximum size of a sample. Larger requests are not kept.
        ends_at: The end of the order, in seconds since 1970. Samples that are waiting at this time are still
            sent.
        window: The local time of day at which samples are sent, such as `01:00-04:00`, or None for any time.
        public_key: The key that samples are encrypted with, an uncompressed P-256 point in base64.
    """

    id: str
    model: str
    triggers: tuple[SampleTrigger, ...]
    per_day: Annotated[float, Range(0.001, 10**6)]
    max_bytes: Annotated[int, Range(1, 1 << 40)]
    max_sample_bytes: Annotated[int, Range(1, MAX_SAMPLE_BYTES)] = MAX_SAMPLE_BYTES
    ends_at: Annotated[float, Range(0, 10**11)]
    window: str | None = None
    public_key: str

    def __post_init__(self) -> None:
        if ORDER_ID.fullmatch(self.id) is None:
            raise ValueError(f"id of an order is {self.id[:80]!r}, expected letters, digits, _ and -")
        if not 0 < len(self.triggers) <= MAX_TRIGGERS:
            raise ValueError(f"an order has {len(self.triggers)} triggers, expected 1 to {MAX_TRIGGERS}")
        if len({trigger.kind for trigger in self.triggers}) < len(self.triggers):
            raise ValueError("an order has a trigger twice")


def check_orders(orders: tuple[SampleOrder, ...]) -> None:
    """Check the number and the ids of the orders of one device.

    Raises:
        ValueError: There are more than `MAX_ORDERS` orders, or two have the same id.
    """
    if len(orders) > MAX_ORDERS or len({order.id for order in orders}) < len(orders):
        raise ValueError(f"samples: {len(orders)} orders, expected at most {MAX_ORDERS}, each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTensor:
    """An input tensor of a request without a media type.

    Attributes:
        name: The name of the input.
        dtype: The dtype, such as `float32`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleHeader:
    """The metadata of a sample.

    Attributes:
        id: 32 random hexadecimal digits, also used as the file name.
        order: The id of the order.
        model, version, package_sha256: The package that answered, and the digest of its manifest.
        taken_at: The time of the request by the device's clock, in seconds since 1970.
        triggers: The kinds of the triggers that selected the request.
        probability: The probability with which the request was selected. It is 1 if only the trigger `kept`
            selected it.
        media_type: The media type, such as `image/jpeg`. Empty for tensors.
        tensors: The input tensors. Their values are concatenated in `Sample.input`, in C order and
            little-endian.
    """

    id: str
    order: str
    model: str
    version: str
    package_sha256: str
    taken_at: Annotated[float, Range(0, 10**11)]
    triggers: tuple[str, ...]
    probability: Annotated[float, Range(1e-9, 1)]
    media_type: str = ""
    tensors: tuple[SampleTensor, ...] = ()

    def __post_init__(self) -> None:
        if SAMPLE_ID.fullmatch(self.id) is None:
            raise ValueError(f"id is {self.id[:60]!r}, expected 32 hexadecimal digits")
        of_tensors = (text for tensor in self.tensors for text in (tensor.name, tensor.dtype))
        texts = (self.order, self.model, self.version, self.package_sha256, self.media_type, *self.triggers)
        if any(len(text) > _MAX_TEXT or not text.isprintable() for text in (*texts, *of_tensors)):
            raise ValueError(f"a text is longer than {_MAX_TEXT}, or cannot be printed")
        if not 0 < len(self.triggers) <= MAX_TRIGGERS or len(self.tensors) > _MAX_TENSORS:
            raise ValueError("too few or too many triggers or tensors")
        shapes = [tensor.shape for tensor in self.tensors]
        if any(len(shape) > _MAX_RANK for shape in shapes):
            raise ValueError(f"a tensor has over {_MAX_RANK} axes")
        if bool(self.media_type) == bool(self.tensors):
            raise ValueError("expected a media type, or tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A request that was kept, with its answer.

    Attributes:
        input: The file in the request, such as a JPEG, or the values of `header.tensors`.
        answer: The answer as plain JSON values. Empty if unknown.
    """

    header: SampleHeader
    input: bytes
    answer: Mapping[str, Any] = field(default_factory=dict)


def sample_info(sample_id: str) -> bytes:
    """Return the HPKE `info` that binds an encrypted sample to its id."""
    return b"edgekit sample 1\0" + sample_id.encode("ascii")


def write_sample(sample: Sample) -> bytes:
    """Return the plain file of a sample."""
    parts = (encode_json(to_plain(sample.header)), sample.input, encode_json(sample.answer))
    lengths = (len(part).to_bytes(width, "big") for part, width in zip(parts, _LENGTHS, strict=True))
    return b"".join((_MAGIC, *lengths, *parts))


def read_sample(data: bytes) -> Sample:
    """Parse the plain file of a sample. The input is not decoded.

    Raises:
        DataError: `data` is not a sample.
    """
    position, lengths = len(_MAGIC), []
    for width in _LENGTHS:
        lengths.append(int.from_bytes(data[position : position + width], "big"))
        position += width
    if not data.startswith(_MAGIC) or position + sum(lengths) != len(data):
        raise DataError("this is no sample, or a truncated one")
    if lengths[0] > _MAX_HEADER_BYTES or lengths[2] > MAX_ANSWER_BYTES:
        raise DataError("the sample's header or answer is too large")
    parts = []
    for length in lengths:
        parts.append(data[position : position + length])
        position += length
    try:
        header, answer = json.loads(parts[0]), json.loads(parts[2])
        encode_json(answer)
    except (ValueError, RecursionError) as cause:
        raise DataError(f"the sample's header or answer is not JSON: {cause}") from cause
    if not isinstance(answer, dict) or not _is_within(_MAX_DEPTH, answer):
        raise DataError("the sample's answer is no object, or nested too deeply")
    return Sample(header=from_plain(SampleHeader, header, "header", DataError), input=parts[1], answer=answer)


def _is_within(depth: int, value: object) -> bool:
    """Return whether a JSON value has at most so many levels of arrays and objects."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth >= 0 and all(_is_within(depth - 1, part) for part in parts)
