"""Quantizing `.tflite` models: forms, ranges, which operators become integer kernels, and the search."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.small_tflite import Array, Lite, images, small_cnn

from edgekit_runtime.errors import DataError, RecipeError
from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
from edgekit_toolkit.costs.tflite_operators import tflite_costs
from edgekit_toolkit.importers.tflite.importer import load_tflite, read_model
from edgekit_toolkit.models.tflite import TfliteModel
from edgekit_toolkit.pipeline.candidates import find_candidates
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.litert import writer
from edgekit_toolkit.quantize.litert.kernels import kernel_names
from edgekit_toolkit.quantize.litert.prepare import prepare
from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
from edgekit_toolkit.quantize.litert.ranges import GROUP_BYTES, activation_reader
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.ranges import Range, gather
from edgekit_toolkit.quantize.scheme import LITERT
from edgekit_toolkit.samples.range_trap import find_range_trap
from edgekit_toolkit.tflite.flatbuffer import constant, operators, pack, parse, schema, tensor_name
from edgekit_toolkit.tflite.summary import TfliteSummary, summarise

SHARED = Path(__file__).resolve().parents[3] / "shared" / "models"
# Noise of 8 bits a layer through four layers; a wrong scale or zero point gives more than 0.5.
INT8_ERROR = 0.06


def run(content: bytes, feeds: dict[str, Array]) -> Array:
    session = LiteRtSession(content, LiteRtOptions(threads=1))
    return next(iter(session.run(feeds).values()))


def static_plan(content: bytes, *, per_channel: bool = True, without: frozenset[str] = frozenset()) -> Plan:
    quantizer = LiteRtQuantizer(content, threads=1)
    kernels = quantizer.kernels(elementwise=True)
    ranges = quantizer.ranges(kernels, lambda: iter(images(8)), lambda: None)
    spans = {name: item.whole() for name, item in ranges.items()}
    return Plan(LITERT, frozenset(kernels) - without, spans, per_channel)


def built(content: bytes, form: Form) -> bytes:
    made = writer.build(prepare(content), form)
    assert made is not None
    read_model(made)
    return made


def summary(content: bytes) -> TfliteSummary:
    return summarise(parse(content))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("squeeze", [False, True])
def test_prepared_model_computes_the_same(old: bool, squeeze: bool) -> None:
    content = small_cnn(old=old, squeeze=squeeze).content()
    for feeds in images(3, seed=4):
        np.testing.assert_array_equal(run(prepare(content), feeds), run(content, feeds))


@pytest.mark.parametrize("old", [False, True])
def test_static_int8_computes_in_integers_behind_float_ends(old: bool) -> None:
    content = small_cnn(old=old, squeeze=True).content()
    made = built(content, Form(forms.STATIC_INT8, static_plan(content)))
    found = summary(made)
    assert {layer.precision for layer in found.layers.values()} == {"int8"}
    # One on each side: nothing between is computed in float, SQUEEZE included.
    assert (found.operators["QUANTIZE"], found.operators["DEQUANTIZE"]) == (1, 1)
    assert (found.inputs[0].dtype, found.outputs[0].dtype) == ("float32", "float32")
    for feeds in images(6, seed=9):
        assert np.abs(run(made, feeds) - run(content, feeds)).max() < INT8_ERROR


def test_plans_that_alternate_have_a_model_each() -> None:
    content = small_cnn().content()
    whole = static_plan(content)
    part = replace(whole, kernels=frozenset(sorted(whole.kernels)[:1]))
    earlier = forms.EarlierModel("0" * 64, built(tuned(content), Form(forms.STATIC_INT8, whole)))
    near = Form(forms.STATIC_INT8, whole, earlier=earlier)
    tried = [near, *(Form(forms.STATIC_INT8, plan) for plan in (whole, part, whole)), near]
    quantizer = LiteRtQuantizer(content, threads=1)
    models = [quantizer.build(form) for form in tried]
    expected = [built(content, form) for form in tried]
    assert [model and model.content for model in models] == expected
    assert len({*expected}) == 3


def test_final_softmax_stays_float() -> None:
    """Its codes are steps of 1/256, in which most probabilities would be 0."""
    content = small_cnn().content()
    assert "y" not in kernel_names(read_model(prepare(content)), elementwise=True)
    made = built(content, Form(forms.STATIC_INT8, static_plan(content)))
    assert len(np.unique(np.concatenate([run(made, feeds) for feeds in images(4, 3)]) * 256 % 1)) > 2


def test_codes_made_at_run_time_count_as_codes() -> None:
    """XNNPACK's kernels and the engine's own then differ by 0.8 % of the range, as those of int8 do."""
    content = small_cnn().content()
    made = built(content, Form(forms.DYNAMIC_INT8))
    assert TfliteModel(made).computes_in_codes()
    assert [cost.op for cost in tflite_costs(parse(made)) if cost.precision == "int8"] == [
        "CONV_2D", "FULLY_CONNECTED",
    ]  # fmt: skip
    assert not TfliteModel(built(content, Form(forms.INT8_WEIGHTS))).computes_in_codes()


@pytest.mark.parametrize(
    ("left", "right", "made", "options"),
    [
        ((2, 3, 4), (2, 4, 5), (2, 3, 5), {}),
        ((1, 3, 4), (2, 4, 5), (2, 3, 5), {}),  # the left side's batch is broadcast
        ((2, 4, 3), (1, 4, 5), (2, 3, 5), {"adjX": True}),
    ],
)
def test_matrix_products_of_a_batch_are_counted_as_they_run(
    left: tuple[int, ...], right: tuple[int, ...], made: tuple[int, ...], options: dict[str, bool]
) -> None:
    lite = Lite()
    for name, shape in {"a": left, "b": right, "y": made}.items():
        lite.tensor(name, shape)
    lite.operator("BATCH_MATMUL", ["a", "b"], ["y"], "BatchMatMulOptions", **options)
    lite.ends(["a", "b"], ["y"])
    (cost,) = tflite_costs(lite.model)
    assert cost.macs == 2 * 3 * 4 * 5


def test_layer_left_out_of_the_plan_runs_in_float() -> None:
    content = small_cnn().content()
    made = built(content, Form(forms.STATIC_INT8, static_plan(content, without=frozenset({"d"}))))
    kinds = [layer.precision for layer in summary(made).layers.values()]
    assert kinds == ["int8", "fp16 weights", "int8"]
    for feeds in images(4, seed=9):
        assert np.abs(run(made, feeds) - run(content, feeds)).max() < INT8_ERROR


def test_name_that_begins_another_name_selects_one_operator() -> None:
    """Converters join names with semicolons, and so does the library between an operator's outputs."""
    lite = small_cnn()
    lite.graph.tensors[lite.place("d")].name = "a;d"
    content = lite.content()
    plan = static_plan(content)
    made = built(content, Form(forms.STATIC_INT8, Plan(LITERT, frozenset({"a"}), plan.ranges)))
    assert [layer.precision for layer in summary(made).layers.values()].count("int8") == 1


