"""Damaged photographs and recordings: an answer or an error of ours, whatever the bytes are."""

import io
import random
import wave

import numpy as np
import pytest
from tests.service.answer_parts import LETTERBOX, draw, encode

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.preprocessing.rules import read_rules
from edgekit_runtime.tasks.answerer import Answerer
from edgekit_runtime.tensors import TensorSpec

ROUNDS = 400
PICTURES = Answerer(
    TensorSpec("x", "float32", (1, 3, 64, 64)),
    rules=read_rules(LETTERBOX, TensorSpec("x", "float32", (1, 3, 64, 64))),
    task=None,
)
SOUND = Answerer(
    TensorSpec("x", "float32", (1, 800)),
    rules=read_rules(
        {"type": "audio", "sample_rate": 8000, "samples": 800}, TensorSpec("x", "float32", (1, 800))
    ),
    task=None,
)


def make_wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(8000)
        writer.writeframes(np.arange(800, dtype="<i2").tobytes())
    return file.getvalue()


def damage(data: bytes, draws: random.Random) -> bytes:
    """Return data with a few bytes changed, removed, doubled or put in, most of them near its start."""
    changed = bytearray(data)
    for _ in range(draws.randint(1, 6)):
        at = min(int(draws.expovariate(1 / 60)), len(changed) - 1)
        count = draws.randint(1, 8)
        match draws.randrange(4):
            case 0:
                changed[at] = draws.randrange(256)
            case 1:
                del changed[at : at + count]
            case 2:
                changed[at:at] = changed[at : at + count]
            case _:
                changed[at:at] = draws.choice((b"\xff", b"\0", b"\xff\xff\xff\xff", b"\x7f\xff")) * count
    return bytes(changed[: draws.randint(0, len(changed))] if draws.random() < 0.2 else changed) or b"\0"


@pytest.mark.parametrize("kind", ["image/jpeg", "image/png", "image/webp", "image/bmp", "audio/wav"])
def test_damaged_file_gives_an_input_or_an_error_of_ours(kind: str) -> None:
    draws = random.Random(kind)
    form = kind.partition("/")[2].upper()
    data = make_wav() if form == "WAV" else encode(draw(red=(1, 2), green=(3, 0)), form)
    answerer = SOUND if form == "WAV" else PICTURES
    media_type, refused = MediaType.parse(kind), 0
    for _ in range(ROUNDS):
        try:
            (array,) = answerer.prepare(damage(data, draws), media_type, 1 << 20).inputs.values()
        except EdgekitError:  # noqa: PERF203  # each file is a case
            refused += 1
        else:
            assert array.dtype == np.float32
            assert np.isfinite(array).all()
    assert refused > 0
