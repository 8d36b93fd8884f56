"""WAV files of all codings, other sample rates, and features of sound."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.audio import AudioRules
from edgekit_runtime.preprocessing.resampling import resample
from edgekit_runtime.preprocessing.rules import read_rules
from edgekit_runtime.preprocessing.wav import WavFile, read_wav
from edgekit_runtime.tensors import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

FREE = TensorSpec("sound", "float32", ("N", "samples"))
SOUND = {"type": "audio", "sample_rate": 16000}
MFCC = {"kind": "mfcc", "frame": 480, "hop": 320, "coefficients": 10}
REFERENCE = json.loads((Path(__file__).parent / "sound_features.json").read_text())


def make_wav(frames: Array, rate: int = 16000, *, tag: int | None = None, tail: bytes = b"") -> bytes:
    """Return a WAV file of numbers [T] or [T, channels]; `tag` is its format, if it is a special one."""
    values = np.atleast_2d(frames.T).T
    channels, width = values.shape[1], values.itemsize
    plain = 3 if values.dtype.kind == "f" else 1
    head = struct.pack("<HHIIHH", tag or plain, channels, rate, 0, channels * width, 8 * width)
    if tag == 0xFFFE:
        head += struct.pack("<HHIH14x", 22, 8 * width, 0, plain)
    body = values.astype(values.dtype.newbyteorder("<")).tobytes()
    chunks = b"".join(
        name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)
        for name, data in ((b"LIST", b"odd"), (b"fmt ", head), (b"data", body))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks + tail


def make_sound(count: int, rate: int = 16000) -> Array:
    """Return a rising tone and a steady one, of which `sound_features.json` has the features."""
    time = np.arange(count) / rate
    rising = 0.5 * np.sin(2 * np.pi * (300 * time + 4000 * time**2))
    return (rising + 0.1 * np.cos(2 * np.pi * 1234 * time)).astype(np.float32)


def rules_for(fields: dict[str, Any], shape: tuple[int | str, ...], dtype: str = "float32") -> AudioRules:
    rules = read_rules(SOUND | fields, TensorSpec("sound", dtype, shape))
    assert isinstance(rules, AudioRules)
    return rules


@pytest.mark.parametrize("tag", [None, 0xFFFE])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float32", "float64"])
def test_all_codings_give_the_same_amplitudes(dtype: str, tag: int | None) -> None:
    wanted = np.array([-1, -0.5, 0, 0.5], np.float32)
    kind = np.dtype(dtype)
    scale = 1 if kind.kind == "f" else 2 ** (8 * kind.itemsize - 1)
    frames = (wanted.astype(np.float64) * scale + 128 * (dtype == "uint8")).astype(kind)
    amplitudes, rate = read_wav(make_wav(frames, 22050, tag=tag, tail=b"LIST"))
    assert (amplitudes.tolist(), rate) == (wanted.tolist(), 22050)


def test_channels_are_averaged_and_only_the_begin_is_read() -> None:
    stereo = np.stack([np.full(16000, 0.5), np.zeros(16000)], axis=1).astype(np.float32)
    amplitudes, _ = read_wav(make_wav(stereo), max_s=0.25)
    assert (len(amplitudes), set(amplitudes.tolist())) == (4001, {0.25})


def test_file_from_a_pipe_lasts_to_its_end() -> None:
    file = bytearray(make_wav(np.ones(10, np.float32)))
    position = file.index(b"data") + 4
    file[position : position + 4] = b"\xff\xff\xff\xff"
    assert len(read_wav(bytes(file))[0]) == 10


WHOLE = make_wav(np.zeros(100, np.int16))


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "is no WAV file"),
        (b"RIFF\0\0\0\0AVI " + WHOLE[12:], "is no WAV file"),
        (WHOLE[:-1], "is cut short"),
        (WHOLE[:40], "its format is cut short"),
        (WHOLE[:50], "is no WAV file that holds sound, or is damaged"),
        (WHOLE[:12] + b"fmt \x02\0\0\0\x01\0", "its format is cut short"),
        (WHOLE[:12] + WHOLE[48:], "holds sound, or is damaged"),  # data without a format
        (WHOLE[:12] + b"JUNK\0\0\0\0" * 5000, "holds sound, or is damaged"),
        (make_wav(np.zeros(0, np.int16)), "holds no sound"),
        (make_wav(np.zeros((10, 65), np.int16)), "states 65 channels"),
        (make_wav(np.zeros(10, np.int16), 0), "0 Hz"),
        (make_wav(np.zeros(10, np.int16), tag=2), "coded in the format 2 with 16 bits"),
        (make_wav(np.array([0, np.nan], np.float32)), "holds a NaN"),
        (make_wav(np.array([0, 1e300])), "infinite"),
        (make_wav(np.full((2, 2), 3e38, np.float32)), "infinite or over 2147483648"),
    ],
)
def test_damaged_files_are_refused_with_a_reason(file: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=f"the recording: .*{reason}"):
        read_wav(file)


# Other sample rates


@pytest.mark.parametrize("count", [1, 7, 4801])
@pytest.mark.parametrize(
    ("rate", "target"),
    [(48000, 16000), (44100, 16000), (8000, 16000), (16000, 44100), (11025, 16000), (192000, 11025)],
)
def test_resampling_is_that_of_scipy(rate: int, target: int, count: int) -> None:
    from scipy.signal import resample_poly  # a second, in each process that collects tests

    samples = np.random.default_rng(count).normal(size=count).astype(np.float32)
    expected = resample_poly(samples.astype(np.float64), target, rate)
    np.testing.assert_allclose(resample(samples, rate, target), expected, atol=1e-5)


def test_tone_keeps_its_pitch_at_another_rate() -> None:
    rules = rules_for({"samples": 8000, "resample": True}, ("N", 8000))
    tone = np.sin(2 * np.pi * 440 * np.arange(48000) / 48000)
    sample = rules.finish(rules.load(make_wav((tone * 30000).astype(np.int16), 48000)))
    assert sample.shape == (8000,)
    assert np.abs(np.fft.rfft(sample)).argmax() * 2 == 440


def test_only_the_sound_that_is_needed_is_resampled() -> None:
    rules = rules_for({"samples": 1600, "resample": True}, ("N", 1600))
    sound = make_sound(200_000, 48000)
    np.testing.assert_allclose(rules.fit(sound, 48000), resample(sound, 48000, 16000)[:1600], atol=1e-6)


@pytest.mark.parametrize("rate", [1, 160, 1600, 16001, 4_294_967_295])
def test_odd_rates_are_refused_before_a_filter_is_made(rate: int) -> None:
    rules = rules_for({"resample": True}, ("N", "samples"))
    with pytest.raises(DataError, match=f"{rate} Hz cannot become 16000 Hz.* the limits are 4096"):
        rules.load(make_wav(np.zeros(100, np.int16), rate))


def test_other_rates_are_refused_unless_it_is_stated() -> None:
    with pytest.raises(DataError, match=r"has 48000 Hz, expected 16000 .* set 'resample' there to true"):
        rules_for({}, ("N", "samples")).load(make_wav(np.zeros(100, np.int16), 48000))


# Features


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("log-mel", {"kind": "log-mel", "frame": 480, "hop": 320}),
        ("mfcc", MFCC),
        (
            "power",
            {"kind": "log-mel", "frame": 400, "hop": 160, "power": 2, "floor": 1e-3}
            | {"mel_bins": 20, "low_hz": 125, "high_hz": 7500},
        ),
    ],
)
def test_features_are_those_of_tensorflow(name: str, features: dict[str, Any]) -> None:
    rules = rules_for({"features": features}, ("N", "frames", "values"))
    np.testing.assert_allclose(rules.fit(make_sound(1600), 16000), REFERENCE[name], atol=2e-5)


def test_features_of_a_long_recording_are_those_of_its_parts() -> None:
    rules = rules_for({"features": MFCC}, ("N", "frames", 10))
    sound = make_sound(320 * 600 + 160)
    whole = rules.fit(sound, 16000)
    assert whole.shape == (600, 10)
    np.testing.assert_allclose(
        whole[500:503], rules.fit(sound[320 * 500 : 320 * 503 + 160], 16000), atol=1e-4
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (("N", 49, 10), "float32"),
        (("N", 10, 49), "float32"),
        (("N", 1, 49, 10), "float32"),
        (("N", 49, 10, 1), "float32"),
        (("N", 490), "float32"),
        (("N", "frames", 10, 1), "float32"),
        (("N", 49, 10, 1), "int8"),
    ],
)
def test_features_lie_as_the_input_takes_them(shape: tuple[int | str, ...], dtype: str) -> None:
    scaled = {"scale": 0.5, "mean": 1} if dtype == "int8" else {}
    rules = rules_for({"samples": 16000, "features": MFCC, **scaled}, shape, dtype)
    features = rules.fit(make_sound(16000), 16000)
    sample = rules.finish(features)
    TensorSpec("sound", dtype, shape).check(sample[None])
    plain = sample.reshape(10, 49).T if shape == ("N", 10, 49) else sample.reshape(49, 10)
    expected = features if dtype == "float32" else np.rint(features * 0.5 - 1).clip(-128, 127)
    np.testing.assert_allclose(plain, expected)


@pytest.mark.parametrize(
    ("fields", "shape", "reason"),
    [
        ({"features": MFCC, "samples": 8000}, ("N", 49, 10), r"are \[24, 10\], but .* takes \[49, 10\]"),
        ({"features": MFCC | {"coefficients": 13}}, ("N", 49, 10), r"\[0, 13\]"),
        ({"features": MFCC, "samples": 16000}, ("N", 1960), r"are \[490\], but .* takes \[1960\]"),
        ({"features": MFCC}, ("N", 3, 49, 10), "takes no features"),
        ({"features": MFCC}, ("N",), "takes no features"),
        ({"features": MFCC | {"hop": 1}}, ("N", 49, 10), "hop is 1, expected 16 to"),
        ({"features": MFCC | {"kind": "cqt"}}, ("N", 49, 10), "kind is 'cqt', expected one of log-mel, mfcc"),
        ({"features": MFCC | {"bins": 4}}, ("N", 49, 10), "unknown setting 'bins'"),
        ({"features": MFCC | {"coefficients": 41}}, ("N", 49, 41), "at most mel_bins"),
        ({"features": MFCC | {"low_hz": 5000}}, ("N", 49, 10), "low_hz is 5000"),
        ({"features": MFCC | {"high_hz": 9000}}, ("N", 49, 10), "half of the sample rate"),
        ({"features": {"kind": "mfcc"}}, ("N", 49, 10), "'frame' is missing"),
        ({"features": [1]}, ("N", 49, 10), "expected a table"),
        ({"resample": "yes"}, ("N", 6), "resample is 'yes', expected true or false"),
        ({}, ("N", 49, 10), "takes no sound: .* state 'features'"),
    ],
)
def test_rules_that_do_not_fit_are_refused(
    fields: dict[str, Any], shape: tuple[int | str, ...], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        rules_for(fields, shape)


def test_sound_shorter_than_a_frame_is_refused() -> None:
    rules = rules_for({"features": MFCC}, ("N", "frames", 10))
    with pytest.raises(
        DataError, match="the recording: the sound has 100 samples, a frame of the features 480"
    ):
        rules.load(make_wav(np.zeros(100, np.int16)))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float32", "float64"])
def test_a_file_in_pieces_is_the_same_sound(dtype: str) -> None:
    content = make_wav(np.arange(20).reshape(10, 2).astype(dtype), tail=b"LIST")
    file = WavFile(io.BytesIO(content), "a.wav")
    pieces = [file.read(4) for _ in range(4)]
    assert [len(piece) for piece in pieces] == [4, 4, 2, 0]
    assert np.array_equal(np.concatenate(pieces), read_wav(content)[0])


def test_a_file_that_is_cut_short_is_named_where_it_ends() -> None:
    file = WavFile(io.BytesIO(make_wav(np.arange(10, dtype=np.int16))[:-2]), "a.wav")
    assert len(file.read(9)) == 9
    with pytest.raises(DataError, match=r"a.wav: is cut short"):
        file.read(9)