def test_scale_a_channel_is_closer_than_one_a_tensor() -> None:
    lite = small_cnn()
    weight = lite.graph.tensors[lite.place("conv_w")]
    values = np.frombuffer(lite.model.buffers[weight.buffer].data.tobytes(), np.float32).reshape(6, -1).copy()
    values *= np.geomspace(1, 100, 6, dtype=np.float32)[:, None]
    lite.model.buffers[weight.buffer].data = np.frombuffer(values.tobytes(), np.uint8)
    content = lite.content()
    errors = []
    for per_channel in (True, False):
        made = parse(built(content, Form(forms.STATIC_INT8, static_plan(content, per_channel=per_channel))))
        tensor = next(one for one in made.subgraphs[0].tensors if list(one.shape) == [6, 3, 3, 3])
        codes, scale = constant(made, tensor), np.asarray(tensor.quantization.scale, np.float64)
        assert codes is not None
        assert scale.size == (6 if per_channel else 1)
        errors.append(np.abs(codes.reshape(6, -1) * scale.reshape(-1, 1) - values)[0].max())
    assert errors[0] < errors[1] / 10


@pytest.mark.parametrize("bias", [0.5, -0.5])
def test_bias_of_a_dead_channel_survives(bias: float) -> None:
    """ai-edge-quantizer 0.10 alone writes -2147483648 for it, whatever its sign."""
    content = small_cnn(dead_bias=bias).content()
    model = parse(built(content, Form(forms.STATIC_INT8, static_plan(content))))
    graph = model.subgraphs[0]
    first = next(operator for operator in graph.operators if len(operator.inputs) == 3)
    tensor = graph.tensors[first.inputs[2]]
    codes = constant(model, tensor)
    assert codes is not None
    assert codes[2] * float(tensor.quantization.scale[2]) == pytest.approx(bias, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "precision", "most"),
    [
        (forms.FLOAT16_WEIGHTS, "fp16 weights", 2e-3),
        (forms.INT8_WEIGHTS, "int8 weights", INT8_ERROR),
        (forms.DYNAMIC_INT8, "dynamic int8", INT8_ERROR),
    ],
)
def test_stored_weights_are_smaller_and_close(kind: str, precision: str, most: float) -> None:
    content = small_cnn().content()
    made = built(content, Form(kind))
    layers = summary(made).layers
    assert precision in {layer.precision for layer in layers.values()}
    before = sum(layer.weight_bytes for layer in summary(content).layers.values())
    assert sum(layer.weight_bytes for layer in layers.values()) < 0.7 * before
    for feeds in images(4, seed=9):
        assert np.abs(run(made, feeds) - run(content, feeds)).max() < most


