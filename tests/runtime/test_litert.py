import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.toolkit.cases import cases

pytest.importorskip("ai_edge_litert")
from tests.runtime.tflite_models import Node, Tensor, linear, quantized_linear, schema, write

from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.sessions import EngineMissingError, open_session
from edgekit_runtime.sessions.litert.quantized import Quantization
from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
from edgekit_runtime.sessions.options import read_options
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.tensors import TensorSpec

X = np.array([[1, 0, 0, 0], [0, 1, 0, 1]], np.float32)
Y = np.array([[1, 2], [10, 12]], np.float32)
RAW = LiteRtOptions(float_io=False)


@pytest.fixture
def session() -> LiteRtSession:
    return LiteRtSession(linear())


@pytest.mark.parametrize("options", [LiteRtOptions(), LiteRtOptions(threads=2), LiteRtOptions(xnnpack=False)])
def test_a_session_computes_the_model_whatever_the_options(options: LiteRtOptions) -> None:
    outputs = LiteRtSession(linear(), options).run({"x": X})
    assert list(outputs) == ["y"]
    np.testing.assert_array_equal(outputs["y"], Y)  # sums of small whole numbers are exact in float32


@pytest.mark.parametrize("kind", ["bytes", "memoryview", "path"])
def test_a_model_is_loaded_from_memory_and_from_a_file(kind: str, tmp_path: Path) -> None:
    content = linear()
    (tmp_path / "model.tflite").write_bytes(content)
    model = {"bytes": content, "memoryview": memoryview(content), "path": tmp_path / "model.tflite"}[kind]
    np.testing.assert_array_equal(LiteRtSession(model).run({"x": X})["y"], Y)


def test_without_a_signature_names_are_those_of_the_tensors(session: LiteRtSession) -> None:
    assert (session.inputs, session.outputs) == (
        (TensorSpec("x", "float32", ("x_0", 4)),),
        (TensorSpec("y", "float32", ("y_0", 2)),),
    )


def test_the_only_signature_names_inputs_and_outputs() -> None:
    session = LiteRtSession(linear(({"image": 0}, {"scores": 2})))
    assert session.inputs == (TensorSpec("image", "float32", ("image_0", 4)),)
    np.testing.assert_array_equal(session.run({"image": X})["scores"], Y)


def test_a_signature_that_does_not_cover_the_outputs_is_not_used() -> None:
    session = LiteRtSession(linear(({"image": 0}, {})))
    assert [spec.name for spec in (*session.inputs, *session.outputs)] == ["x", "y"]


def test_tensors_of_one_name_are_refused() -> None:
    tensors = [Tensor("x", (1, 4)), Tensor("x", (1, 4)), Tensor("y", (1, 4))]
    with pytest.raises(BackendError, match="two tensors have the name 'x'"):
        LiteRtSession(write(tensors, [Node("MAXIMUM", (0, 1), (2,))], (0, 1), (2,)))


def test_the_batch_may_change_from_run_to_run(session: LiteRtSession) -> None:
    for rows in (1, 2, 2, 7, 1):
        inputs = np.tile(X[:1], (rows, 1))
        np.testing.assert_array_equal(session.run({"x": inputs})["y"], np.tile(Y[:1], (rows, 1)))


def test_a_size_that_the_model_cannot_run_is_refused_and_the_next_run_is_right() -> None:
    tensors = [
        Tensor("x", (1, 4), signature=(-1, 4)),
        Tensor("shape", (2,), "int32", values=np.array([2, 2], np.int32)),
        Tensor("y", (2, 2)),
    ]
    session = LiteRtSession(write(tensors, [Node("RESHAPE", (0, 1), (2,))], (0,), (2,)))
    with pytest.raises(BackendError, match="running the model failed"):
        session.run({"x": X})
    np.testing.assert_array_equal(session.run({"x": X[:1]})["y"], X[:1].reshape(2, 2))


def test_outputs_belong_to_the_caller(session: LiteRtSession) -> None:
    first = session.run({"x": X[:1]})["y"]
    session.run({"x": X[1:]})
    np.testing.assert_array_equal(first, Y[:1])
    first[:] = 0
    np.testing.assert_array_equal(session.run({"x": X[:1]})["y"], Y[:1])


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({}, "got inputs .*expected .*'x'"),
        ({"z": X}, "'z'"),
        ({"x": X, "z": X}, "'z'"),
        ({"x": X.astype(np.float64)}, "<f8"),
        ({"x": X[0]}, r"shape \[4\]"),
        ({"x": X.T}, r"shape \[4, 2\]"),
        ({"x": X[:0]}, r"shape \[0, 4\], expected sizes of at least 1"),
        ({"x": X.tolist()}, "list"),
    ],
)
def test_inputs_that_do_not_fit_never_reach_the_engine(
    inputs: dict[str, Any], reason: str, session: LiteRtSession
) -> None:
    with pytest.raises(DataError, match=reason):
        session.run(inputs)


def test_inputs_need_not_be_contiguous(session: LiteRtSession) -> None:
    np.testing.assert_array_equal(session.run({"x": np.asfortranarray(X)})["y"], Y)


