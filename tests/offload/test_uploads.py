"""Uploads of the whole input: each kind of data is compared in its fair codec, or the plan says why not."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.toolkit.cases import cases

from edgekit_offload.planning.uploads import UploadCandidate, WholeModel, find_uploads
from edgekit_runtime.codecs.media import OPUS_RATES_HZ

WHOLE = WholeModel(server_s=0.1, output_bytes=40.0, outputs=1, device_slowdown=1.0, server_slowdown=1.0)
SAMPLES = 8000


def make_sound(shape: tuple[int, ...], dtype: str, count: int = 3) -> list[NDArray[Any]]:
    """Return tones at a level of a third."""
    t = np.arange(SAMPLES) / 16_000
    tones = [np.rint(10_000 * np.sin(2 * np.pi * 300 * (n + 1) * t)).reshape(shape) for n in range(count)]
    return [one.astype(np.int16) if dtype == "int16" else one.astype(np.float32) / 32768 for one in tones]


def make_series(shape: tuple[int, ...], dtype: str, count: int = 20) -> list[NDArray[Any]]:
    """Return random walks of a sensor."""
    rng, least = np.random.default_rng(1), 0 if dtype.startswith("u") else -100
    walks = [rng.integers(-2, 3, shape).cumsum(-1) for _ in range(count)]
    return [np.clip(one, least, 100).astype(dtype) for one in walks]


def find(
    rate_hz: float | None = None, **inputs: list[NDArray[Any]]
) -> tuple[dict[str, UploadCandidate], dict[str, str]]:
    """Return the candidates by name, and for each codec that is missing the reason."""
    feeds = [dict(zip(inputs, each, strict=True)) for each in zip(*inputs.values(), strict=True)]
    candidates, refusals = find_uploads(feeds, WHOLE, rate_hz)
    assert all("\n" not in one.reason for one in refusals)
    return {one.plan.name: one for one in candidates}, {one.name: one.reason for one in refusals}


@pytest.mark.parametrize("shape", [(SAMPLES,), (1, SAMPLES), (1, 1, SAMPLES), (1, SAMPLES, 1)])
@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_sound_is_compared_as_opus(dtype: str, shape: tuple[int, ...]) -> None:
    pytest.importorskip("soundfile", reason="soundfile is not installed")
    candidates, missing = find(x=make_sound(shape, dtype))
    assert set(candidates) == {"raw", "delta", "opus:24"}
    assert set(missing) == {"jpeg"}
    opus = candidates["opus:24"]
    assert opus.plan.media == {"x.samples": "opus:24"}
    assert opus.plan.costs.upload_bytes < candidates["raw"].plan.costs.upload_bytes / 4
    assert "16 kHz, assumed" in opus.sent[0].rounding


@pytest.mark.parametrize("rate_hz", OPUS_RATES_HZ)
def test_opus_gets_the_stated_sample_rate(rate_hz: int) -> None:
    pytest.importorskip("soundfile", reason="soundfile is not installed")
    candidates, _ = find(rate_hz, x=make_sound((1, SAMPLES), "float32"))
    opus = candidates["opus:24"]
    codec = "opus:24" if rate_hz == 16_000 else f"opus:24@{rate_hz}"
    assert opus.plan.media == {"x.samples": codec}
    assert opus.sent[0].rounding == f"at {rate_hz / 1000:g} kHz"


@pytest.mark.parametrize(
    ("sound", "rate_hz", "reason"),
    [
        (make_sound((1, SAMPLES), "float32"), 44_100.0, "'x' has 44.1 kHz, Opus takes 8, 12, 16, 24, 48 kHz"),
        ([one * 4 for one in make_sound((1, SAMPLES), "float32")], None, "'x' goes beyond -1..1"),
        ([one.astype(np.int32) for one in make_sound((1, SAMPLES), "int16")], None, "'x' is int32"),
        ([one[:, :3000] for one in make_sound((1, SAMPLES), "int16")], None, "[1, 3000] is no sound"),
    ],
)
def test_sound_that_opus_cannot_carry_is_named(
    sound: list[NDArray[Any]], rate_hz: float | None, reason: str
) -> None:
    candidates, missing = find(rate_hz, x=sound)
    assert "opus:24" not in candidates
    assert missing["opus"].startswith("Opus is not compared: ")
    assert reason in missing["opus"]


@cases("dtype", ["int8", "uint8", "int16", "uint16", "int32", "int64", "float32"])
@cases("shape", [(512,), (1, 512), (1, 3, 512)])
def test_series_is_compared_as_differences(dtype: str, shape: tuple[int, ...]) -> None:
    pytest.importorskip("zstandard", reason="zstandard is not installed")
    candidates, missing = find(x=make_series(shape, dtype))
    assert "delta" in candidates
    assert set(missing) == {"jpeg", "opus"}
    assert candidates["delta"].plan.costs.upload_bytes < candidates["raw"].plan.costs.upload_bytes
    assert not candidates["delta"].sent[0].rounding


def test_integers_that_are_no_series_are_named() -> None:
    tokens = list(np.random.default_rng(2).integers(0, 30_000, (10, 1, 128)))
    candidates, missing = find(x=tokens)
    assert set(candidates) == {"raw"}
    assert "differences of 'x' take as much as its values" in missing["delta"]
    assert set(missing) == {"jpeg", "delta", "opus"}


def test_each_of_several_inputs_is_compared_in_its_codec() -> None:
    pytest.importorskip("PIL", reason="needs Pillow")
    pytest.importorskip("soundfile", reason="soundfile is not installed")
    rng = np.random.default_rng(3)
    pixels = [rng.integers(0, 256, (1, 3, 16, 16)).astype(np.float32) / 255 for _ in range(3)]
    photos = [rng.integers(0, 256, (1, 16, 16, 3)).astype(np.uint8) for _ in range(3)]
    series = [one.astype(np.float32) * np.float32(np.pi) for one in make_series((1, 3, 512), "int32", 3)]
    candidates, missing = find(
        image=pixels, photo=photos, sound=make_sound((1, SAMPLES), "float32"), walk=series
    )
    assert not missing
    sent = {name: {one.name: one.coding for one in candidate.sent} for name, candidate in candidates.items()}
    assert sent["jpeg:90"] == {"image": "jpeg:90", "photo": "jpeg:90", "sound": "raw", "walk": "raw"}
    assert candidates["jpeg:90"].plan.media == {"image.pixels": "jpeg:90", "photo": "jpeg:90"}
    assert set(candidates["jpeg:90"].coding.lattices) == {"image"}
    assert sent["opus:24"] == {"image": "raw", "photo": "raw", "sound": "opus:24", "walk": "raw"}
    assert sent["delta"] == {"image": "raw", "photo": "raw", "sound": "delta", "walk": "delta"}
    assert sent["uint8"]["image"] == "uint8"
