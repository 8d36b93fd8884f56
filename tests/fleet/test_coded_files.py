"""Coded files of packages: how small they are, and what a damaged or malicious one does."""

import io
import lzma

import numpy as np
import onnx
import pytest
from tests.fleet.test_deltas import apply, forge, model, package, tune

from edgekit_fleet.releases.deltas import make_delta
from edgekit_host.transport.package_encoder import coded_size, encode
from edgekit_runtime.agent.artifacts import deltas
from edgekit_runtime.errors import PackageError
from edgekit_runtime.package.canonical_zip import write_archive
from edgekit_runtime.package.golden import draw_bytes

SCALES = np.ones(64, np.float32)


def few_values(seed=0, inputs=512):
    """int8 weights of about 2.5 bits, and their entropy in bytes."""
    codes = np.rint(np.random.default_rng(seed).laplace(0, 1, (64, inputs))).astype(np.int8)
    shares = np.unique(codes, return_counts=True)[1] / codes.size
    return codes, -codes.size * float((shares * np.log2(shares)).sum()) / 8


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.fixture
def new(tmp_path):
    return package(tmp_path / "new", model(few_values()[0], SCALES))


def apply_coded(content, new, tmp_path):
    (tmp_path / "made").unlink(missing_ok=True)
    apply(content, None, new, tmp_path)


def test_weights_of_few_values_cost_their_entropy(new, tmp_path):
    _, entropy_bytes = few_values()
    suffix, content = make_delta(b"", new.read_bytes())
    assert suffix == deltas.RUNS_SUFFIX
    assert len(content) < 1.01 * entropy_bytes + 250
    assert coded_size(new.read_bytes()) == len(content)
    apply_coded(content, new, tmp_path)


def test_package_that_packs_badly_has_no_coded_file(tmp_path):
    new = package(tmp_path / "new", np.random.default_rng(0).bytes(100_000), "model.bin")
    assert make_delta(b"", new.read_bytes()) is None
    assert coded_size(new.read_bytes()) == new.stat().st_size


@pytest.mark.parametrize(
    "dtype",
    [
        *("int8", "int4", "float16", "float32"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("uint8", "int32", "int64", "bfloat16")),
    ],
)
def test_coded_file_of_each_type_is_no_larger_than_lzma(tmp_path, dtype):
    floats = np.random.default_rng(1).normal(0, 0.05, (48, 600)).astype(np.float32)
    codes = np.rint(100 * floats).astype(np.int8)
    content = {
        "int8": codes,
        "uint8": codes.view(np.uint8) ^ 0x80,
        "int4": (codes[:, ::2] & 15 | codes[:, 1::2] << 4).astype(np.int8),
        "bfloat16": (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.float16),
    }.get(dtype)
    if content is None:
        content = floats.astype(dtype) if "float" in dtype else codes.astype(dtype)
    new = package(tmp_path / "new", model(content, SCALES[:1]))
    packed = min(
        len(
            lzma.compress(
                new.read_bytes(), lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": lc}]
            )
        )
        for lc in (0, 3)
    )
    coded = encode(b"", new.read_bytes())
    apply_coded(coded, new, tmp_path)
    assert len(coded) <= packed


def test_tensors_without_elements_are_coded(tmp_path):
    made = onnx.load_from_string(model(few_values()[0], SCALES))
    for shape in ((0,), (4, 0)):
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.int8), f"empty{shape}"))
    new = package(tmp_path / "new", made.SerializeToString())
    apply_coded(encode(b"", new.read_bytes()), new, tmp_path)


def archive(path, *members):
    buffer = io.BytesIO()
    write_archive(buffer, members)
    return write(path, buffer.getvalue())


def test_golden_noise_travels_as_its_seed(tmp_path):
    noise, other = draw_bytes(3, 0, 5000).tobytes(), draw_bytes(3, 1, 5001).tobytes()
    new = archive(tmp_path / "new", ("golden/input0.bin", noise), ("manifest.json", b"{}"))
    assert coded_size(new.read_bytes()) < 200
    apply_coded(encode(b"", new.read_bytes()), new, tmp_path)
    assert coded_size(new.read_bytes().replace(noise, other)) > 5000
    earlier = archive(tmp_path / "earlier", ("golden/input0.bin", other), ("manifest.json", b"{}"))
    assert len(encode(earlier.read_bytes(), new.read_bytes())) < 300


@pytest.mark.parametrize("step", [2.0**-140, 2.0**-9, 1.0, 2.0**100])
def test_floats_of_few_multiples_travel_as_whole_numbers(tmp_path, step):
    counts = np.random.default_rng(2).integers(-100, 100, 2000)
    new = archive(tmp_path / "new", ("golden/rows0.bin", (counts * step).astype("<f4").tobytes()))
    content = encode(b"", new.read_bytes())
    assert len(content) < 1.1 * len(counts) + 150
    apply_coded(content, new, tmp_path)


@pytest.mark.parametrize("value", [-0.0, np.nan, np.inf, 1e-44, 3e38])
def test_odd_float_among_multiples_is_made_exactly(tmp_path, value):
    floats = np.append(np.arange(-50, 50) / 8, value).astype("<f4")
    new = archive(tmp_path / "new", ("golden/rows0.bin", floats.tobytes()), ("padding", bytes(1000)))
    apply_coded(encode(b"", new.read_bytes()), new, tmp_path)


