"""Lanes over real sessions, threads and an event loop."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("onnxruntime")
from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.options.model import SchedulingLimits
from edgekit_runtime.service.scheduling.call import Answer, Call
from edgekit_runtime.service.scheduling.fair_pool import Pool, Threads
from edgekit_runtime.service.scheduling.scheduler import Scheduler
from edgekit_runtime.sessions.instances import open_instances, warm_up
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.sessions.row_independence import has_free_rows, rows_are_independent
from edgekit_runtime.sessions.session import Session

TINY = Path(__file__).parents[2] / "models" / "tiny"
MODELS = ["digits_cnn", "italy_power_mlp", "japanese_vowels_tcn", "mnist5k_dscnn"]


def open_tiny(name: str) -> OrtSession:
    session = OrtSession(TINY / f"{name}.onnx", OrtOptions(threads=1))
    session.has_fixed_work = True
    return session


def samples(name: str, session: Session, count: int) -> list[dict[str, Any]]:
    with np.load(TINY / f"{name}.calib.npz") as data:
        (spec,) = session.inputs
        values = next(data[key] for key in data.files if data[key].ndim == len(spec.shape))
    return [{spec.name: values[i : i + 1].astype(spec.dtype)} for i in range(count)]


@contextmanager
def threads(loop: asyncio.AbstractEventLoop, count: int = 2) -> Iterator[Pool]:
    hands = Threads(loop, count)
    try:
        yield Pool(hands, loop)
    finally:
        hands.close()


def run_all(
    instances: tuple[Session, ...], feeds: list[dict[str, Any]], **limits: Any
) -> tuple[list[Answer], LaneMetrics]:
    """Answers of calls that are submitted at once, in their order."""
    metrics = LaneMetrics("tiny", "1")

    async def run() -> list[Answer]:
        loop = asyncio.get_running_loop()
        answers: list[Answer | None] = [None] * len(feeds)
        everything = asyncio.Event()

        def take(index: int, answer: Answer) -> None:
            assert threading.current_thread() is threading.main_thread()
            assert answers[index] is None
            answers[index] = answer
            if all(a is not None for a in answers):
                everything.set()

        with threads(loop) as pool:
            settings = SchedulingLimits(**{"short_s": 0.0, **limits})
            lane = Scheduler(instances, settings, pool=pool, loop=loop, metrics=metrics)
            for index, feed in enumerate(feeds):
                lane.submit(Call(feed, lambda answer, index=index: take(index, answer)))
            await asyncio.wait_for(everything.wait(), 60)
        return [answer for answer in answers if answer is not None]

    return asyncio.run(run()), metrics


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("limits", [{"max_batch": 8}, {"max_batch": 8, "max_delay_s": 2e-3}, {}])
def test_answers_are_those_of_single_runs(name: str, limits: dict[str, Any]) -> None:
    session = open_tiny(name)
    feeds = samples(name, session, 40)
    answers, metrics = run_all((session,), feeds, **limits)
    (name,), (output,) = feeds[0], (spec.name for spec in session.outputs)
    alone = np.concatenate([session.run(feed)[output] for feed in feeds])
    together = session.run({name: np.concatenate([feed[name] for feed in feeds])})[output]
    got = np.concatenate([answer[output] for answer in answers if isinstance(answer, Mapping)])
    if np.array_equal(alone, together):  # the engine computes a row alike in any company
        np.testing.assert_array_equal(got, alone)
    np.testing.assert_allclose(got, alone, rtol=1e-4, atol=1e-4)  # other kernels sum in another order
    assert (max(calls for calls, _ in metrics.runs) > 1) == bool(limits)
    assert metrics.succeeded == 40


def test_several_instances_run_on_several_threads() -> None:
    session = open_tiny("digits_cnn")
    feeds = samples("digits_cnn", session, 100)
    answers, _ = run_all(open_instances(lambda: session, 2), feeds)
    for feed, answer in zip(feeds, answers, strict=True):
        assert isinstance(answer, Mapping)
        np.testing.assert_array_equal(answer["logits"], session.run(feed)["logits"])


def test_the_session_itself_refuses_what_does_not_fit() -> None:
    session = open_tiny("digits_cnn")
    (answer,), _ = run_all((session,), [{"image": np.zeros((1, 1, 8, 9), np.float32)}])
    assert isinstance(answer, DataError)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_real_models_are_seen_to_be_independent(name: str) -> None:
    session = open_tiny(name)
    assert rows_are_independent(session, samples(name, session, 1)[0])


class Wrapped:
    """A session that does something to the outputs of another."""

    def __init__(self, session: Session) -> None:
        self.session, self.inputs, self.outputs = session, session.inputs, session.outputs

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.change(array) for name, array in self.session.run(inputs).items()}

    def change(self, array: Any) -> Any:
        return array / np.abs(array).sum()  # over all rows

    def close(self) -> None:
        self.session.close()


class Single(Wrapped):
    def change(self, array: Any) -> Any:
        if len(array) > 1:
            raise BackendError("one row only")
        return array


class Pooled(Wrapped):
    def change(self, array: Any) -> Any:
        return array[:1]


@pytest.mark.parametrize("kind", [Wrapped, Single, Pooled])
def test_a_model_whose_rows_meet_is_not_proven(kind: type[Wrapped]) -> None:
    session = open_tiny("digits_cnn")
    assert not rows_are_independent(kind(session), samples("digits_cnn", session, 1)[0])


# What a graph computes of x[N, 16] with w[16, 4], and whether its rows are independent. `table` is [5, 16].
GRAPHS: dict[str, tuple[bool, list[tuple[Any, ...]]]] = {
    "8-bit scale of the whole batch, as of quantize_dynamic": (
        False,
        [
            ("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            ("MatMulInteger", ["q", "w8", "zero"], ["sums"]),
            ("Cast", ["sums"], ["floats"], {"to": onnx.TensorProto.FLOAT}),
            ("Mul", ["floats", "scale"], ["y"]),
        ],
    ),
    "divided by the largest of the batch": (
        False,
        [
            ("Abs", ["x"], ["sizes"]),
            ("ReduceMax", ["sizes"], ["largest"], {"keepdims": 0}),
            ("Div", ["x", "largest"], ["y"]),
        ],
    ),
    "less the mean of the batch": (
        False,
        [("ReduceMean", ["x"], ["mean"], {"keepdims": 0}), ("Sub", ["x", "mean"], ["y"])],
    ),
    "sums over the rows before": (False, [("CumSum", ["x", "first_axis"], ["y"])]),
    "sums over the rows after": (False, [("CumSum", ["x", "first_axis"], ["y"], {"reverse": 1})]),
    "layer norm and softmax": (
        True,
        [
            ("LayerNormalization", ["x", "gains", "biases"], ["normed"]),
            ("MatMul", ["normed", "w"], ["logits"]),
            ("Softmax", ["logits"], ["y"]),
        ],
    ),
    "divided by the largest of the row, which is nothing for zeros": (
        True,
        [
            ("Abs", ["x"], ["sizes"]),
            ("ReduceMax", ["sizes"], ["largest"], {"axes": [1]}),
            ("Div", ["x", "largest"], ["y"]),
        ],
    ),
    "a difference that leaves rounding": (
        True,
        [("MatMul", ["x", "w"], ["a"]), ("MatMul", ["x", "v"], ["b"]), ("Sub", ["a", "b"], ["y"])],
    ),
}


def build(nodes: list[tuple[Any, ...]], kind: int = onnx.TensorProto.FLOAT) -> OrtSession:
    """A session of x[N, 16] -> y."""
    rng, helper = np.random.default_rng(7), onnx.helper
    w = rng.normal(size=(16, 4)).astype(np.float32)
    constants = {
        "w": w,
        "v": w * np.float32(1.5),
        "w8": rng.integers(-99, 99, (16, 4)).astype(np.int8),
        "gains": np.ones(16, np.float32),
        "biases": rng.normal(size=16).astype(np.float32),
        "first_axis": np.array(0),
        "table": rng.normal(size=(5, 16)).astype(np.float32),
    }
    used = {name for node in nodes for name in node[1]}
    graph = helper.make_graph(
        [helper.make_node(*node[:3], **(node[3] if len(node) > 3 else {})) for node in nodes],
        "graph",
        [helper.make_tensor_value_info("x", kind, ["N", 16])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items() if name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return OrtSession(model.SerializeToString(), OrtOptions(threads=1))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_rows_that_meet_in_a_batch_are_told_from_those_that_do_not(name: str, size: float) -> None:
    is_independent, nodes = GRAPHS[name]
    x = size * np.random.default_rng(3).normal(size=(1, 16)).astype(np.float32)
    assert rows_are_independent(build(nodes), {"x": x}) == is_independent


def test_rows_of_nothing_but_zeros_show_a_common_scale() -> None:
    nodes = GRAPHS["less the mean of the batch"][1]
    assert not rows_are_independent(build(nodes), {"x": np.zeros((1, 16), np.float32)})


@pytest.mark.parametrize("rows", [1, 3])
def test_indices_stay_within_those_of_the_given_rows(rows: int) -> None:
    session = build([("Gather", ["table", "x"], ["y"])], onnx.TensorProto.INT64)
    x = np.random.default_rng(3).integers(0, 5, (rows, 16))
    assert rows_are_independent(session, {"x": x})


def test_integers_that_are_scaled_together_are_not_proven() -> None:
    nodes = [
        ("Cast", ["x"], ["floats"], {"to": onnx.TensorProto.FLOAT}),
        ("ReduceMean", ["floats"], ["mean"], {"keepdims": 0}),
        ("Sub", ["floats", "mean"], ["y"]),
    ]
    x = np.random.default_rng(3).integers(0, 256, (1, 16))
    assert not rows_are_independent(build(nodes, onnx.TensorProto.INT64), {"x": x})


def test_a_model_of_fixed_rows_is_not_proven() -> None:
    session = Wrapped(open_tiny("digits_cnn"))
    session.inputs = tuple(type(s)(s.name, s.dtype, (1, *s.shape[1:])) for s in session.inputs)
    assert not has_free_rows(session)
    assert not rows_are_independent(session, samples("digits_cnn", session, 1)[0])


def test_a_session_that_is_not_concurrent_is_opened_once_for_each_run_at_a_time() -> None:
    opened = open_instances(lambda: Wrapped(open_tiny("digits_cnn")), 3)
    assert len(set(map(id, opened))) == 3
    assert len(set(map(id, open_instances(lambda: open_tiny("digits_cnn"), 3)))) == 1


def test_instances_that_were_opened_before_one_failed_are_closed() -> None:
    opened: list[Wrapped] = []

    def open_one() -> Session:
        if len(opened) == 2:
            raise BackendError("no memory")
        opened.append(Wrapped(open_tiny("digits_cnn")))
        return opened[-1]

    with pytest.raises(BackendError, match="no memory"):
        open_instances(open_one, 3)
    feed = {"image": np.zeros((1, 1, 8, 8), np.float32)}
    for session in opened:
        with pytest.raises(BackendError, match="closed"):
            session.run(feed)


class Counting(Wrapped):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.rows: list[int] = []

    def change(self, array: Any) -> Any:
        self.rows.append(len(array))
        return array


def test_a_warm_up_runs_each_session_with_each_size() -> None:
    first, second = Counting(open_tiny("digits_cnn")), Counting(open_tiny("digits_cnn"))
    inputs = samples("digits_cnn", first, 1)[0]
    runs = warm_up((first, second, first), inputs, max_batch=9, runs=3)
    assert first.rows == second.rows == [1] * 3 + [2] * 3 + [4] * 3 + [8] * 3
    assert {run.size_bytes for run in runs} == {256, 512, 1024, 2048}
    assert len(runs) == 2 * 4 * 2
    assert all(run.seconds > 0 for run in runs)


def test_after_a_warm_up_a_short_model_starts_no_thread() -> None:
    async def run() -> list[Answer]:
        loop = asyncio.get_running_loop()
        session = open_tiny("italy_power_mlp")
        (feed,) = samples("italy_power_mlp", session, 1)
        answers: list[Answer] = []
        with threads(loop) as pool:
            limits = SchedulingLimits(short_s=10.0)
            lane = Scheduler((session,), limits, pool=pool, loop=loop, metrics=LaneMetrics("m", "1"))
            for warm in warm_up((session,), feed):
                lane.learn(warm.shapes, warm.seconds)
            before = threading.active_count()
            lane.submit(Call(feed, answers.append))
            assert threading.active_count() == before
        return answers

    (answer,) = asyncio.run(run())
    assert isinstance(answer, Mapping)


def test_closing_the_threads_takes_in_what_was_under_way() -> None:
    async def run() -> list[Answer]:
        loop = asyncio.get_running_loop()
        session = open_tiny("digits_cnn")
        answers: list[Answer] = []
        with threads(loop) as pool:
            limits = SchedulingLimits(short_s=0.0)
            lane = Scheduler((session,), limits, pool=pool, loop=loop, metrics=LaneMetrics("m", "1"))
            lane.submit(Call(samples("digits_cnn", session, 1)[0], answers.append))
        return answers

    assert len(asyncio.run(run())) == 1
