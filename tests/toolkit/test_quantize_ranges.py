import tracemalloc
from collections.abc import Iterator
from unittest import mock

import numpy as np
import onnx
import pytest
from tests.toolkit.small_models import model_of, node, random_weight

from edgekit_runtime.errors import BackendError, DataError
from edgekit_toolkit.quantize import ranges
from edgekit_toolkit.quantize.ranges import Range, collect
from edgekit_toolkit.samples.generated import Feeds

NAMES = ["x", "c", "r", "p", "s"]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def conv_model() -> object:
    rng = np.random.default_rng(0)
    weights = {"w": random_weight(rng, 6, 3, 3, 3), "b": random_weight(rng, 6)}
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4),
        node("Relu", ["c"], ["r"]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("ReduceMean", ["p"], ["s"], keepdims=0),
        node("Add", ["p", "s"], ["y"]),
    ]
    return model_of(nodes, weights, {"x": (1, 3, "H", "W")})


def images(rng: np.random.Generator, count: int, sizes: tuple[int, ...] = (8,)) -> list[Feeds]:
    return [
        {"x": rng.normal(size=(1, 3, sizes[number % len(sizes)], 8)).astype(np.float32)}
        for number in range(count)
    ]


def expected(model, samples) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Extremes a channel, from all activations at once."""
    from tests.toolkit.small_models import run

    copy = type(model)()
    copy.CopyFrom(model)
    copy.graph.output.extend(value for value in model.graph.value_info if value.name in NAMES)
    everything = [{**run(copy, feeds), **feeds} for feeds in samples]
    result = {}
    for name in NAMES:
        values = [one[name] for one in everything]
        axes = tuple(axis for axis in range(values[0].ndim) if axis != 1)
        lows, highs = [v.min(axis=axes) for v in values], [v.max(axis=axes) for v in values]
        result[name] = np.min(lows, axis=0), np.max(highs, axis=0)
    return result


def assert_same(found: dict[str, Range], want: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    assert found.keys() == want.keys()
    for name, (low, high) in want.items():
        # The engine fuses and reorders sums: a few units in the last place.
        np.testing.assert_allclose(found[name].low, np.atleast_1d(low), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[name].high, np.atleast_1d(high), rtol=1e-5, atol=1e-6)


def test_extremes_are_those_of_all_samples_a_channel(rng: np.random.Generator) -> None:
    model, samples = conv_model(), images(rng, 5)
    found = collect(model, NAMES, lambda: iter(samples), threads=1)
    assert_same(found, expected(model, samples))
    assert found["c"].low.shape == (6,)
    assert found["c"].whole() == (found["c"].low.min(), found["c"].high.max())


def test_samples_may_differ_in_size(rng: np.random.Generator) -> None:
    model, samples = conv_model(), images(rng, 6, sizes=(8, 5, 12))
    assert_same(collect(model, NAMES, lambda: iter(samples), threads=1), expected(model, samples))


@pytest.mark.parametrize("group_bytes", [1, 2000])
def test_groups_that_a_limit_makes_give_the_same_extremes(group_bytes: int, rng: np.random.Generator) -> None:
    model, samples = conv_model(), images(rng, 3)
    whole = collect(model, NAMES, lambda: iter(samples), threads=1)
    grouped = collect(model, NAMES, lambda: iter(samples), threads=1, group_bytes=group_bytes)
    assert_same(grouped, {name: (item.low, item.high) for name, item in whole.items()})


def test_group_holds_no_more_than_its_limit(rng: np.random.Generator) -> None:
    model, samples = conv_model(), images(rng, 1)
    fetched: list[int] = []

    def run_session(session, feeds, names):
        values = original(session, feeds, names)
        fetched.append(sum(value.nbytes for value in values))
        return values

    original = ranges.run_session
    with mock.patch.object(ranges, "run_session", run_session):
        collect(model, NAMES, lambda: iter(samples), threads=1, group_bytes=2000)
    # 6 channels of 8 x 8 float32 are 1536 bytes; a tensor alone may be fetched whatever its size.
    assert max(fetched) <= 2000


def test_channels_that_vary_in_number_have_extremes_as_a_whole(rng: np.random.Generator) -> None:
    model = model_of([node("Relu", ["x"], ["r"]), node("Neg", ["r"], ["y"])], {}, {"x": (1, "T", 4)})
    samples = [{"x": rng.normal(size=(1, length, 4)).astype(np.float32)} for length in (3, 5, 3, 1)]
    found = collect(model, ["x", "r"], lambda: iter(samples), threads=1)
    everything = np.concatenate([feeds["x"].reshape(-1) for feeds in samples])
    assert found["x"].low.tolist() == [everything.min()]
    assert found["r"].high.tolist() == [everything.max()]


def test_progress_is_told_once_a_sample(rng: np.random.Generator) -> None:
    samples, told = images(rng, 4), []
    collect(conv_model(), ["c"], lambda: iter(samples), threads=1, progress=lambda: told.append(1))
    assert len(told) == 4


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, np.finfo(np.float32).min])
def test_activation_with_a_value_that_has_no_code_has_no_range(value: float) -> None:
    model = model_of([node("Identity", ["x"], ["mask"]), node("Relu", ["mask"], ["y"])], {}, {"x": (1, 4)})
    rows = [[1, 2, 3, 4], [1, 2, value, 4], [1, 2, 3, 4]]
    samples = [{"x": np.array([row], np.float32)} for row in rows]
    assert collect(model, ["mask"], lambda: iter(samples[:1]), threads=1).keys() == {"mask"}
    assert collect(model, ["mask"], lambda: iter(samples), threads=1) == {}


def test_no_samples_are_an_error() -> None:
    with pytest.raises(DataError, match="there are no samples"):
        collect(conv_model(), ["c"], lambda: iter(()), threads=1)


def test_sample_that_the_model_does_not_take_is_an_error() -> None:
    wrong = [{"x": np.zeros((1, 2, 8, 8), np.float32)}]
    with pytest.raises(BackendError):
        collect(conv_model(), ["c"], lambda: iter(wrong), threads=1)


def peak_bytes(count: int) -> int:
    """Most bytes that Python and numpy held while `count` samples went through."""
    model = conv_model()

    def samples() -> Iterator[Feeds]:
        rng = np.random.default_rng(0)
        for _ in range(count):
            yield {"x": rng.random((1, 3, 64, 64), np.float32)}

    tracemalloc.start()
    collect(model, NAMES, samples, threads=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    few, many = peak_bytes(10), peak_bytes(200)
    # One sample has 49 kB and 197 kB of activations: 190 more held would be 46 MB.
    assert many < few + 200_000


def test_tensor_whose_name_we_would_have_made_up_is_measured_too(rng: np.random.Generator) -> None:
    nodes = [
        node("Relu", ["x"], ["r"]),
        node("Neg", ["r"], ["r_size"]),
        node("Sigmoid", ["r_size"], ["r__size"]),
        node("Identity", ["r__size"], ["y"]),
    ]
    model = model_of(nodes, {}, {"x": (1, 3, "H", "W")})
    found = collect(model, ["r", "r_size", "r__size"], lambda: images(rng, 2), threads=1)
    assert found.keys() == {"r", "r_size", "r__size"}


def test_vectors_behind_an_operator_that_onnx_does_not_define_have_ranges() -> None:
    model = model_of([node("Relu", ["x"], ["g"]), node("Neg", ["g"], ["y"])], {}, {"x": (1, 8)})
    model.graph.node[0].op_type, model.graph.node[0].domain = "Gelu", "com.microsoft"
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    del model.graph.value_info[:]
    ranges = collect(model, ["x", "g"], lambda: [{"x": np.ones((1, 8), np.float32)}], threads=1)
    assert ranges.keys() == {"x", "g"}


def test_vector_whose_length_depends_on_the_data_has_no_range() -> None:
    nodes = [
        node("NonZero", ["x"], ["positions"]),
        node("Transpose", ["positions"], ["rows"], perm=[1, 0]),
        node("GatherND", ["x", "rows"], ["positive"]),
        node("Neg", ["positive"], ["y"]),
        node("Neg", ["x"], ["z"]),
    ]
    model = model_of(nodes, {}, {"x": ("N",)})
    values = [np.float32([1, 0, 2]), np.float32([0, 1, 2]), np.float32([1, 2])]  # two each: nothing varies
    ranges = collect(model, ["positive", "z"], lambda: [{"x": value} for value in values], threads=1)
    assert ranges.keys() == {"z"}  # its length follows that of the input
