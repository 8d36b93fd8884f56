"""A quantized model that is given samples of another preprocessing than it was quantized with."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.package_run import package, stored
from tests.toolkit.small_models import Array, model_of, node

from edgekit_toolkit.models.input_codes import onnx_code_ranges, tflite_code_ranges
from edgekit_toolkit.samples.range_trap import CodeRange, find_codes_trap

if TYPE_CHECKING:
    from tests.toolkit.small_tflite import Lite

SHARED = Path(__file__).resolve().parents[3] / "shared" / "models"
UNIT, SIGNED, PIXELS = (0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)
# Mean and deviation of ImageNet: what 0..1 becomes.
STANDARDISED = (-2.12, 2.64)
with_litert = pytest.mark.skipif(not find_spec("ai_edge_litert"), reason="LiteRT is not installed")


def uniform(low: float, high: float, count: int = 8) -> list[dict[str, Array]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.uniform(low, high, (1, 8, 8, 3)).astype(np.float32)} for _ in range(count)]


@cases(
    ("codes", "given", "fault"),
    [
        (UNIT, SIGNED, "of its values"),
        (UNIT, PIXELS, "of its values"),
        (UNIT, STANDARDISED, "of its values"),
        (SIGNED, UNIT, "a part of it only"),
        (SIGNED, PIXELS, "of its values"),
        (PIXELS, UNIT, "a part of it only"),
        (PIXELS, SIGNED, "a part of it only"),
        (STANDARDISED, UNIT, "a part of it only"),
    ],
)
def test_samples_of_another_preprocessing_are_a_range_trap(
    codes: tuple[float, float], given: tuple[float, float], fault: str
) -> None:
    (warning,) = find_codes_trap({"x": CodeRange(*codes, may_be_symmetric=False)}, uniform(*given))
    assert warning.startswith("RANGE TRAP: the model was quantized for values of input 'x' in ")
    assert fault in warning


@cases("held", [UNIT, SIGNED, PIXELS, STANDARDISED])
@cases("count", [1, 4, 100])
def test_samples_of_the_same_preprocessing_are_no_range_trap(held: tuple[float, float], count: int) -> None:
    codes = {"x": CodeRange(*held, may_be_symmetric=False)}
    assert find_codes_trap(codes, uniform(*held, count=count)) == []


def test_few_samples_with_short_tails_are_no_range_trap() -> None:
    codes = {"x": CodeRange(-123.4, 25.7, may_be_symmetric=False)}
    assert find_codes_trap(codes, uniform(-25.0, 20.0)) == []


def test_positive_samples_of_symmetric_codes_are_no_range_trap() -> None:
    assert find_codes_trap({"x": CodeRange(-1.0, 1.0, may_be_symmetric=True)}, uniform(*UNIT)) == []


@pytest.mark.parametrize(("zero_point", "symmetric"), [(np.uint8(0), False), (np.int8(0), True)])
@pytest.mark.parametrize("moved", [False, True])
def test_float_input_that_is_quantized_has_the_range_of_its_codes(
    zero_point: Any, symmetric: bool, moved: bool
) -> None:
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
        node("QuantizeLinear", ["t" if moved else "x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("Relu", ["d"], ["y"]),
    ]
    weights = {"s": np.float32(0.5), "z": zero_point}
    found = onnx_code_ranges(model_of(nodes[not moved :], weights, {"x": [1, 8, 8, 3]}))
    limits = np.iinfo(zero_point.dtype)
    assert found == {"x": CodeRange(0.5 * limits.min, 0.5 * limits.max, symmetric)}


def test_float_input_that_is_computed_with_has_no_codes() -> None:
    nodes = [
        node("Mul", ["x", "s"], ["m"]),
        node("QuantizeLinear", ["m", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    model = model_of(nodes, {"s": np.float32(0.5), "z": np.uint8(0)}, {"x": [1, 8]})
    assert onnx_code_ranges(model) == {}


def lite_relu(dtype: str, *, quantize: bool = False) -> "Lite":
    """y = relu(x) on codes for 0..1; x is the codes, or floats that QUANTIZE turns into them."""
    from tests.toolkit.small_tflite import Lite

    lite = Lite()
    zero_point = -128 if dtype == "int8" else 0
    names = ["q" if quantize else "x", "y"]
    if quantize:
        lite.tensor("x", (1, 8, 8, 3))
    for name in names:
        lite.tensor(name, (1, 8, 8, 3), dtype)
        lite.quantize(name, [1 / 255], [zero_point])
    if quantize:
        lite.operator("QUANTIZE", ["x"], ["q"], "QuantizeOptions")
    lite.operator("RELU", names[:1], names[1:])
    lite.ends(["x"], ["y"])
    return lite


@with_litert
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_tflite_input_has_the_range_of_its_codes(dtype: str, quantize: bool) -> None:
    found = tflite_code_ranges(lite_relu(dtype, quantize=quantize).content())
    assert (found["x"].low, found["x"].high) == pytest.approx((0, 1))
    assert not found["x"].may_be_symmetric


@with_litert
@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("given", "warns"), [(SIGNED, True), (UNIT, False), (None, False)])
def test_package_of_a_quantized_tflite_warns_of_other_samples(
    given: tuple[float, float] | None, warns: bool, tmp_path: Path
) -> None:
    model = tmp_path / "net.tflite"
    model.write_bytes(lite_relu("int8").content())
    data: tuple[object, ...] = ()
    if given is not None:
        rows = np.concatenate([feeds["x"] for feeds in uniform(*given)])
        data = ("--eval", stored(tmp_path / "data.npz", {"x": rows}))
    outcome = package(model, tmp_path / "out", *data, "--json", target="rpi5")
    assert outcome.code == 0, outcome.stderr
    assert any("RANGE TRAP" in text for text in outcome.json["warnings"]) == warns
    (recipe,) = (tmp_path / "out").glob("*.recipe.json")
    low, high = json.loads(recipe.read_text())["golden_ranges"]["x"]
    if given is None:  # generated inputs take the range of the codes
        assert (low, high) == pytest.approx((0, 1), abs=0.2)
        assert low >= 0


@with_litert
@pytest.mark.parametrize(
    ("model", "data", "right", "wrong"),
    [
        ("mobilenetv1_025_vww_int8", "vww_coco_train128", lambda x: x / 255, lambda x: x / 127.5 - 1),
        ("resnet8_cifar10_int8", "cifar10_jpeg", lambda x: x, lambda x: x / 255),
        ("dscnn_kws_int8", "kws01_mfcc", lambda x: (x - 83) * 0.584703, lambda x: x / 128),
    ],
)
def test_only_wrong_samples_of_a_real_model_are_a_range_trap(
    model: str, data: str, right: Any, wrong: Any
) -> None:
    if not SHARED.is_dir():
        pytest.skip("needs the real models in ../shared/models")
    codes = tflite_code_ranges((SHARED / "models" / f"{model}.tflite").read_bytes())
    (name,) = codes
    images = np.load(SHARED / "data" / f"{data}.npz")["x"].astype(np.float32)[:128]
    for count in (4, 16, 128):
        assert find_codes_trap(codes, [{name: right(image)} for image in images[:count]]) == []
        assert len(find_codes_trap(codes, [{name: wrong(image)} for image in images[:count]])) == 1