def test_a_closed_session_refuses_to_run(session: LiteRtSession) -> None:
    session.close()
    session.close()
    with pytest.raises(BackendError, match="closed"):
        session.run({"x": X})


def test_who_is_alone_in_a_session_keeps_others_waiting(session: LiteRtSession) -> None:
    inputs = {spec.name: np.ones((1, *spec.shape[1:]), spec.dtype) for spec in session.inputs}
    other = threading.Thread(target=session.run, args=(inputs,))
    with session.alone:
        other.start()
        other.join(0.05)
        assert other.is_alive()
        assert session.run(inputs)
        assert other.is_alive()
    other.join(60)
    assert not other.is_alive()


def test_several_threads_with_different_batches_share_a_session(session: LiteRtSession) -> None:
    results: dict[int, Any] = {}

    def work(factor: int) -> None:
        inputs = np.tile(X * np.float32(factor), (factor, 1))
        results[factor] = [session.run({"x": inputs})["y"] for _ in range(20)]

    threads = [threading.Thread(target=work, args=(factor,)) for factor in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for factor, outputs in results.items():
        np.testing.assert_array_equal(outputs, np.stack([np.tile(Y * factor, (factor, 1))] * 20))


@pytest.mark.parametrize(("dtype", "zero_point"), [("int8", -3), ("uint8", 120)])
def test_quantized_inputs_and_outputs_are_float_to_the_caller(dtype: str, zero_point: int) -> None:
    session = LiteRtSession(quantized_linear(dtype, 0.5, zero_point))
    assert [spec.dtype for spec in (*session.inputs, *session.outputs)] == ["float32", "float32"]
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y)  # all values lie on the grids


def test_without_float_io_the_caller_gives_and_gets_codes() -> None:
    session = LiteRtSession(quantized_linear("int8", 0.5, -3), RAW)
    assert [spec.dtype for spec in (*session.inputs, *session.outputs)] == ["int8", "int8"]
    codes = session.run({"x": (X * 2 - 3).astype(np.int8)})["y"]
    np.testing.assert_array_equal(codes, Y - 3)
    assert codes.dtype == np.int8


def test_quantizing_rounds_halves_to_even_and_clips() -> None:
    encoded = Quantization("x", "int8", 0.5, 0).encode(np.float32([0.25, 0.75, -0.25, 1e9, -np.inf]))
    np.testing.assert_array_equal(encoded, np.int8([0, 2, 0, 127, -128]))


def test_nan_has_no_code() -> None:
    with pytest.raises(DataError, match="'x': holds NaN, which has no int8 code"):
        LiteRtSession(quantized_linear()).run({"x": X * np.float32(np.nan)})


def test_whole_numbers_without_a_scale_stay_whole_numbers() -> None:
    tensors = [Tensor("x", (1, 4), "int32"), Tensor("y", (1, 4), "int32")]
    session = LiteRtSession(write(tensors, [Node("ABS", (0,), (1,))], (0,), (1,)))
    np.testing.assert_array_equal(session.run({"x": np.int32([[-1, 2, -3, 4]])})["y"], [[1, 2, 3, 4]])


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "refused the model"),
    "garbage": (lambda: b"garbage", "refused the model"),
    "zeros": (lambda: bytes(1000), "refused the model"),
    "truncated": (lambda: linear()[:300], "refused the model"),
    "custom operator": (
        lambda: write([Tensor("x", (1, 4)), Tensor("y", (1, 4))], [Node("Banana", (0,), (1,))], (0,), (1,)),
        "custom op: Banana",
    ),
    "quantized_dimension out of range": (lambda: quantized_linear(axis=7), "quantized_dimension"),
    "scale is NaN": (lambda: quantized_linear(scale=float("nan")), "scale"),
    "two scales at the input": (
        lambda: linear(dtype="int8", scales=[0.1, 0.2], zero_points=[0, 0], axis=1),
        "scale",
    ),
    "strings": (lambda: linear(dtype="string"), "refused the model"),
    "no name": (lambda: linear(name=""), "name is ''"),
    "a name that is no text": (lambda: linear(name=b"\xed\xa0"), "cannot be read"),
}


@cases("options", [LiteRtOptions(), LiteRtOptions(xnnpack=False)], ids=["xnnpack", "plain"])
@cases("case", HOSTILE)
def test_a_model_that_cannot_run_is_a_backend_error(case: str, options: LiteRtOptions) -> None:
    content, reason = HOSTILE[case]
    with pytest.raises(BackendError, match=reason):
        LiteRtSession(content(), options)


def test_a_missing_file_is_a_backend_error() -> None:
    with pytest.raises(BackendError, match=r"nowhere/model\.tflite"):
        LiteRtSession(Path("/nowhere/model.tflite"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"threads": 0}, "threads is 0"),
        ({"xnnpack": 1}, "xnnpack is 1"),
        ({"float_io": None}, "float_io is None"),
        ({"spinning": True}, r"unknown setting 'spinning'"),
    ],
)
def test_wrong_options_are_a_backend_error(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BackendError, match=f"backend 'litert': {reason}"):
        read_options(LiteRtOptions, "litert", options)