def test_depthwise_convolution_is_never_quantized_at_run_time() -> None:
    made = built(small_cnn().content(), Form(forms.DYNAMIC_INT8))
    assert [layer.precision for layer in summary(made).layers.values()] == [
        "dynamic int8", "int8 weights", "dynamic int8",
    ]  # fmt: skip


def dense(rows: int, columns: int) -> bytes:
    rng = np.random.default_rng(2)
    lite = Lite()
    lite.tensor("x", (1, columns))
    lite.tensor("y", (1, rows))
    names = ["x", lite.constant("w", rng.normal(size=(rows, columns)).astype(np.float32)), ""]
    lite.operator("FULLY_CONNECTED", names, ["y"], "FullyConnectedOptions")
    lite.ends(["x"], ["y"])
    return lite.content()


def test_large_dense_layer_takes_int4_and_small_one_does_not() -> None:
    content = dense(128, 64)
    made = built(content, Form(forms.INT4_WEIGHTS))
    assert len(made) < len(content) / 5
    feeds = {"x": np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)}
    want = run(content, feeds)
    # 4 bits: half a step of 1/7 of each block's largest weight, over 64 products.
    assert np.linalg.norm(run(made, feeds) - want) < 0.2 * np.linalg.norm(want)
    assert writer.build(prepare(dense(16, 64)), Form(forms.INT4_WEIGHTS)) is None


def test_form_is_the_same_bytes_again() -> None:
    content = small_cnn().content()
    form = Form(forms.STATIC_INT8, static_plan(content))
    again = Form.from_json(form.to_json())
    assert built(content, form) == built(content, again)


def test_plan_of_another_model_is_refused() -> None:
    plan = static_plan(small_cnn().content())
    other = Plan(LITERT, frozenset({"elsewhere"}), plan.ranges)
    with pytest.raises(RecipeError, match="elsewhere"):
        writer.build(prepare(small_cnn().content()), Form(forms.STATIC_INT8, other))


def collect(
    prepared: bytes,
    names: list[str],
    samples: Callable[[], Iterable[dict[str, Array]]],
    group_bytes: int = GROUP_BYTES,
) -> dict[str, Range]:
    read = activation_reader(prepared, names, threads=1, group_bytes=group_bytes)
    return gather(samples, read, lambda: None, axis=None)


def test_ranges_are_the_extremes_in_any_grouping() -> None:
    prepared = prepare(small_cnn().content())
    names = ["x", "a", "d", "z"]
    whole = collect(prepared, names, lambda: images(5))
    split = collect(prepared, names, lambda: images(5), group_bytes=1)
    assert {name: item.whole() for name, item in whole.items()} == {
        name: item.whole() for name, item in split.items()
    }
    values = np.concatenate([feeds["x"] for feeds in images(5)])
    assert whole["x"].whole() == (values.min(), values.max())
    assert whole["a"].whole()[0] == 0


