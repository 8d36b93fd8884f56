"""Recordings as samples: what the preprocessing makes of WAV files, and what is refused."""

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.source import open_data

FLAT = (TensorSpec("sound", "float32", ("N", 6)),)
FREE = (TensorSpec("sound", "float32", ("N", 1, "samples")),)
FIELDS = {"type": "audio", "sample_rate": 8000}


def saved(path: Path, frames: Any, *, rate: int = 8000) -> Path:
    """Write frames [samples] or [samples, channels], uint8, int16 or int32."""
    values = np.asarray(frames)
    with wave.open(str(path), "wb") as file:
        file.setparams((1 if values.ndim == 1 else values.shape[1], values.itemsize, rate, 0, "NONE", ""))
        file.writeframes(values.astype(values.dtype.newbyteorder("<")).tobytes())
    return path


def one(path: Path, inputs: Any, fields: Any) -> Any:
    ((feeds, _),) = open_data(path, inputs, decoding=Decoding(fields)).stream(1)
    return feeds[inputs[0].name][0]


@pytest.mark.parametrize(
    "frames",
    [
        np.array([0, 64, 128, 192], np.uint8),
        np.array([-32768, -16384, 0, 16384], np.int16),
        np.array([-(2**31), -(2**30), 0, 2**30], np.int32),
    ],
)
def test_every_width_gives_amplitudes_from_minus_one_to_one(frames: Any, tmp_path: Path) -> None:
    assert one(saved(tmp_path / "a.wav", frames), FREE, FIELDS).tolist() == [[-1.0, -0.5, 0.0, 0.5]]


def test_24_bits_are_read(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 3, 8000, 0, "NONE", ""))
        file.writeframes(b"\x00\x00\xc0" + b"\x00\x00\x40")
    assert one(tmp_path / "a.wav", FREE, FIELDS).tolist() == [[-0.5, 0.5]]


def test_stereo_is_averaged_and_length_is_settled(tmp_path: Path) -> None:
    stereo = np.array([[16384, 0], [-16384, 16384]], np.int16)
    fields = FIELDS | {"samples": 6}
    assert one(saved(tmp_path / "a.wav", stereo), FLAT, fields).tolist() == [0.25, 0, 0, 0, 0, 0]
    long = np.arange(9, dtype=np.int16) * 4096 - 16384
    assert one(saved(tmp_path / "b.wav", long), FLAT, fields).tolist() == [
        -0.5,
        -0.375,
        -0.25,
        -0.125,
        0,
        0.125,
    ]


def test_scale_mean_and_std_apply(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.wav", np.array([-16384, 16384], np.int16))
    fields = FIELDS | {"scale": 32768, "mean": 16384, "std": 2}
    assert one(path, FREE, fields).tolist() == [[-16384, 0]]


def test_class_folders_of_recordings_give_labels(tmp_path: Path) -> None:
    for name in ("no", "yes"):
        (tmp_path / name).mkdir()
        saved(tmp_path / name / "1.wav", np.zeros(6, np.int16))
    source = open_data(tmp_path, FLAT, decoding=Decoding(FIELDS, ("yes", "no")))
    assert [int(label[0]) for _, label in source.stream(1) if label is not None] == [1, 0]


def test_other_sample_rate_and_length_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.wav", np.zeros(5, np.int16), rate=44100)
    with pytest.raises(DataError, match=r"has 44100 Hz, expected 8000 .*ffmpeg -i in.wav -ar 8000"):
        one(path, FLAT, FIELDS)
    path = saved(tmp_path / "b.wav", np.zeros(5, np.int16))
    with pytest.raises(DataError, match=r"has shape \[5\] .* takes \[6\]; change 'samples'"):
        one(path, FLAT, FIELDS)


def test_features_of_recordings_are_samples(tmp_path: Path) -> None:
    takes = (TensorSpec("sound", "float32", ("N", 5, 4, 1)),)
    features = {"kind": "mfcc", "frame": 64, "hop": 32, "mel_bins": 8, "high_hz": 3000, "coefficients": 4}
    path = saved(tmp_path / "a.wav", np.arange(192, dtype=np.int16) * 50)
    sample = one(path, takes, FIELDS | {"features": features})
    assert (sample.shape, np.isfinite(sample).all()) == ((5, 4, 1), True)
    saved(path, np.zeros(96, np.int16))
    with pytest.raises(DataError, match=r"has shape \[2, 4, 1\] .* change 'samples' or 'features'"):
        one(path, takes, FIELDS | {"features": features})
    with pytest.raises(DataError, match=r"is no audio; state 'features' of the sound"):
        one(path, takes, None)


def test_damaged_and_empty_recordings_are_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path / "a.wav", np.zeros(600, np.int16)).read_bytes()
    for content, message in (
        (whole[:-100], "is cut short"),
        (b"no sound", "is no WAV file"),
        (b"", "is no WAV file"),
        (saved(tmp_path / "a.wav", np.zeros(0, np.int16)).read_bytes(), "holds no sound"),
    ):
        (tmp_path / "a.wav").write_bytes(content)
        with pytest.raises(DataError, match=f"a.wav: {message}"):
            one(tmp_path / "a.wav", FREE, FIELDS)


def test_error_without_preprocessing_shows_one_that_works(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.wav", np.zeros(9, np.int16), rate=16000)
    with pytest.raises(DataError, match=r'{"type": "audio", "sample_rate": 16000, "samples": 6}'):
        one(path, FLAT, None)
    assert one(path, FLAT, {"type": "audio", "sample_rate": 16000, "samples": 6}).shape == (6,)
