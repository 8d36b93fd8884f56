"""The coder of small bytes: what it makes of them, and what it does with damaged streams."""

import contextlib
import hashlib
import io

import numpy as np
import pytest

from edgekit_host.transport.rans_encoder import encode
from edgekit_runtime.codecs.rans import CHUNK, RansDecoder


def draw(count, spread=4.0, seed=0):
    """Bytes that are mostly small, as folded weights are."""
    return np.minimum(255, np.random.default_rng(seed).exponential(spread, count)).astype(np.uint8)


def decode(stream, count):
    return RansDecoder(io.BytesIO(stream).read, count).read(count)


SPREADS = (0, 0.3, 4, 60, 1e9)


@pytest.mark.parametrize(
    ("count", "spread"),
    [
        *((count, spread) for count in (0, 1, 3, 4, 5, 40_000) for spread in SPREADS),
        *((count, 4) for count in (CHUNK, CHUNK + 1, 700_001)),
        (CHUNK + 1, 1e9),
    ],
)
def test_encoded_bytes_are_decoded(count, spread):
    content = draw(count, spread)
    assert decode(encode(content), count) == content.tobytes()


def test_bytes_can_be_read_in_pieces():
    content = draw(300_000)
    decoder = RansDecoder(io.BytesIO(encode(content)).read, len(content))
    pieces = [decoder.read(count) for count in (1, 0, 262_143, 10, 37_846)]
    assert b"".join(pieces) == content.tobytes()


@pytest.mark.parametrize("spread", [0.5, 4, 30])
def test_stream_of_a_small_model_is_near_its_entropy(spread):
    content = draw(17_000, spread)
    shares = np.bincount(content) / len(content)
    entropy_bytes = -len(content) * np.sum(shares * np.log2(shares, where=shares > 0, out=0 * shares)) / 8
    assert len(encode(content)) < 1.02 * entropy_bytes + 60


def test_bytes_whose_spread_changes_take_less_than_their_common_entropy():
    content = np.concatenate([draw(3000, spread, seed) for seed, spread in enumerate((0.3, 40, 1, 90, 5))])
    shares = np.bincount(content) / len(content)
    entropy_bytes = -len(content) * np.sum(shares * np.log2(shares, where=shares > 0, out=0 * shares)) / 8
    assert len(encode(content)) < 0.85 * entropy_bytes


def test_stream_is_the_same_on_all_machines():
    content = (np.arange(100_000) * 2_654_435_761 % 2**32 >> 26).astype(np.uint8) ** 2 // 64
    assert hashlib.sha256(encode(content)).hexdigest()[:16] == "48fcc8f0e60990b8"


def test_truncated_stream_is_refused(is_long):
    content = draw(5000)
    stream = encode(content)
    for end in range(0, len(stream), 7 if is_long else 29):
        with pytest.raises(ValueError, match=r"too early|buffer size"):
            decode(stream[:end], len(content))


def test_more_bytes_than_coded_are_refused():
    with pytest.raises(ValueError, match="fewer coded bytes"):
        RansDecoder(io.BytesIO(encode(draw(100))).read, 100).read(101)


def test_random_stream_makes_only_the_stated_bytes(is_long):
    rng = np.random.default_rng(3)
    for _ in range(2000 if is_long else 500):
        count = int(rng.integers(300))
        with contextlib.suppress(ValueError):
            assert len(decode(rng.bytes(rng.integers(400)), count)) == count