def test_no_samples_are_refused_and_nan_has_no_range() -> None:
    prepared = prepare(small_cnn().content())
    with pytest.raises(DataError, match="no samples"):
        collect(prepared, ["a"], list)
    bad = {"x": np.full((1, 8, 8, 3), np.nan, np.float32)}
    assert collect(prepared, ["z"], lambda: [bad]) == {}


def tuned(content: bytes) -> bytes:
    """The model after training that has moved each weight by 6 codes (root mean square)."""
    model, draw = parse(content), np.random.default_rng(0)
    for tensor in model.subgraphs[0].tensors:
        values = constant(model, tensor)
        if values is not None and values.dtype == np.float32:
            step = np.abs(values).max() / 127
            moved = values + (6 * step * draw.standard_normal(values.shape)).astype(np.float32)
            model.buffers[tensor.buffer].data = np.frombuffer(moved.tobytes(), np.uint8)
    return pack(model)


def codes(content: bytes) -> dict[str, Array]:
    """Int8 constants, by the place of their tensor."""
    model = parse(content)
    found = {str(at): constant(model, one) for at, one in enumerate(model.subgraphs[0].tensors)}
    return {at: values for at, values in found.items() if values is not None and values.dtype == np.int8}


@pytest.mark.parametrize("kind", [forms.STATIC_INT8, forms.INT8_WEIGHTS, forms.FLOAT16_WEIGHTS])
def test_update_is_near_its_earlier_version_and_computes_the_same(kind: str) -> None:
    content = small_cnn().content()
    further = tuned(content)
    plan = static_plan(further) if kind == forms.STATIC_INT8 else None
    before = built(content, Form(kind, plan))
    earlier = forms.EarlierModel("0" * 64, before)
    near, plain = built(further, Form(kind, plan, earlier=earlier)), built(further, Form(kind, plan))
    assert len(near) <= len(plain) and near != plain
    # A step of 5 codes on weights of 127: their error is at most a few times that of 8 bits.
    for feeds in images(4, seed=3):
        assert np.abs(run(near, feeds) - run(further, feeds)).max() < 2 * INT8_ERROR
    new, old = codes(near), codes(before)
    assert new.keys() == old.keys() and bool(new) == (kind != forms.FLOAT16_WEIGHTS)
    assert np.mean([np.mean(new[at] == old[at]) for at in new] or [1.0]) > 0.1


def calibration() -> Iterator[dict[str, Array]]:
    return iter(images(8))


def test_search_finds_and_ranks_forms_of_a_tflite_model() -> None:
    quantizer = LiteRtQuantizer(small_cnn().content(), threads=1)
    found = find_candidates(
        quantizer, calibration, per_channel=True, kinds=frozenset(forms.KINDS), limit_s=30, dims={},
        progress=lambda *_: None,
    )  # fmt: skip
    assert found.dropped == []
    noise = {one.label: one.snr_db for one in found.candidates}
    assert noise["float32"] == 200
    static = max(noise[label] for label in noise if label.startswith("int8 per-channel"))
    assert noise["float16 weights"] > static > 15
    assert len(found.noises) == 3
    assert found.candidates[0].model is quantizer.model


def test_search_leaves_a_quantized_model_as_it_is() -> None:
    content = small_cnn().content()
    quantized = built(content, Form(forms.STATIC_INT8, static_plan(content)))
    found = find_candidates(
        LiteRtQuantizer(quantized, threads=1), calibration, per_channel=True,
        kinds=frozenset(forms.KINDS), limit_s=1, dims={}, progress=lambda *_: None,
    )  # fmt: skip
    assert [one.label for one in found.candidates] == ["as it is"]
    assert found.candidates[0].model.content == quantized
    assert "already quantized" in found.dropped[0]