@pytest.fixture
def package_of(maker: Any, tmp_path: Path) -> Callable[..., Path]:
    def make(content: bytes, **options: Any) -> Path:
        path = tmp_path / "x.edgepkg"
        artifacts = {**maker.artifacts, "model.tflite": content}
        maker.roles["model.tflite"] = "model"
        choice = BackendChoice("litert", "model.tflite", options, BackendChoice("ort", "model.onnx"))
        write_package(path, maker.manifest(artifacts, backend=choice), artifacts, maker.signer)
        return path

    return make


def test_open_session_runs_a_package_with_litert(maker: Any, package_of: Callable[..., Path]) -> None:
    from edgekit_runtime.package.archive import read_package

    with read_package(package_of(linear(), threads=1), maker.trust) as package:
        session = open_session(package)
        assert isinstance(session, LiteRtSession)
        assert run_selftest(session, package).passed


def test_a_package_whose_model_is_refused_is_named(maker: Any, package_of: Callable[..., Path]) -> None:
    with pytest.raises(BackendError, match=r"x\.edgepkg: 'model\.tflite': .*quantized_dimension"):
        open_session(package_of(quantized_linear(axis=7)), trust=maker.trust)


def test_a_model_of_other_dtypes_than_the_manifest_is_refused(
    maker: Any, package_of: Callable[..., Path]
) -> None:
    path = package_of(quantized_linear(), float_io=False)
    with pytest.raises(BackendError, match=r"'model\.tflite' has inputs .*int8.*manifest says .*float32"):
        open_session(path, trust=maker.trust)


@pytest.fixture
def without_litert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)


@pytest.mark.usefixtures("without_litert")
def test_a_missing_engine_names_what_to_install() -> None:
    with pytest.raises(EngineMissingError, match=r"tflite-runtime .*-m pip install .*\[litert\]'"):
        LiteRtSession(linear())


@pytest.mark.usefixtures("without_litert")
def test_without_litert_a_package_runs_on_its_fallback(maker: Any, package_of: Callable[..., Path]) -> None:
    session = open_session(package_of(linear()), trust=maker.trust)
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y)


def test_tflite_runtime_serves_where_it_is_the_only_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from ai_edge_litert import interpreter  # of the same interface

    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    monkeypatch.setitem(sys.modules, "tflite_runtime", interpreter)
    monkeypatch.setitem(sys.modules, "tflite_runtime.interpreter", interpreter)
    np.testing.assert_array_equal(LiteRtSession(linear()).run({"x": X})["y"], Y)


def test_a_fresh_process_prints_nothing_of_the_engines(tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(linear())
    code = (
        "import sys; from pathlib import Path;"
        "from edgekit_runtime.sessions.litert.session import LiteRtSession;"
        "LiteRtSession(Path(sys.argv[1])); print('own line', file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, tmp_path / "model.tflite"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (result.stdout, result.stderr) == ("", "own line\n")


DAMAGE = """
import random, sys
from pathlib import Path
import numpy as np
from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.sessions.litert.session import LiteRtSession

content = Path(sys.argv[1]).read_bytes()
rng = random.Random(0)
refused = 0
for length in range(0, len(content), 7):
    changed = content[:length]
    if rng.random() < 0.5:  # zeros instead of what is cut off
        changed += bytes(len(content) - length)
    try:
        session = LiteRtSession(changed)
        session.run({spec.name: np.ones((1, 4), np.float32) for spec in session.inputs})
    except (BackendError, DataError):
        refused += 1
print(refused)
"""


@pytest.mark.parametrize("make", [linear, quantized_linear])
def test_truncated_and_blanked_files_are_refused_or_computed(
    make: Callable[[], bytes], tmp_path: Path
) -> None:
    (tmp_path / "model.tflite").write_bytes(make())
    result = subprocess.run(
        [sys.executable, "-c", DAMAGE, tmp_path / "model.tflite"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-1000:]
    assert int(result.stdout) > 60  # of about 80; a file without its tail of padding still computes


@pytest.mark.int8_products
def test_sums_of_8_bit_products_are_exact() -> None:
    x, weight = np.full((1, 64), 127, np.int8), np.full((3, 64), 127, np.int8)
    scale = 127 * 127 * 64 / 100
    tensors = [
        Tensor("x", x.shape, "int8", scales=[1.0], zero_points=[0]),
        Tensor("w", weight.shape, "int8", scales=[1.0], zero_points=[0], values=weight),
        Tensor("y", (1, 3), "int8", scales=[scale], zero_points=[0]),
    ]
    product = Node("FULLY_CONNECTED", (0, 1, -1), (2,), schema.FullyConnectedOptionsT())
    session = LiteRtSession(write(tensors, [product], (0,), (2,)))
    (y,) = session.run({"x": x.astype(np.float32)}).values()
    np.testing.assert_allclose(y, np.full((1, 3), 100 * scale), rtol=1e-6)
