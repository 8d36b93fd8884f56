"""Deltas of packages: how small they are, and what a damaged or malicious one does."""

import hashlib
import io
import threading

import numpy as np
import onnx
import pytest
import zstandard
from tests.toolkit.cases import cases

from edgekit_fleet.releases import deltas as making
from edgekit_fleet.releases.deltas import make_delta
from edgekit_host.transport.package_encoder import compress, encode, pack_number
from edgekit_host.transport.tensor_positions import find_tensors
from edgekit_runtime.agent.artifacts import deltas
from edgekit_runtime.agent.artifacts.deltas import apply_delta, find_delta
from edgekit_runtime.agent.documents import DeltaOffer, DesiredModel
from edgekit_runtime.errors import DigestError, PackageError
from edgekit_runtime.package.canonical_zip import write_archive
from edgekit_toolkit.quantize.near_version import near_floats

CHANNELS, DEPTH = 64, 512


def model(weights, scales, note=""):
    """The bytes of an ONNX model with these weights."""
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    tensors = [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(scales, "scales")]
    node = helper.make_node("DequantizeLinear", ["weights", "scales"], ["y"], axis=0)
    y = helper.make_tensor_value_info("y", 1, weights.shape)
    made = helper.make_model(helper.make_graph([node], f"graph{note}", [], [y], tensors))
    made.doc_string = note
    return made.SerializeToString(deterministic=True)


def package(path, content, name="model.onnx", manifest=b'{"name": "m", "version": "1.0.0"}'):
    buffer = io.BytesIO()
    write_archive(buffer, [("manifest.json", manifest), (name, content)])
    path.write_bytes(buffer.getvalue())
    return path


def tune(seed=0, moved=0.3, dtype=np.int8):
    """Weights before and after fine-tuning, each quantized by its own scales a channel."""
    rng = np.random.default_rng(seed)
    floats = rng.normal(0, 1, (CHANNELS, DEPTH)).astype(np.float32)
    tuned = floats + rng.normal(0, moved / 30, floats.shape).astype(np.float32)
    tuned *= rng.uniform(0.9, 1.1, (CHANNELS, 1)).astype(np.float32)
    found = []
    for each in (floats, tuned):
        scales = np.abs(each).max(axis=1) / 127
        codes = np.rint(each / scales[:, None]).astype(np.int8)
        found.append((codes if dtype == np.int8 else (codes.view(np.uint8) ^ 0x80), scales))
    return found


def apply(content, base, new, path):
    wanted = new.read_bytes()
    apply_delta(
        *(io.BytesIO(content), base.read_bytes() if base else b"", path / "made"),
        size_bytes=len(wanted),
        sha256=hashlib.sha256(wanted).hexdigest(),
        stop=threading.Event(),
    )
    assert (path / "made").read_bytes() == wanted


@pytest.fixture
def tuned(tmp_path):
    before, after = tune()
    return package(tmp_path / "a", model(*before)), package(tmp_path / "b", model(*after, "tuned"))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_weights_whose_scales_and_places_have_changed_are_found(tmp_path, dtype):
    before, after = tune(dtype=dtype)
    base = package(tmp_path / "a", model(*before))
    new = package(tmp_path / "b", model(*after, "a longer note moves all weights"))
    suffix, content = make_delta(base.read_bytes(), new.read_bytes())
    assert suffix == deltas.RUNS_SUFFIX
    share = len(content) / new.stat().st_size
    generic = len(making._make_zstd_delta(base.read_bytes(), new.read_bytes())) / new.stat().st_size
    assert share < 0.25 < 0.5 < generic, (share, generic)
    apply(content, base, new, tmp_path)


def test_scales_predict_weights_that_differ_by_steps(tmp_path):
    """`edgekit package --like` makes such weights; the factor of least squares alone would blur the steps."""
    (codes, scales), _ = tune()
    rng = np.random.default_rng(1)
    multipliers = 64 * rng.integers(48, 80, CHANNELS)
    predicted = (codes.astype(int) * multipliers[:, None] + 2048) >> 12
    changed = predicted - 4 * np.rint(0.05 * predicted + rng.normal(0, 1, codes.shape)).astype(int)
    new_codes = np.clip(changed, -127, 127).astype(np.int8)
    new_scales = (scales * 4096 / multipliers).astype(np.float32)
    old = package(tmp_path / "old", model(codes, scales))
    new = package(tmp_path / "new", model(new_codes, new_scales))
    suffix, content = make_delta(old.read_bytes(), new.read_bytes())
    assert suffix == deltas.RUNS_SUFFIX
    apply(content, old, new, tmp_path)
    unknown = package(
        tmp_path / "unknown", model(new_codes, new_scales).replace(b"DequantizeLinear", b"D" * 16)
    )
    _, blurred = make_delta(old.read_bytes(), unknown.read_bytes())
    assert len(content) < 0.85 * len(blurred)


