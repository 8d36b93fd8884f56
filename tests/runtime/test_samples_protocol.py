"""Orders of samples, and the file of one sample, which may be hostile."""

import dataclasses

import pytest

from edgekit_runtime.errors import DataError
from edgekit_runtime.protocol.samples import (
    MAX_ORDERS,
    Sample,
    SampleHeader,
    SampleOrder,
    SampleTensor,
    SampleTrigger,
    check_orders,
    read_sample,
    write_sample,
)

HEADER = SampleHeader(
    id="0" * 32,
    order="o-1",
    model="detector",
    version="1.2.0",
    package_sha256="a" * 64,
    taken_at=1.8e9,
    triggers=("uncertain", "random"),
    probability=0.125,
    media_type="image/jpeg",
)
SAMPLE = Sample(header=HEADER, input=b"\xff\xd8 a picture", answer={"label": "cat", "score": 0.5})


def make_order(number: int) -> SampleOrder:
    return SampleOrder(
        id=f"o-{number}",
        model="detector",
        triggers=(SampleTrigger(kind="random"),),
        per_day=20.0,
        max_bytes=50 << 20,
        ends_at=1.8e9,
        public_key="",
    )


def test_a_written_sample_is_read_as_it_was() -> None:
    tensors = dataclasses.replace(
        HEADER, media_type="", tensors=(SampleTensor(name="x", dtype="float32", shape=(1, 3)),)
    )

    assert read_sample(write_sample(SAMPLE)) == SAMPLE
    assert read_sample(write_sample(dataclasses.replace(SAMPLE, header=tensors))).header == tensors


def test_each_cut_of_a_sample_is_refused() -> None:
    data = write_sample(SAMPLE)

    for end in range(len(data)):
        with pytest.raises(DataError):
            read_sample(data[:end])
    with pytest.raises(DataError, match="truncated"):
        read_sample(data + b"\0")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "../../etc/passwd"),
        ("id", "0" * 31 + "\n"),
        ("model", "x" * 257),
        ("version", "1\r\nSet-Cookie: a"),
        ("probability", 0),
        ("probability", float("nan")),
        ("triggers", []),
        ("media_type", ""),
        ("surprise", 1),
        ("tensors", [{"name": "a\n", "dtype": "float32", "shape": [1]}]),
        ("tensors", [{"name": "a", "dtype": "float32", "shape": [-1]}]),
        ("tensors", [{"name": "a", "dtype": "float32", "shape": [1] * 33}]),
    ],
)
def test_a_header_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    from edgekit_runtime.canonical_json import encode_json
    from edgekit_runtime.dataclass_json import from_plain, to_plain

    plain = {**to_plain(HEADER), **({"media_type": ""} if field == "tensors" else {}), field: value}
    with pytest.raises(DataError):
        from_plain(SampleHeader, plain, "header", DataError)
    if value == value:  # JSON has no NaN
        data = write_sample(SAMPLE)
        length = int.from_bytes(data[17:21], "big")
        header = encode_json(plain)
        with pytest.raises(DataError):
            read_sample(
                data[:17] + len(header).to_bytes(4, "big") + data[21:37] + header + data[37 + length :]
            )


@pytest.mark.parametrize(
    "answer",
    [
        b"[]",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}",
        b'{"a": ' + b"[" * 99_999 + b"]" * 99_999 + b"}",
        b'{"a": [' + b"[]," * 200_000 + b"[]]}",
    ],
    ids=["array", "NaN", "surrogate", "deep", "deeper", "huge"],
)
def test_an_answer_that_nobody_can_show_is_refused(answer: bytes) -> None:
    data = write_sample(dataclasses.replace(SAMPLE, answer={}))

    with pytest.raises(DataError, match="answer"):
        read_sample(data[:29] + len(answer).to_bytes(8, "big") + data[37:-2] + answer)


def test_too_many_orders_and_two_of_one_name_are_refused() -> None:
    check_orders(tuple(map(make_order, range(MAX_ORDERS))))
    with pytest.raises(ValueError, match="at most"):
        check_orders(tuple(map(make_order, range(MAX_ORDERS + 1))))
    with pytest.raises(ValueError, match="each once"):
        check_orders((make_order(1), make_order(1)))
    with pytest.raises(ValueError, match="0 triggers"):
        dataclasses.replace(make_order(1), triggers=())
    with pytest.raises(ValueError, match="twice"):
        dataclasses.replace(make_order(1), triggers=(SampleTrigger(kind="random"),) * 2)