def test_signature_names_survive_quantization() -> None:
    content = _with_signature(small_cnn().content())
    made = built(content, Form(forms.STATIC_INT8, _plan_of_signed(content)))
    session = LiteRtSession(made)
    assert [spec.name for spec in session.inputs] == ["image"]
    assert [spec.name for spec in session.outputs] == ["scores"]


def _with_signature(content: bytes) -> bytes:
    model = parse(content)
    graph = model.subgraphs[0]
    signature = schema.SignatureDefT()
    signature.signatureKey = "serving_default"
    for side, name, index in (("inputs", "image", graph.inputs[0]), ("outputs", "scores", graph.outputs[0])):
        item = schema.TensorMapT()
        item.name, item.tensorIndex = name, int(index)
        setattr(signature, side, [item])
    model.signatureDefs = [signature]
    return pack(model)


def _plan_of_signed(content: bytes) -> Plan:
    quantizer = LiteRtQuantizer(content, threads=1)
    kernels = quantizer.kernels(elementwise=True)
    samples = [{"image": feeds["x"]} for feeds in images(4)]
    ranges = quantizer.ranges(kernels, lambda: iter(samples), lambda: None)
    return Plan(LITERT, frozenset(kernels), {name: item.whole() for name, item in ranges.items()})


def scaled(low: float, high: float, count: int = 4) -> list[dict[str, Array]]:
    return [{"x": np.float32(low) + np.float32(high - low) * (feeds["x"] + 1) / 2} for feeds in images(count)]


def test_other_preprocessing_is_a_range_trap() -> None:
    found = find_range_trap(scaled(0, 1), scaled(-1, 1))
    assert len(found) == 1
    assert "'x'" in found[0]
    assert "of the values" in found[0]


def test_like_samples_are_no_range_trap() -> None:
    assert find_range_trap(scaled(0, 1), scaled(-0.02, 1.02)) == []
    assert find_range_trap(scaled(-1, 1), scaled(0, 1)) == []


def test_integer_inputs_have_no_range_trap() -> None:
    codes = [{"x": np.full((1, 4), value, np.uint8)} for value in (1, 200)]
    assert find_range_trap(codes[:1], codes[1:]) == []


@pytest.mark.skipif(not (SHARED / "models").is_dir(), reason="needs the real models in ../shared/models")
def test_resnet8_static_int8_keeps_its_score() -> None:
    """At most 0.3 points under the vendor's own int8 file (76.15 %), and no larger than that."""
    model = load_tflite(SHARED / "models" / "resnet8_cifar10_fp32.tflite")
    data = np.load(SHARED / "data" / "cifar10_jpeg.npz")
    name = model.inputs[0].name
    samples = [{name: image[None].astype(np.float32)} for image in data["calib_x"][:100]]
    quantizer = LiteRtQuantizer(model.model.content, threads=1)
    kernels = quantizer.kernels(elementwise=True)
    ranges = quantizer.ranges(kernels, lambda: iter(samples), lambda: None)
    spans = {one: item.whole() for one, item in ranges.items()}
    made = quantizer.build(Form(forms.STATIC_INT8, Plan(LITERT, frozenset(kernels), spans)))
    assert made is not None
    assert len(made.content) <= (SHARED / "models" / "resnet8_cifar10_int8.tflite").stat().st_size
    session = LiteRtSession(made.content, LiteRtOptions(threads=1))
    hits = [
        next(iter(session.run({name: image[None].astype(np.float32)}).values())).argmax() == label
        for image, label in zip(data["x"], data["y"], strict=True)
    ]
    assert 100 * np.mean(hits) >= 76.15 - 0.3


def test_operators_that_are_prepared_have_names_of_their_own() -> None:
    lite = small_cnn()
    for tensor in lite.graph.tensors:
        if tensor.name not in {"x", "y"}:
            tensor.name = "same"
    model = read_model(prepare(lite.content()))
    names = [tensor_name(tensor) for tensor in model.subgraphs[0].tensors]
    assert len(set(names)) == len(names)
    assert len(list(operators(model))) == 7


