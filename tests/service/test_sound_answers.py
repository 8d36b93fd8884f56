"""Sound in, events out: recordings and raw samples through `POST /v2/models/NAME/answer`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.runtime.conftest import PackageMaker
from tests.runtime.test_sound import make_wav
from tests.service.answer_parts import post
from tests.service.service_parts import Manifest_, Running, make_config, running, write_signed

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.service.models.file_source import PackageFiles

Array = np.ndarray[Any, np.dtype[Any]]

RATE = 16000
SECOND = {"type": "audio", "sample_rate": RATE, "samples": RATE}


def write_level_meter(maker: PackageMaker, path: Path, preprocessing: dict[str, Any]) -> None:
    """Write `meter`: twice the mean loudness of each tenth of a second, [N, 10, 1], of `sound` [N, 16000]."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Abs", ["sound"], ["loud"]),
        helper.make_node("Reshape", ["loud", "shape"], ["tenths"]),
        helper.make_node("ReduceMean", ["tenths"], ["means"], axes=[2], keepdims=1),
        helper.make_node("Mul", ["means", "two"], ["levels"]),
    ]
    graph = helper.make_graph(
        nodes,
        "meter",
        [helper.make_tensor_value_info("sound", kind, ["N", RATE])],
        [helper.make_tensor_value_info("levels", kind, ["N", 10, 1])],
        [
            onnx.numpy_helper.from_array(np.array([0, 10, -1], np.int64), "shape"),
            onnx.numpy_helper.from_array(np.array([2], np.float32), "two"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    content = model.SerializeToString()
    sound = np.random.default_rng(0).normal(size=(1, RATE)).astype(np.float32)
    levels = onnxruntime.InferenceSession(content).run(None, {"sound": sound})[0]
    sketch = Manifest_("meter", "1.0.0", {"sound": "levels"}, {"sound": sound})
    attachments = {"labels": b"speech\n", "preprocessing": encode_json(preprocessing)}
    task = TaskChoice("sound_events", {"threshold": 0.5, "release": 0.25})
    write_signed(maker, path, sketch, {"levels": levels}, content, attachments=attachments, task=task)


@pytest.fixture(scope="module")
def meter(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serve `meter` for sound of 16 kHz."""
    folder = tmp_path_factory.mktemp("meter")
    write_level_meter(maker, folder / "meter.edgepkg", SECOND)
    with running(make_config(folder), PackageFiles([folder / "meter.edgepkg"], maker.trust)) as service:
        yield service


def hear(service: Running, body: bytes, kind: str = "audio/wav") -> tuple[int, Any]:
    return post(service, body, kind, path="/v2/models/meter/answer")


def times(answer: Any) -> list[tuple[float, float]]:
    assert {event["label"] for event in answer["events"]} <= {"speech"}, answer
    return [(event["begin_s"], event["end_s"]) for event in answer["events"]]


def make_bursts(rate: int = RATE) -> Array:
    """Return a second, -1..1: loud from 0.2 to 0.4 s, quieter to 0.5 s, loud again from 0.8 s."""
    levels = np.repeat([0, 0, 0.9, 0.9, 0.2, 0, 0, 0, 0.9, 0.9], rate // 10)
    return levels * np.sign(np.sin(2 * np.pi * 100 * (np.arange(rate) + 0.5) / rate))


BURSTS = [(0.2, 0.5), (0.8, 1.0)]


def code(amplitudes: Array, dtype: str) -> Array:
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return amplitudes.astype(kind)
    scale = 2.0 ** (8 * kind.itemsize - 1)
    return (amplitudes * scale * 0.99 + scale * (kind.kind == "u")).astype(kind)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float32", "float64"])
def test_events_have_times_in_the_recording(meter: Running, dtype: str) -> None:
    status, answer = hear(meter, make_wav(code(make_bursts(), dtype)))
    assert (status, times(answer)) == (200, BURSTS)
    assert answer["events"][0]["score"] > 0.85


def test_stereo_is_averaged_and_short_sound_is_padded(meter: Running) -> None:
    mono = make_bursts()[: RATE // 2]
    stereo = np.stack([mono, mono], axis=1)
    assert times(hear(meter, make_wav(code(stereo, "int16")))[1]) == BURSTS[:1]
    one_side = np.stack([mono, 0 * mono], axis=1)  # half as loud
    assert times(hear(meter, make_wav(code(one_side, "int16")))[1]) == [(0.2, 0.4)]


@pytest.mark.parametrize(("form", "dtype"), [("S16LE", "<i2"), ("F32LE", "<f4")])
def test_raw_samples_need_no_file(meter: Running, form: str, dtype: str) -> None:
    raw = code(make_bursts(), dtype)
    kind = f"audio/x-raw; format={form}; rate=16000"
    assert times(hear(meter, raw.tobytes(), kind)[1]) == BURSTS
    assert times(hear(meter, np.repeat(raw, 2).tobytes(), f"{kind}; channels=2")[1]) == BURSTS


def test_options_of_events_can_be_set_for_one_answer(meter: Running) -> None:
    path = "/v2/models/meter/answer?release=0.6&hop_s=1"
    answer = post(meter, make_wav(code(make_bursts(), "int16")), "audio/wav", path=path)[1]
    assert times(answer) == [(2, 4), (8, 10)]


WAV = make_wav(np.zeros(1600, np.int16))


@pytest.mark.parametrize(
    ("body", "kind", "status", "reason"),
    [
        (make_wav(np.zeros(480, np.int16), 48000), "audio/wav", 400, "has 48000 Hz, expected 16000"),
        (WAV[:-10], "audio/wav", 400, "is cut short"),
        (WAV[:40], "audio/wav", 400, "cut short"),
        (b"", "audio/wav", 400, "is no WAV file"),
        (b"ID3\x03" + bytes(500), "audio/x-wav", 400, "is no WAV file"),
        (make_wav(np.zeros(0, np.int16)), "audio/wav", 400, "holds no sound"),
        (make_wav(np.array([np.nan], np.float32)), "audio/wav", 400, "holds a NaN"),
        (WAV, "audio/mpeg", 415, "media type"),
        (WAV, "image/png", 415, "takes sound"),
        (b"", "audio/x-raw; rate=16000", 400, "0 bytes"),
        (b"\0" * 3, "audio/x-raw; rate=16000", 400, "3 bytes"),
        (b"\0" * 6, "audio/x-raw; rate=16000; channels=2", 400, "6 bytes, expected samples of 2 x 2"),
        (b"\0" * 8, "audio/x-raw; rate=16000; channels=0", 400, "channels is '0', expected 1 to 64"),
        (b"\0" * 8, "audio/x-raw; rate=44100", 400, "has 44100 Hz, expected 16000"),
        (b"\0" * 8, "audio/x-raw", 400, "rate is ''"),
        (b"\0" * 8, "audio/x-raw; rate=16000; format=U8", 400, "format is 'U8'"),
        (b"\0\0\xc0\x7f", "audio/x-raw; rate=16000; format=F32LE", 400, "NaN"),
    ],
)
def test_bad_sound_is_refused_with_a_reason(
    meter: Running, body: bytes, kind: str, status: int, reason: str
) -> None:
    got, answer = hear(meter, body, kind)
    assert (got, reason in answer.get("error", "")) == (status, True), answer
    assert hear(meter, WAV)[0] == 200  # the service is unharmed


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_sound_of_a_microphone_is_resampled_where_it_is_stated(
    maker: PackageMaker, tmp_path: Path, rate: int
) -> None:
    write_level_meter(maker, tmp_path / "meter.edgepkg", SECOND | {"resample": True})
    with running(make_config(tmp_path), PackageFiles([tmp_path / "meter.edgepkg"], maker.trust)) as service:
        raw = code(make_bursts(rate), "int16")
        assert times(hear(service, make_wav(raw, rate))[1]) == BURSTS
        assert times(hear(service, raw.tobytes(), f"audio/x-raw; rate={rate}")[1]) == BURSTS
        status, answer = hear(service, make_wav(raw, 16001))
        assert (status, "usual rate" in answer["error"]) == (400, True), answer