@pytest.mark.parametrize(("moved", "bits"), [(1e-5, 2.5), (0.05, 3)])
def test_half_float_weights_at_steps_cost_few_bits_each(tmp_path, moved, bits):
    """`edgekit package --like` makes such weights; so they come from it here."""
    rng = np.random.default_rng(5)
    earlier = rng.normal(0, 0.1, (200, 500)).astype(np.float16)
    earlier[0, :4] = 0.0, -0.0, 6e-8, -6e-8
    new = near_floats((earlier + rng.normal(0, moved, earlier.shape)).astype(np.float16), earlier)
    old_package = package(tmp_path / "old", model(earlier, np.ones(200, np.float16)))
    new_package = package(tmp_path / "new", model(new, np.ones(200, np.float16)))
    suffix, content = make_delta(old_package.read_bytes(), new_package.read_bytes())
    assert suffix == deltas.RUNS_SUFFIX
    apply(content, old_package, new_package, tmp_path)
    assert 8 * len(content) / earlier.size < bits


def test_float_weights_are_smaller_than_by_the_generic_delta(tmp_path):
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 1, (256, 256)).astype(np.float32)
    tuned = weights + rng.normal(0, 1e-4, weights.shape).astype(np.float32)
    base, new = (
        package(tmp_path / name, model(each, np.ones(256, np.float32)))
        for name, each in (("a", weights), ("b", tuned))
    )
    suffix, content = make_delta(base.read_bytes(), new.read_bytes())
    assert suffix == deltas.RUNS_SUFFIX
    assert len(content) < 0.6 * new.stat().st_size
    apply(content, base, new, tmp_path)


def test_scales_of_a_bias_are_those_of_the_weights_times_a_factor(tmp_path):
    rng = np.random.default_rng(6)

    def write(name, is_product):
        codes = np.zeros((1024, 2), np.int8)
        scales = rng.uniform(0.001, 0.1, 1024).astype(np.float32)
        others = (scales.astype(np.float64) * np.float32(0.0173)).astype(np.float32)
        others = others if is_product else rng.permuted(others)
        made = onnx.load_from_string(model(codes, scales))
        made.graph.initializer.append(onnx.numpy_helper.from_array(others, "bias_scales"))
        return package(tmp_path / name, made.SerializeToString(deterministic=True))

    base = write("a", True)
    sizes = []
    for name, is_product in (("b", True), ("c", False)):
        new = write(name, is_product)
        _, content = make_delta(base.read_bytes(), new.read_bytes())
        apply(content, base, new, tmp_path)
        (tmp_path / "made").unlink()
        sizes.append(len(content))
    assert sizes[1] > 1.8 * sizes[0]


def test_file_that_nobody_understands_goes_by_zstd(tmp_path):
    rng = np.random.default_rng(2)
    content = bytearray(rng.bytes(60_000))
    base = package(tmp_path / "a", bytes(content), "model.bin")
    content[30_000:30_000] = b"inserted"
    new = package(tmp_path / "b", bytes(content), "model.bin")
    suffix, delta = make_delta(base.read_bytes(), new.read_bytes())
    assert len(delta) < 1000
    apply(delta, base, new, tmp_path)
    apply(making._make_zstd_delta(base.read_bytes(), new.read_bytes()), base, new, tmp_path)
    assert suffix in (deltas.RUNS_SUFFIX, deltas.ZSTD_SUFFIX)


def test_packages_that_have_nothing_in_common_get_no_delta(tmp_path):
    rng = np.random.default_rng(3)
    base, new = (package(tmp_path / name, rng.bytes(50_000), "model.bin") for name in "ab")
    assert make_delta(base.read_bytes(), new.read_bytes()) is None


def test_malformed_models_have_no_tensors():
    whole = model(*tune()[0])
    assert [tensor.name for tensor in find_tensors(memoryview(whole), "m.onnx")] == ["/weights", "/scales"]
    for end in range(0, len(whole), 997):
        find_tensors(memoryview(whole[:end]), "m.onnx")
    rng = np.random.default_rng(4)
    for _ in range(300):
        find_tensors(memoryview(rng.bytes(200)), "m.onnx")
        find_tensors(memoryview(rng.bytes(4) + b"TFL3" + rng.bytes(200)), "m.tflite")


