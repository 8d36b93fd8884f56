"""Photographs and sound as files, from a device to the tail of a planned package in the real service."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.offload.onnx_models import model_of
from tests.service.service_parts import make_config, running

from edgekit_offload.packaging.submodels import attach_plans
from edgekit_offload.partition.calibrate import SOUND, find_bytes
from edgekit_offload.partition.coding import Coding
from edgekit_offload.partition.split import whole_upload
from edgekit_runtime.client.client import Client
from edgekit_runtime.codecs.media import MediaCodec, decode_media, encode_media
from edgekit_runtime.errors import RequestError
from edgekit_runtime.offload.cut_table import CutTable, read_cut_table
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer

Array = np.ndarray[Any, np.dtype[Any]]
MEAN, STD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


def photograph(count: int) -> Array:
    """Smooth pixels, as [N, C, H, W] after the usual preprocessing."""
    rng = np.random.default_rng(3)
    corners = rng.integers(0, 256, (count, 2, 2, 3)).astype(np.float32)
    y, x = (np.linspace(0, 1, size, dtype=np.float32) for size in (32, 48))
    rows = corners[:, :1] * (1 - y[:, None, None]) + corners[:, 1:] * y[:, None, None]
    pixels = np.rint(rows[:, :, :1] * (1 - x[:, None]) + rows[:, :, 1:] * x[:, None])
    pixels[:, :4, :4], pixels[:, -4:, -4:] = 0, 255  # so that codes are the pixels themselves
    return np.ascontiguousarray(((pixels / np.float32(255) - MEAN) / STD).transpose(0, 3, 1, 2), np.float32)


def sound(count: int) -> Array:
    """A tone on the grid of 16-bit samples: float32 [N, 4800]."""
    t = np.arange(4800) / 16_000
    tones = [np.rint(9000 * np.sin(2 * np.pi * pitch * t)) for pitch in np.linspace(300, 500, count)]
    return np.array(tones, np.float32) / np.float32(32768)


def write_package(folder: Path, x: Array, codec: str) -> tuple[Path, str]:
    """Write a package whose plan `media` sends its input as a file; return it and the sent tensor."""
    weights = {"w": np.random.default_rng(4).normal(size=(x[0].size, 10)).astype(np.float32)}
    nodes = [("Flatten", ["x"], ["flat"]), ("MatMul", ["flat", "w"], ["y"])]
    content = model_of(nodes, {"x": ("N", *x.shape[1:])}, ["y"], weights=weights)
    (folder / "model.onnx").write_bytes(content)
    generate_key("default", folder / "keys")
    sign = load_signer(folder=folder / "keys")
    plain = write_plain_package(
        folder / "model.onnx", name="media", target="x86-64", folder=folder, sign=sign
    )
    lattice = SOUND if codec.startswith("opus") else find_bytes(x)
    assert lattice is not None
    coding = Coding("samples" if lattice is SOUND else "pixels", {"x": lattice})
    split = whole_upload(content, coding)
    (sent,) = (spec.name for spec in split.sent)
    costs = PlanCosts(0.001, 0.001, upload_bytes=900.0, download_bytes=40.0)
    plan = OffloadPlan("media", costs, head="media.head", tail="media.tail", media={sent: codec})
    table = CutTable((OffloadPlan("local", PlanCosts(device_s=0.01)), plan))
    with read_package(plain, TrustStore.from_folder(folder / "keys")) as package:
        (folder / "plans").mkdir()
        path = attach_plans(
            package,
            {"media": split},
            table,
            folder=folder / "plans",
            sign=sign,
            decode={"media": {sent: codec}},
        )
    return path, sent


@pytest.mark.parametrize(
    ("codec", "library"), [("jpeg:90", "PIL"), ("webp:80", "PIL"), ("opus:24@16000", "soundfile")]
)
def test_file_from_a_device_is_decoded_by_the_tail(tmp_path: Path, codec: str, library: str) -> None:
    pytest.importorskip(library, reason=f"{codec} needs {library}")
    x = sound(3) if codec.startswith("opus") else photograph(3)
    path, sent = write_package(tmp_path, x, codec)
    trust = TrustStore.from_folder(tmp_path / "keys")
    parsed = MediaCodec.parse(codec)
    with read_package(path, trust) as package:
        table = read_cut_table(package)
        assert table is not None
        tail = table.plans[1].tail
        assert tail is not None
        head = open_session(package.select_submodel("media.head"), threads=1)
    whole = OrtSession((tmp_path / "model.onnx").read_bytes(), OrtOptions(threads=1))
    with (
        running(make_config(tmp_path), PackageFiles([], trust, [path])) as service,
        Client(str(service.socket_path)) as client,
    ):
        for row in x[:, np.newaxis]:
            made = head.run({"x": row})[sent]
            file = encode_media(parsed, made[0])
            assert len(file) < row.nbytes / 8
            answer = client.infer(tail, {sent: np.frombuffer(file, np.uint8)})["y"]
            decoded = decode_media(parsed, file, dtype=made.dtype.name)
            expected = whole.run({"x": restore(decoded, codec)})["y"]
            # Preprocessing in numpy and in the tail's table may differ in the last bits.
            np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
        with pytest.raises(RequestError, match=sent):
            client.infer(tail, {sent: np.zeros(50, np.uint8)})
    head.close()


def hostile_files(codec: MediaCodec, right: bytes) -> dict[str, bytes]:
    """Files that the tail must refuse: what is wrong -> file."""
    name: Any = codec.name
    other = "webp" if name == "jpeg" else "jpeg"
    if name == "opus":
        parts = {size: np.zeros(size, np.int16) for size in (2400, 4801, 4_000_000)}
        files = {f"{size} samples": encode_media(codec, part) for size, part in parts.items()}
    else:
        sizes = ((31, 48), (48, 32), (4000, 6000))
        blank = {size: np.zeros((*size, 3), np.uint8) for size in sizes}
        files = {f"{size} pixels": encode_media(codec, part) for size, part in blank.items()}
        files["another format"] = encode_media(MediaCodec(other, 80), blank[31, 48])  # type: ignore[arg-type]
    if name == "jpeg":  # its frame header states height and width, 16 bits each
        at = right.index(b"\xff\xc0") + 5
        files["a stated giant"] = right[:at] + b"\xff\xff\xff\xff" + right[at + 4 :]
    files["half a file"] = right[: len(right) // 2]
    files["one byte"] = right[:1]
    return files


@pytest.mark.parametrize(
    ("codec", "library"), [("jpeg:90", "PIL"), ("webp:80", "PIL"), ("opus:24@16000", "soundfile")]
)
def test_tail_refuses_files_of_another_size_or_kind_and_goes_on(
    tmp_path: Path, codec: str, library: str
) -> None:
    pytest.importorskip(library, reason=f"{codec} needs {library}")
    x = sound(3) if codec.startswith("opus") else photograph(3)
    path, sent = write_package(tmp_path, x, codec)
    trust = TrustStore.from_folder(tmp_path / "keys")
    with read_package(path, trust) as package:
        table = read_cut_table(package)
        assert table is not None
        tail = str(table.plans[1].tail)
        head = open_session(package.select_submodel("media.head"), threads=1)
    right = encode_media(MediaCodec.parse(codec), head.run({"x": x[:1]})[sent][0])
    head.close()
    with (
        running(make_config(tmp_path), PackageFiles([], trust, [path])) as service,
        Client(str(service.socket_path)) as client,
    ):
        expected = client.infer(tail, {sent: np.frombuffer(right, np.uint8)})["y"]
        for what, file in hostile_files(MediaCodec.parse(codec), right).items():
            with pytest.raises(RequestError) as refused:
                client.infer(tail, {sent: np.frombuffer(file, np.uint8)})
            assert refused.value.status == 400, what
            assert sent in str(refused.value), what
        again = client.infer(tail, {sent: np.frombuffer(right, np.uint8)})["y"]
        np.testing.assert_array_equal(again, expected)


def restore(decoded: Array, codec: str) -> Array:
    """The model's input for what a file holds."""
    if codec.startswith("opus"):
        return (decoded.astype(np.float32) / np.float32(32768))[np.newaxis]
    pixels = (decoded.astype(np.float32) / np.float32(255) - MEAN) / STD
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[np.newaxis])
