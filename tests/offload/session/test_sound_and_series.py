"""Sound as Opus and a series of sensors as differences, from `open_session` to a real service and back."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.offload.onnx_models import branching_model, model_of
from tests.offload.session.offload_parts import LOCAL
from tests.offload.session.planned_package import REMOTE, Array, offloading_to, serving
from tests.waiting import SHARED_S

from edgekit_offload.packaging.submodels import attach_plans
from edgekit_offload.partition.calibrate import SOUND, find_series
from edgekit_offload.partition.coding import INTEGERS, Coding
from edgekit_offload.partition.split import whole_upload
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_plan import OffloadPlan
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny"
PITCHES_HZ = (200, 330, 470, 620, 800, 1100, 1500, 2100)
SAMPLES = 8000
SERIES = TINY / "japanese_vowels_tcn.onnx"
SHAPES = {"series": (640,), "three series": (1, 3, 640)}
Open = Callable[[str, str], AbstractContextManager[RemoteSession]]


def make_sound(count: int) -> Array:
    """Return tones on the grid of 16-bit samples: float32 [count, SAMPLES], each of one of the pitches."""
    t = np.arange(SAMPLES) / 16_000
    tones = [
        np.rint(9000 * np.sin(2 * np.pi * PITCHES_HZ[n % len(PITCHES_HZ)] * t + n)) for n in range(count)
    ]
    return np.array(tones, np.float32) / np.float32(32768)


def make_listener() -> bytes:
    """Return a model of sound: the energy at each of the pitches, as logits [N, 8]."""
    t = np.arange(SAMPLES) / 16_000
    waves = [[f(2 * np.pi * pitch * t) for f in (np.sin, np.cos)] for pitch in PITCHES_HZ]
    weights = {
        "w": np.array(waves, np.float32).reshape(-1, SAMPLES).T / np.float32(1000),
        "pairs": np.repeat(np.eye(len(PITCHES_HZ), dtype=np.float32), 2, axis=0),
    }
    nodes = [
        ("MatMul", ["x", "w"], ["parts"]),
        ("Mul", ["parts", "parts"], ["squares"]),
        ("MatMul", ["squares", "pairs"], ["logits"]),
    ]
    return model_of(nodes, {"x": ["N", SAMPLES]}, ["logits"], weights=weights)


def make_integer_listener() -> bytes:
    """Return the same model for 16-bit samples without a batch axis: int16 [SAMPLES] to logits [1, 8]."""
    model = onnx.load_from_string(make_listener())
    model.graph.input[0].CopyFrom(
        onnx.helper.make_tensor_value_info("sound", onnx.TensorProto.INT16, [SAMPLES])
    )
    weights = {"scale": np.float32(1 / 32768), "shape": np.array([1, SAMPLES])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items())
    for number, (op, read, made) in enumerate(
        [
            ("Cast", ["sound"], "wide"),
            ("Mul", ["wide", "scale"], "scaled"),
            ("Reshape", ["scaled", "shape"], "x"),
        ]
    ):
        options = {"to": onnx.TensorProto.FLOAT} if op == "Cast" else {}
        model.graph.node.insert(number, onnx.helper.make_node(op, read, [made], **options))
    return bytes(model.SerializeToString())


def make_leveller() -> bytes:
    """Return a model of a sound and a place: the place, without the mean of the sound."""
    nodes = [("ReduceMean", ["sound"], ["level"]), ("Sub", ["place", "level"], ["y"])]
    return model_of(nodes, {"sound": (1, SAMPLES), "place": (1, 4)}, ["y"], attributes={0: {"axes": [1]}})


def make_caster(shape: tuple[int, ...]) -> bytes:
    return model_of(
        [("Cast", ["x"], ["y"])], {"x": shape}, ["y"],
        attributes={0: {"to": onnx.TensorProto.FLOAT}}, dtypes={"x": "int16"},
    )  # fmt: skip


def make_uniform() -> Array:
    return np.random.default_rng(1).uniform(-1, 1, (40, 2, 32)).astype(np.float32)


def make_steps() -> Array:
    return np.random.default_rng(1).integers(-16, 17, (40, 2, 32)).astype(np.float32) / np.float32(8)


def list_uploads() -> dict[str, tuple[bytes, Coding, str]]:
    """Return model, coding of its input and codec of a file, empty for differences, of each package."""
    integers = Coding("samples", {"sound": INTEGERS})
    (name,) = (one.name for one in onnx.load(SERIES).graph.input)
    calibration = np.load(SERIES.with_suffix(".calib.npz"))[name].astype(np.float32)
    unit = model_of([("Identity", ["x"], ["y"])], {"x": ["N", 2, 32]}, ["y"])
    return {
        "sound": (make_listener(), Coding("samples", {"x": SOUND}), "opus:24"),
        "opus:24": (make_integer_listener(), integers, "opus:24"),
        "opus:24@8000": (make_integer_listener(), integers, "opus:24@8000"),
        "sound and place": (make_leveller(), Coding("samples", {"sound": SOUND}), "opus:24"),
        **{
            kind: (
                make_caster(shape),
                Coding("delta", {"x": replace(INTEGERS, time_axis=max(len(shape) - 1, 1))}),
                "",
            )
            for kind, shape in SHAPES.items()
        },
        "vowels": (SERIES.read_bytes(), Coding("delta", {name: find_series(calibration)}), ""),
        "uniform": (unit, Coding("delta", {"x": find_series(make_uniform())}), ""),
        "branching": (branching_model(), Coding("delta", {"x": find_series(make_steps())}), ""),
    }


def write_package(folder: Path, keys: Path, model: bytes, coding: Coding, codec: str) -> Path:
    """Write a package with a plan that uploads the input in a coding, and has the name of that."""
    sign = load_signer(folder=keys)
    folder.mkdir()
    (folder / "model.onnx").write_bytes(model)
    plain = write_plain_package(
        folder / "model.onnx", name="whole", target="x86-64", folder=folder, sign=sign
    )
    split, name = whole_upload(model, coding), "opus" if codec else "delta"
    media = {one.name: codec for one in split.sent if codec and one.name.endswith(".samples")}
    compression = "identity" if media else "zstd"
    plan = OffloadPlan(
        name, REMOTE, head=f"{name}.head", tail=f"{name}.tail", media=media, compression=compression
    )
    (folder / "planned").mkdir()
    with read_package(plain, TrustStore.from_folder(keys)) as package:
        return attach_plans(
            package,
            {name: split},
            CutTable((LOCAL, plan)),
            folder=folder / "planned",
            sign=sign,
            decode={name: media} if media else {},
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, dict[str, Path]]]:
    """Address of a service with the tails of all packages, the folder of their keys, and the packages."""
    folder = tmp_path_factory.mktemp("served")
    generate_key("default", folder / "keys")
    packages = {
        name: write_package(folder / name, folder / "keys", *upload)
        for name, upload in list_uploads().items()
    }
    tails = [word for package in packages.values() for word in ("--tails", package)]
    with serving(folder, folder, *tails, limit_s=SHARED_S) as address:
        yield address, folder, packages


@pytest.fixture
def offload(served: tuple[str, Path, dict[str, Path]], tmp_path: Path) -> Open:
    """Opens a session of a package that runs its plan for uploads."""
    address, folder, packages = served
    return lambda name, plan: offloading_to(address, folder, packages[name], plan, tmp_path)


def test_sound_goes_as_opus_and_keeps_the_answers(offload: Open) -> None:
    pytest.importorskip("soundfile", reason="soundfile is not installed")
    x = make_sound(16)
    expected = OrtSession(make_listener(), OrtOptions(threads=1)).run({"x": x})["logits"]
    with offload("sound", "opus") as session:
        found = np.concatenate([session.run({"x": row[None]})["logits"] for row in x])
        assert session.counts.remote == len(x)
        assert session.counts.failed + session.counts.hedged == 0
    # Opus at 24 kbit/s keeps the energy of a tone within a few percent; the other pitches are a thousandth.
    np.testing.assert_array_equal(found.argmax(1), np.arange(16) % len(PITCHES_HZ))
    np.testing.assert_allclose(found.max(1), expected.max(1), rtol=0.2)
    assert np.abs(found - expected).max() > 0  # it is lossy, so this did not run here


@pytest.mark.parametrize("codec", ["opus:24", "opus:24@8000"])
def test_16_bit_sound_without_a_batch_axis_goes_as_opus(codec: str, offload: Open) -> None:
    pytest.importorskip("soundfile", reason="soundfile is not installed")
    x = np.rint(make_sound(8) * 32768).astype(np.int16)
    whole = OrtSession(make_integer_listener(), OrtOptions(threads=1))
    expected = np.concatenate([whole.run({"sound": row})["logits"] for row in x])
    with offload(codec, "opus") as session:
        found = np.concatenate([session.run({"sound": row})["logits"] for row in x])
        assert session.counts.remote == len(x)
        assert session.counts.failed + session.counts.hedged == 0
    np.testing.assert_array_equal(found.argmax(1), np.arange(8))
    np.testing.assert_allclose(found.max(1), expected.max(1), rtol=0.2)
    assert np.abs(found - expected).max() > 0  # it is lossy, so this did not run here


@pytest.mark.parametrize("kind", SHAPES)
def test_integer_series_goes_as_differences_whatever_its_values(offload: Open, kind: str) -> None:
    pytest.importorskip("zstandard", reason="zstandard is not installed")
    rng = np.random.default_rng(5)
    with offload(kind, "delta") as session:
        for _ in range(4):  # steps of all sizes
            x = rng.integers(-32768, 32768, SHAPES[kind]).astype(np.int16)
            np.testing.assert_array_equal(session.run({"x": x})["y"], x.astype(np.float32))
        assert session.counts.remote == 4


def test_sound_goes_as_opus_beside_an_input_that_is_sent_raw(offload: Open) -> None:
    pytest.importorskip("soundfile", reason="soundfile is not installed")
    with offload("sound and place", "opus") as session:
        place = np.float32([[1e6, -3.5, 0.25, 1e-3]])
        found = session.run({"sound": make_sound(1), "place": place})["y"]
        assert session.counts.remote == 1
    np.testing.assert_allclose(found, place, rtol=1e-6, atol=1e-3)  # the mean of tones is 0


def test_series_goes_as_differences_and_keeps_the_answers(offload: Open) -> None:
    pytest.importorskip("zstandard", reason="zstandard is not installed")
    whole = OrtSession(SERIES.read_bytes(), OrtOptions(threads=1))
    ((name,), (output,)) = ([one.name for one in side] for side in (whole.inputs, whole.outputs))
    x = np.load(SERIES.with_suffix(".eval.npz"))[name].astype(np.float32)[:64]
    expected = np.concatenate([whole.run({name: row[None]})[output] for row in x])
    with offload("vowels", "delta") as session:
        found = np.concatenate([session.run({name: row[None]})[output] for row in x])
        assert session.counts.remote == len(x)
        assert session.counts.failed + session.counts.hedged == 0
    # Values off a grid are rounded to a 30,000th of their range.
    np.testing.assert_array_equal(found.argmax(1), expected.argmax(1))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.ptp(expected))


def test_series_with_a_spike_beyond_the_samples_is_answered_rightly(offload: Open) -> None:
    """Codes of a series reach little beyond the samples, and clip the rest."""
    pytest.importorskip("zstandard", reason="zstandard is not installed")
    usual, spiked, broken = (make_uniform()[:1].copy() for _ in range(3))
    spiked[0, 1, 7], broken[0, 0, 0] = 10.0, np.nan
    with offload("uniform", "delta") as session:
        for x in (spiked, broken):
            np.testing.assert_array_equal(session.run({"x": x})["y"], x)
        assert session.counts.remote == 0
        assert session.counts.uncoded == 2
        np.testing.assert_allclose(session.run({"x": usual})["y"], usual, atol=1e-4)
        assert session.counts.remote == 1  # the plan itself is not to blame


def test_series_goes_to_a_server_with_a_model_that_cannot_be_cut(offload: Open) -> None:
    pytest.importorskip("zstandard", reason="zstandard is not installed")
    whole = OrtSession(branching_model(), OrtOptions(threads=1))
    with offload("branching", "delta") as session:
        for row in make_steps()[:8]:
            found, expected = (one.run({"x": row[None]}) for one in (session, whole))
            np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(found["places"], expected["places"])
        assert session.counts.remote == 8