def test_damaged_delta_makes_nothing(tuned, tmp_path, is_long):
    base, new = tuned
    rng = np.random.default_rng(5)
    for content in (
        make_delta(base.read_bytes(), new.read_bytes())[1],
        making._make_zstd_delta(base.read_bytes(), new.read_bytes()),
    ):
        for _ in range(60 if is_long else 6):
            damaged = bytearray(content)
            damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
            try:
                apply(bytes(damaged), base, new, tmp_path)
            except PackageError:
                assert not (tmp_path / "made").exists()
            (tmp_path / "made").unlink(missing_ok=True)
        for end in (0, 1, 7, 40, len(content) // 2):
            with pytest.raises(PackageError):
                apply(content[:end], base, new, tmp_path)
        assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_wrong_base_makes_nothing(tuned, tmp_path):
    base, new = tuned
    content = make_delta(base.read_bytes(), new.read_bytes())[1]
    other = package(tmp_path / "c", model(*tune(seed=7)[0]))
    assert other.stat().st_size == base.stat().st_size
    with pytest.raises(DigestError):
        apply(content, other, new, tmp_path)
    with pytest.raises(PackageError):
        apply(content, new, new, tmp_path)
    assert not (tmp_path / "made").exists()


def numbers(*values):
    return b"".join(map(pack_number, values))


def forge(
    base_bytes, size_bytes, runs, *, literals=b"", residuals=b"", count=None, codes=(0, b""), lzma_model=0
):
    """A delta of runs, each a kind and its numbers; `codes` are their number and their stream."""
    control = b"".join(bytes([kind]) + numbers(*others) for kind, *others in runs)
    packed = [compress(stream, 0) for stream in (control, literals, residuals)]
    head = numbers(base_bytes, size_bytes, len(runs) if count is None else count)
    head += b"".join(numbers(len(stream), lzma_model) for stream in packed) + numbers(codes[0])
    return b"".join((deltas.MAGIC, head, *packed, codes[1]))


@pytest.mark.parametrize("magic", [b"EKDELTA1", b"EKDELTA2"])
def test_delta_of_an_earlier_format_is_refused(tuned, tmp_path, magic):
    base, new = tuned
    delta = encode(base.read_bytes(), new.read_bytes()).replace(deltas.MAGIC, magic)
    with pytest.raises(PackageError, match="no format that is known here"):
        apply(delta, base, new, tmp_path)


def test_endless_delta_writes_no_more_than_the_package(tuned, tmp_path):
    base, new = tuned
    size_bytes = new.stat().st_size
    zeros = bytes(1 << 24)
    base_bytes = base.stat().st_size
    bombs = [
        forge(base_bytes, size_bytes, [(0, size_bytes)] * 4, literals=zeros),
        forge(base_bytes, 1 << 40, [(0, 1 << 31)], literals=zeros),
        zstandard.ZstdCompressor().compress(zeros),
        zstandard.ZstdCompressor(write_content_size=False).compress(zeros),
        forge(base_bytes, size_bytes, [(0, 1)], literals=b"x", count=1 << 31),
    ]
    for bomb in bombs:
        with pytest.raises(PackageError):
            apply(bomb, base, new, tmp_path)
    assert not (tmp_path / "made").exists()


@cases(
    "run",
    [
        (1, 16, 1 << 32),  # beyond the base
        (1, 16, 1),  # before it
        (1, 0, 0),  # nothing, for ever
        (3, 4, 0),  # an unknown kind
        (4, 3, 0),  # half a word
        (5, 4, 0, 0, 1),  # channels none
        (5, 4, 0, 1 << 31, 1),
        (5, 4, 0, 1, 0),  # division by zero
        (7, 4, 0x3F800000),  # a product of nothing
        (8, 3, 0, 0x3F800000),  # half a float16
        (9, 4, 256),  # no byte
        (11, 6),  # half a float32
        (12, 1),
        (0x80, 4),  # literals have no codes
    ],
)
def test_malformed_run_is_refused(tuned, tmp_path, run):
    base, new = tuned
    with pytest.raises(PackageError, match="malformed"):
        delta = forge(
            *(base.stat().st_size, new.stat().st_size, [run]), literals=bytes(64), residuals=bytes(64)
        )
        apply(delta, base, new, tmp_path)


def test_delta_that_is_stopped_makes_nothing(tuned, tmp_path):
    base, new = tuned
    content = make_delta(base.read_bytes(), new.read_bytes())[1]
    stop = threading.Event()
    stop.set()
    size_bytes, sha256 = new.stat().st_size, hashlib.sha256(new.read_bytes()).hexdigest()
    with pytest.raises(PackageError, match="stopped"):
        apply_delta(
            *(io.BytesIO(content), base.read_bytes(), tmp_path / "made"),
            size_bytes=size_bytes,
            sha256=sha256,
            stop=stop,
        )
    assert not (tmp_path / "made").exists()


def test_smallest_delta_from_what_is_installed_is_chosen(monkeypatch):
    def offer(base, size_bytes, suffix=deltas.RUNS_SUFFIX):
        return DeltaOffer(from_sha256=base, path=f"c/x{suffix}", size_bytes=size_bytes, sha256="0")

    offers = (
        *(offer("a", 50), offer("b", 20), offer("c", 10), offer("a", 30, deltas.ZSTD_SUFFIX)),
        offer("", 60),
    )
    wanted = DesiredModel(
        *(), model="m", version="1", manifest_sha256="d", path="c/m", size_bytes=100, sha256="e",
        execution="e", release="r", rollout="o", deltas=offers,
    )  # fmt: skip
    assert find_delta(wanted, frozenset("ab")) == offers[1]
    assert find_delta(wanted, frozenset("a")) == offers[3]
    assert find_delta(wanted, frozenset()) == offers[4]  # a coded file, which needs no package
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    assert find_delta(wanted, frozenset("a")) == offers[0]
