"""Importing `.tflite` files: what is read, what is refused in which words, and that damage never crashes."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.small_tflite import Lite, computed_shape, small_cnn

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.importers.model_file import SourceModel
from edgekit_toolkit.importers.tflite.importer import load_tflite, read_model
from edgekit_toolkit.importers.tflite.trial import try_model
from edgekit_toolkit.models.tflite import TfliteModel
from edgekit_toolkit.tflite.flatbuffer import pack, parse, schema

SHARED = Path(__file__).resolve().parents[3] / "shared" / "models" / "models"


def load(folder: Path, content: bytes) -> SourceModel[TfliteModel]:
    path = folder / "net.tflite"
    path.write_bytes(content)
    return load_tflite(path)


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{name} is not here: ../shared/models is absent")
    return path


def test_float_model_tells_its_specs_and_layers(tmp_path: Path) -> None:
    model = load(tmp_path, small_cnn().content())
    assert [(spec.name, spec.dtype, spec.shape) for spec in model.inputs] == [("x", "float32", (1, 8, 8, 3))]
    assert [spec.name for spec in model.outputs] == ["y"]
    assert model.model.summary.operators["CONV_2D"] == 1
    assert {name: layer.precision for name, layer in model.model.summary.layers.items()} == {
        "a": "fp32", "d": "fp32", "z": "fp32",
    }  # fmt: skip
    assert model.model.summary.layers["a"].weight_bytes == 4 * (6 * 27 + 6)
    assert not model.model.summary.quantized


def test_output_has_the_shape_that_the_model_makes(tmp_path: Path) -> None:
    content = computed_shape((1, 1, 4)).content()
    model = load(tmp_path, content)
    assert model.outputs[0].shape == (1, 64, 4)
    assert model.sha256 == hashlib.sha256(content).hexdigest()  # of the file as it was given
    assert load(tmp_path, model.model.content).model.content == model.model.content


def test_output_of_a_size_that_depends_on_the_data_is_free_there(tmp_path: Path) -> None:
    model = load(tmp_path, computed_shape((1, 4), by_value=True).content())
    assert model.outputs[0].shape == ("y_0", 4)


def test_output_shape_that_is_right_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    content = computed_shape((1, 64, 4)).content()
    assert load(tmp_path, content).model.content == content


def test_old_file_names_its_operators(tmp_path: Path) -> None:
    model = load(tmp_path, small_cnn(old=True).content())
    assert set(model.model.summary.operators) == {
        "CONV_2D", "DEPTHWISE_CONV_2D", "ADD", "AVERAGE_POOL_2D", "RESHAPE", "FULLY_CONNECTED", "SOFTMAX",
    }  # fmt: skip


def test_file_is_not_changed(tmp_path: Path) -> None:
    content = small_cnn().content()
    model = load(tmp_path, content)
    assert model.path.read_bytes() == model.model.content == content


def test_python_files_beside_the_model_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resource.py").write_text("raise SystemExit('run')")  # of that name the trial imports one
    monkeypatch.chdir(tmp_path)
    load(tmp_path, small_cnn().content())


def test_quantized_model_tells_codes_and_takes_floats() -> None:
    model = load_tflite(shared("resnet8_cifar10_int8.tflite"))
    assert model.model.summary.quantized
    assert {layer.precision for layer in model.model.summary.layers.values()} == {"int8"}
    given = model.model.summary.inputs[0]
    assert (given.dtype, given.scale, given.zero_point) == ("int8", 1.0, -128)
    assert model.inputs[0].dtype == "float32"


def test_weight_quantized_model_is_quantized() -> None:
    summary = load_tflite(shared("dscnn_kws_weightquant.tflite")).model.summary
    assert summary.quantized
    assert "dynamic int8" in {layer.precision for layer in summary.layers.values()}


def no_scales(lite: Lite) -> None:
    lite.quantize("conv_w", [0.1] * 6, [0] * 6, axis=7)


def wrong_count(lite: Lite) -> None:
    lite.quantize("conv_w", [0.1] * 5, [0] * 5)


def negative_scale(lite: Lite) -> None:
    lite.quantize("a", [-0.5])


def large_zero_point(lite: Lite) -> None:
    lite.tensor("extra", (2,), "int8", np.zeros(2, np.int8))
    lite.quantize("extra", [0.1], [1000])


def zero_point_of_channels(lite: Lite) -> None:
    lite.quantize("conv_w", [0.1] * 6, [1] * 6)


def custom_operator(lite: Lite) -> None:
    code = lite.model.operatorCodes[0]
    code.deprecatedBuiltinCode = code.builtinCode = schema.BuiltinOperator.CUSTOM
    code.customCode = "FlexErf"


def unknown_operator(lite: Lite) -> None:
    lite.model.operatorCodes[0].builtinCode = 5000


def external_weights(lite: Lite) -> None:
    lite.graph.tensors[lite.place("conv_w")].externalBuffer = 3


def wrong_tensor(lite: Lite) -> None:
    lite.graph.operators[1].inputs[0] = 99


def wrong_buffer(lite: Lite) -> None:
    lite.graph.tensors[lite.place("a")].buffer = 77


def short_weights(lite: Lite) -> None:
    tensor = lite.graph.tensors[lite.place("conv_w")]
    lite.model.buffers[tensor.buffer].data = lite.model.buffers[tensor.buffer].data[:-4]


def nan_weights(lite: Lite) -> None:
    tensor = lite.graph.tensors[lite.place("dense_w")]
    values = np.frombuffer(lite.model.buffers[tensor.buffer].data.tobytes(), np.float32).copy()
    values[3] = np.nan
    lite.model.buffers[tensor.buffer].data = np.frombuffer(values.tobytes(), np.uint8)


def no_outputs(lite: Lite) -> None:
    lite.graph.outputs = []


def no_operators(lite: Lite) -> None:
    lite.graph.operators = []


def wrong_order(lite: Lite) -> None:
    lite.graph.operators.reverse()


def made_twice(lite: Lite) -> None:
    lite.graph.operators[1].outputs = [lite.place("a")]


def other_version(lite: Lite) -> None:
    lite.model.version = 2


@cases(
    ("damage", "words"),
    [
        (no_scales, ["'conv_w'", "quantized_dimension is 7", "0 to 3"]),
        (wrong_count, ["'conv_w'", "5 scales for 6 channels"]),
        (negative_scale, ["'a'", "-0.5"]),
        (large_zero_point, ["'extra'", "zero point 1000 is no INT8"]),
        (zero_point_of_channels, ["'conv_w'", "zero points of channels"]),
        (custom_operator, ["'FlexErf'", "operator 0", "'a'", "SELECT_TF_OPS"]),
        (unknown_operator, ["operator 0", "5000"]),
        (external_weights, ["'conv_w'", "another file"]),
        (wrong_tensor, ["operator 1", "tensor 99 of"]),
        (wrong_buffer, ["'a'", "buffer 77 of"]),
        (short_weights, ["'conv_w'", "takes 648 bytes", "has 644"]),
        (nan_weights, ["'dense_w'", "1 NaN"]),
        (no_outputs, ["no outputs"]),
        (no_operators, ["no operators"]),
        (wrong_order, ["operator 0 (SOFTMAX)", "'z'", "before it is made"]),
        (made_twice, ["operator 1 (DEPTHWISE_CONV_2D)", "'a'"]),
        (other_version, ["version 2"]),
    ],
)
def test_damaged_model_is_refused_by_name(
    damage: Callable[[Lite], None], words: list[str], tmp_path: Path
) -> None:
    lite = small_cnn()
    damage(lite)
    with pytest.raises(ModelError) as caught:
        load(tmp_path, lite.content())
    message = str(caught.value)
    assert str(tmp_path / "net.tflite") in message
    for word in words:
        assert word in message


def test_shapes_that_do_not_fit_are_refused_by_the_engine(tmp_path: Path) -> None:
    lite = small_cnn()
    lite.graph.tensors[lite.place("conv_w")].shape = [6, 3, 1, 9]
    with pytest.raises(ModelError, match="LiteRT"):
        load(tmp_path, lite.content())


def test_division_by_zero_in_the_engine_ends_another_process() -> None:
    lite = small_cnn()
    lite.graph.operators[0].builtinOptions.strideW = 0
    with pytest.raises(ModelError, match="LiteRT"):
        try_model(lite.content(), max_memory_bytes=16 << 30, time_limit_s=60)


@cases("kept", [0, 3, 8, 40, 400, 2000, -1])
def test_truncated_file_is_refused(kept: int, tmp_path: Path) -> None:
    content = small_cnn().content()
    with pytest.raises(ModelError, match=r"net\.tflite"):
        load(tmp_path, content[: kept if kept >= 0 else len(content) + kept - 200])


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "empty"), (b"\x08\x07 something else", "TFL3"), (b"PK\x03\x04rest of a zip", "ZIP")],
)
def test_other_file_is_named(content: bytes, word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=word):
        load(tmp_path, content)


def test_too_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.tflite"
    with path.open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(ModelError, match="2000000000"):
        load_tflite(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load_tflite(tmp_path / "none.tflite")
    with pytest.raises(ModelError, match="folder"):
        load_tflite(tmp_path)


def test_overlapping_tables_are_refused_quickly() -> None:
    """Each of many operators claims the same long vector: following it would take quadratic time."""
    content = small_cnn().content()
    model = parse(content)
    model.subgraphs[0].tensors[0].shapeSignature = np.zeros(20_000, np.int32)
    content = bytearray(pack(model))
    wide = content.find((20_000).to_bytes(4, "little"))
    for place in range(0, len(content) - 4, 4):
        offset = int.from_bytes(content[place : place + 4], "little")
        # Every vector of 3 or 4 sizes becomes the long one.
        if place < wide and 0 < place + offset < len(content) - 4 and content[place + offset] in {3, 4}:
            content[place : place + 4] = (wide - place).to_bytes(4, "little")
    with pytest.raises(ModelError):
        read_model(bytes(content))


def test_flipped_bytes_import_or_are_refused(tmp_path: Path, is_long: bool) -> None:
    content = small_cnn().content()
    rng = np.random.default_rng(11)
    passed = []
    for _ in range(500):
        damaged = bytearray(content)
        damaged[int(rng.integers(len(content)))] ^= int(rng.integers(1, 256))
        try:
            read_model(bytes(damaged))
        except ModelError:
            continue
        passed.append(bytes(damaged))
    assert 50 < len(passed) < 500
    # What passes the screen meets the engine, in a process each; a few of them show what comes of it.
    sample = passed[:: len(passed) // (20 if is_long else 4)]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(
            pool.map(lambda one: _outcome(one[1], tmp_path / f"{one[0]}.tflite"), enumerate(sample))
        )
    assert set(outcomes) <= {"imported", "refused"}
    assert "imported" in outcomes


def _outcome(content: bytes, path: Path) -> str:
    path.write_bytes(content)
    try:
        load_tflite(path, time_limit_s=60)
    except ModelError:
        return "refused"
    return "imported"