def test_model_with_control_flow_gets_weights_but_no_static_form() -> None:
    """A branch may never run while ranges are collected."""
    model = parse(small_cnn().content())
    model.subgraphs.append(parse(small_cnn().content()).subgraphs[0])
    found = find_candidates(
        LiteRtQuantizer(pack(model), threads=1), calibration, per_channel=True,
        kinds=frozenset(forms.KINDS), limit_s=1, dims={}, progress=lambda *_: None,
    )  # fmt: skip
    assert found.dropped == ["static int8: the model has 2 sub-graphs (control flow)"]
    assert "float16 weights" in [one.label for one in found.candidates]


def elementwise(kind: str, constant_value: float, rank: int, count: int = 1) -> bytes:
    """Input x [1, 8, 8, 3] through `count` operators with one constant that they share, to y."""
    lite = Lite()
    names = ["x", *(f"m{place}" for place in range(1, count)), "y"]
    for name in names:
        lite.tensor(name, (1, 8, 8, 3))
    lite.constant("c", np.full([1] * rank, constant_value, np.float32))
    for source, made in pairwise(names):
        lite.operator(
            kind, [source, "c"], [made], "MaximumMinimumOptions" if kind == "MAXIMUM" else "AddOptions"
        )
    lite.ends(["x"], ["y"])
    return lite.content()


@cases("rank", [0, 1, 4])
@cases("kind", ["ADD", "MAXIMUM"])
def test_constant_that_operators_share_is_quantized(kind: str, rank: int) -> None:
    content = elementwise(kind, -0.25, rank, count=3)
    made = built(content, Form(forms.STATIC_INT8, static_plan(content)))
    assert summary(made).operators["DEQUANTIZE"] == 1
    for feeds in images(3, seed=9):
        # Three roundings to steps of 1/128 and one of the input.
        assert np.abs(run(made, feeds) - run(content, feeds)).max() < 4 / 128


def test_padding_with_the_lowest_float_stays_float() -> None:
    """Its range would give a scale of 1e36, on which the engine ends the process."""
    lite = Lite()
    for name, size in (("x", 8), ("p", 10), ("y", 8)):
        lite.tensor(name, (1, size, size, 3))
    sizes = lite.constant("sizes", np.array([[0, 0], [1, 1], [1, 1], [0, 0]], np.int32))
    lowest = lite.constant("lowest", np.array([np.finfo(np.float32).min], np.float32))
    lite.operator("PADV2", ["x", sizes, lowest], ["p"], "PadV2Options")
    pool = {"padding": 1, "strideH": 1, "strideW": 1, "filterHeight": 3, "filterWidth": 3}
    lite.operator("MAX_POOL_2D", ["p"], ["y"], "Pool2DOptions", **pool)
    lite.ends(["x"], ["y"])
    assert LiteRtQuantizer(lite.content(), threads=1).kernels(elementwise=True) == ()


def everything(content: bytes, samples: list[dict[str, Array]]) -> bytes:
    """All that can become integer kernels, with ranges of the samples."""
    quantizer = LiteRtQuantizer(content, threads=1)
    kernels = quantizer.kernels(elementwise=True)
    ranges = quantizer.ranges(kernels, lambda: iter(samples), lambda: None)
    plan = Plan(LITERT, frozenset(kernels), {name: item.whole() for name, item in ranges.items()})
    made = quantizer.build(Form(forms.STATIC_INT8, plan))
    assert made is not None
    return made.content


def close_to_float(made: bytes, content: bytes) -> None:
    """Same outputs by name and dtype, as close as 8 bits go."""
    float_session, session = (LiteRtSession(one, LiteRtOptions(threads=1)) for one in (content, made))
    assert session.outputs == float_session.outputs
    for feeds in images(3, seed=9):
        wanted, found = float_session.run(feeds), session.run(feeds)
        for name, value in wanted.items():
            assert np.abs(found[name] - value).max() <= INT8_ERROR * np.ptp(value), name


def test_outputs_that_operators_read_too_stay_outputs() -> None:
    """The library gave such an output as int8, or had an operator read floats as int8: the engine crashed."""
    lite = small_cnn()
    lite.tensor("copy", (1, 8, 8, 6))
    shape = lite.constant("copy_shape", np.array([1, 8, 8, 6], np.int32))
    lite.operator("RESHAPE", ["s", shape], ["copy"], "ReshapeOptions", newShape=[1, 8, 8, 6])
    lite.ends(["x"], ["a", "s", "copy", "y"])
    content = lite.content()
    close_to_float(everything(content, images(8)), content)