@pytest.mark.parametrize("bits", [0x7FA00000, 0x7F800000, 0xFFFFFFFF, 1])
def test_step_that_is_no_number_makes_other_bytes_without_a_warning(bits):
    assert deltas.multiply_step(np.arange(-3, 3, dtype=np.int16), bits).shape == (24,)


@pytest.mark.parametrize("run", [(14, 100, 1 << 16), (0x8E, 100, 0), (13, 102, 0), (14, 1 << 33, 0)])
def test_forged_run_of_noise_or_multiples_is_refused(new, tmp_path, run):
    with pytest.raises(PackageError, match="malformed"):
        apply_coded(forge(0, new.stat().st_size, [run]), new, tmp_path)


def test_archive_without_a_model_is_coded(tmp_path):
    buffer = io.BytesIO()
    write_archive(buffer, [("manifest.json", b"{}")])
    new = write(tmp_path / "new", buffer.getvalue())
    apply_coded(encode(b"", new.read_bytes()), new, tmp_path)


def test_new_tensor_of_a_delta_is_coded(tmp_path):
    before, _ = tune()
    base = package(tmp_path / "base", model(*before))
    made = onnx.load_from_string(model(*before))
    codes, entropy_bytes = few_values()
    made.graph.initializer.append(onnx.numpy_helper.from_array(codes, "another"))
    new = package(tmp_path / "new", made.SerializeToString(deterministic=True))
    _, content = make_delta(base.read_bytes(), new.read_bytes())
    assert len(content) < 1.02 * entropy_bytes + 250
    apply(content, base, new, tmp_path)


def test_damaged_coded_file_makes_nothing(tmp_path, is_long):
    new = package(tmp_path / "new", model(few_values(inputs=60)[0], SCALES))
    content = encode(b"", new.read_bytes())
    rng = np.random.default_rng(5)
    for position in rng.integers(len(content), size=150 if is_long else 30):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.integers(8)
        with pytest.raises(PackageError):
            apply_coded(bytes(damaged), new, tmp_path)
        assert not (tmp_path / "made").exists()
    for end in (*range(0, 60, 1 if is_long else 7), len(content) // 2, len(content) - 1):
        with pytest.raises(PackageError):
            apply_coded(content[:end], new, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_random_coded_file_makes_nothing(new, tmp_path):
    rng = np.random.default_rng(6)
    size_bytes = new.stat().st_size
    head = encode(b"", new.read_bytes())[: len(forge(0, size_bytes, [])) - 10]
    for _ in range(1000):
        with pytest.raises(PackageError):
            apply_coded(head[: rng.integers(8, len(head))] + rng.bytes(rng.integers(200)), new, tmp_path)


def test_coded_file_that_claims_gigabytes_is_refused(new, tmp_path):
    size_bytes = new.stat().st_size
    bombs = [
        forge(0, 1 << 33, [(0, 1 << 33)]),
        forge(0, size_bytes, [(0x89, 1 << 33, 0)], codes=(1 << 33, bytes(900))),
        forge(0, size_bytes, [(0x89, size_bytes, 0)], codes=(1 << 33, bytes(900))),
        forge(0, size_bytes, [(9, size_bytes, 0)], residuals=bytes(1 << 26)),
    ]
    for bomb in bombs:
        assert len(bomb) < 20_000
        with pytest.raises(PackageError):
            apply_coded(bomb, new, tmp_path)


@pytest.mark.parametrize(
    "codes",
    [
        (0, b""),  # none
        (100, b"\xff" + bytes(200)),  # fewer than the run needs
        ("all", b""),  # no stream
        ("all", b"\x00" + bytes(15)),  # half the states
        ("all", b"\x07" + bytes(16)),  # states below 2^16
        ("all", b"\x07" + b"\xff" * 17),  # half a word
    ],
)
def test_codes_that_contradict_the_runs_are_refused(new, tmp_path, codes):
    size_bytes = new.stat().st_size
    number = size_bytes if codes[0] == "all" else codes[0]
    content = forge(0, size_bytes, [(0x89, size_bytes, 0)], codes=(number, codes[1]))
    with pytest.raises(PackageError):
        apply_coded(content, new, tmp_path)


@pytest.mark.parametrize("lzma_model", [44, 224, 226, 1 << 40])
def test_unknown_lzma_model_is_refused(new, tmp_path, lzma_model):
    with pytest.raises(PackageError):
        apply_coded(forge(0, new.stat().st_size, [(0, 9)], lzma_model=lzma_model), new, tmp_path)


def test_coded_file_and_delta_are_not_confused(new, tmp_path):
    base = package(tmp_path / "base", model(few_values(1)[0], SCALES))
    coded, delta = encode(b"", new.read_bytes()), encode(base.read_bytes(), new.read_bytes())
    for content, wrong_base in ((coded, base), (delta, None)):
        with pytest.raises(PackageError, match="expected"):
            apply(content, wrong_base, new, tmp_path)