def test_constants_of_any_rank_are_quantized_beside_an_activation() -> None:
    lite = small_cnn()
    lite.tensor("m", (1, 8, 8, 6))
    lite.tensor("c", (1, 8, 8, 9))
    low = lite.constant("low", np.full((1, 1, 1, 6), 0.2, np.float32))
    more = lite.constant("more", np.full((1, 8, 8, 3), 0.7, np.float32))
    lite.operator("MAXIMUM", ["s", low], ["m"], "MaximumMinimumOptions")
    lite.operator("CONCATENATION", ["m", more], ["c"], "ConcatenationOptions", axis=3)
    lite.ends(["x"], ["c", "y"])
    content = lite.content()
    close_to_float(everything(content, images(8)), content)


def test_weights_that_layers_share_are_quantized() -> None:
    lite = small_cnn()
    for name in ("t", "u"):
        lite.tensor(name, (1, 4))
    weight = lite.constant("again_w", np.random.default_rng(2).normal(size=(4, 4)).astype(np.float32))
    bias = lite.constant("again_b", np.zeros(4, np.float32))
    lite.operator("FULLY_CONNECTED", ["z", weight, bias], ["t"], "FullyConnectedOptions")
    lite.operator("FULLY_CONNECTED", ["t", weight, bias], ["u"], "FullyConnectedOptions")
    lite.ends(["x"], ["u", "y"])
    content = lite.content()
    close_to_float(everything(content, images(8)), content)
    for kind in (forms.INT8_WEIGHTS, forms.DYNAMIC_INT8):
        close_to_float(built(content, Form(kind)), content)


def test_results_that_nothing_reads_stay_in_float() -> None:
    lite = small_cnn()
    for name in ("left", "right"):
        lite.tensor(name, (1, 8, 8, 3))
    axis = lite.constant("axis", np.array(3, np.int32))
    lite.operator("SPLIT", [axis, "s"], ["left", "right"], "SplitOptions", numSplits=2)
    lite.ends(["x"], ["right", "y"])
    content = lite.content()
    close_to_float(everything(content, images(8)), content)


def test_layer_on_a_constant_is_not_quantized_at_run_time() -> None:
    """The state that a recurrent layer begins with would become int8 like weights, which has no kernel."""
    lite = small_cnn()
    for name in ("t", "u"):
        lite.tensor(name, (1, 4))
    state = lite.constant("state", np.full((1, 4), 0.3, np.float32))
    weight = lite.constant("state_w", np.random.default_rng(2).normal(size=(4, 4)).astype(np.float32))
    lite.operator("FULLY_CONNECTED", [state, weight, ""], ["t"], "FullyConnectedOptions")
    lite.operator("ADD", ["t", "z"], ["u"], "AddOptions")
    lite.ends(["x"], ["u", "y"])
    content = lite.content()
    close_to_float(built(content, Form(forms.DYNAMIC_INT8)), content)


def test_model_whose_input_and_output_share_a_name_is_left_as_it_is() -> None:
    lite = small_cnn()
    lite.graph.tensors[lite.place("y")].name = "x"
    reason = LiteRtQuantizer(lite.content(), threads=1).why_no_forms()
    assert reason is not None
    assert "both named 'x'" in reason


def test_product_with_a_constant_of_many_scales_is_no_zero() -> None:
    """LiteRT's int8 kernel of BATCH_MATMUL makes zeros where the constant has a scale a channel."""
    lite = small_cnn()
    lite.tensor("m", (1, 8, 8, 4))
    weight = lite.constant("m_w", np.random.default_rng(2).normal(size=(1, 1, 6, 4)).astype(np.float32))
    lite.operator("BATCH_MATMUL", ["s", weight], ["m"], "BatchMatMulOptions")
    lite.ends(["x"], ["m", "y"])
    content = lite.content()
    close_to_float(everything(content, images(8)), content)
