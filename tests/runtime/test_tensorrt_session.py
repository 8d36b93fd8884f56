"""Switching from the fallback to TensorRT's engine, with stand-ins for the builder and the GPU."""

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.tensorrt_fakes import Bench, FixedExecutor

from edgekit_runtime.encryption.container import make_content_key
from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.sessions.options import read_options
from edgekit_runtime.sessions.tensorrt import TensorRtOptions, TensorRtSession, open_on
from edgekit_runtime.sessions.tensorrt.cuda import Gpu

pytest.importorskip("onnxruntime")

X = np.array([[1, 0, 0, 0], [0, 1, 0, 1]], np.float32)
Y = np.array([[1, 2], [10, 12]], np.float32)
MANY = np.zeros((9, 4), np.float32)
ORT = BackendChoice("ort", "model.onnx", {"threads": 1})
WAIT_S = 30.0


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "cache")


@pytest.fixture
def open_it(maker: Any, package_path: Path, bench: Bench) -> Iterator[Callable[..., TensorRtSession]]:
    sessions: list[TensorRtSession] = []

    def open_session(
        fallback: BackendChoice | None = ORT, options: Any = None, **machine: Any
    ) -> TensorRtSession:
        maker.write(package_path, backend=BackendChoice("tensorrt", "model.onnx", options or {}, fallback))
        with read_package(package_path, maker.trust) as package:
            package.local_key = bench.local_key
            choice = package.manifest.backend
            sessions.append(open_on(bench.machine(**machine), package, choice, None))
        return sessions[-1]

    yield open_session
    bench.gate.set()
    for session in sessions:
        session.close()


Open = Callable[..., TensorRtSession]


def test_the_fallback_serves_until_the_engine_is_ready(bench: Bench, open_it: Open) -> None:
    bench.gate.clear()
    session = open_it()
    assert session.state.phase == "building"
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y)
    assert not bench.loaded
    bench.gate.set()
    assert session.wait(WAIT_S).phase == "serving"
    bench.loaded[0].factor = np.float32(3)  # shows who computes
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y * 3)


def test_who_is_alone_holds_the_engine_and_before_that_nothing(bench: Bench, open_it: Open) -> None:
    bench.gate.clear()
    session = open_it()
    with session.alone:
        bench.gate.set()
        session.wait(WAIT_S)
    held: list[str] = []

    @contextlib.contextmanager
    def hold() -> Iterator[None]:
        held.append("begin")
        yield
        held.append("end")

    bench.loaded[0].alone = hold()  # type: ignore[attr-defined]
    with session.alone:
        assert held == ["begin"]
    assert held == ["begin", "end"]


def test_runs_during_the_exchange_are_all_right(bench: Bench, open_it: Open) -> None:
    bench.gate.clear()
    bench.executor = FixedExecutor  # then the fallback is let go
    session = open_it()
    wrong: list[Any] = []
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            try:
                if not np.array_equal(session.run({"x": X[:1]})["y"], Y[:1]):
                    wrong.append("another result")
            except Exception as error:  # noqa: PERF203 - each run may fail on its own
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    bench.gate.set()
    session.wait(WAIT_S)
    threading.Event().wait(0.05)
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert session.state.phase == "serving"


def test_shapes_outside_the_engines_range_run_on_the_fallback(bench: Bench, open_it: Open) -> None:
    session = open_it()
    session.wait(WAIT_S)
    bench.loaded[0].factor = np.float32(3)
    assert session.run({"x": MANY})["y"].shape == (9, 2)
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y * 3)


def test_a_wrong_engine_never_takes_traffic(
    bench: Bench, open_it: Open, caplog: pytest.LogCaptureFixture
) -> None:
    bench.plans = {"int8": b"1.5@0", "fp16": b"nan@0"}
    with caplog.at_level(logging.WARNING):
        session = open_it()
        state = session.wait(WAIT_S)
    assert state.phase == "failed"
    assert "int8: output 'y': 1 of 2 values differ" in state.notes[0]
    assert "fp16: output 'y'" in state.notes[0]
    assert "its fallback goes on" in caplog.text
    assert all(engine.closed for engine in bench.loaded)
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y)


def test_an_engine_of_other_tensors_never_takes_traffic(bench: Bench, open_it: Open) -> None:
    class Other(FixedExecutor):
        outputs = (FixedExecutor.inputs[0],)

    bench.executor = Other
    state = open_it().wait(WAIT_S)
    assert state.phase == "failed"
    assert "the engine has outputs {'x': 'float32'}, the manifest says {'y': 'float32'}" in state.notes[0]


def test_an_engine_of_other_shapes_never_takes_traffic(bench: Bench, open_it: Open) -> None:
    class Wide(FixedExecutor):
        def run(self, inputs: Any) -> Any:
            raise DataError("tensor 'x': got shape [1, 4], expected [2, 4]")

    bench.executor = Wide
    state = open_it().wait(WAIT_S)
    assert state.phase == "failed"
    assert "int8: tensor 'x': got shape" in state.notes[0]
    open_it().wait(WAIT_S)
    assert len(bench.builds) == 1


def test_the_right_one_is_kept_where_another_is_wrong(bench: Bench, open_it: Open) -> None:
    bench.plans = {"int8": b"1.5@0", "fp16": b"1@0"}
    state = open_it().wait(WAIT_S)
    assert (state.phase, state.precision) == ("serving", "fp16")
    assert state.notes[0].startswith("int8: output 'y'")


@pytest.mark.parametrize(("plans", "kept"), [((b"1@0.01", b"1@0"), "fp16"), ((b"1@0", b"1@0.01"), "int8")])
def test_the_measured_faster_precision_is_kept(
    plans: tuple[bytes, bytes], kept: str, bench: Bench, open_it: Open
) -> None:
    bench.plans = dict(zip(("int8", "fp16"), plans, strict=True))
    state = open_it().wait(WAIT_S)
    assert state.precision == kept
    assert state.seconds.keys() == {"int8", "fp16"}
    assert [engine.closed for engine in bench.loaded] == [kept == "fp16", kept == "int8"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BackendError("building engines ended by SIGSEGV: no message"), "SIGSEGV"),
        (OSError(28, "No space left on device"), "No space left"),
        (RuntimeError("a bug of ours"), "RuntimeError: a bug of ours"),
    ],
)
def test_a_failed_build_leaves_the_fallback_serving(
    error: Exception, said: str, bench: Bench, open_it: Open
) -> None:
    bench.error = error
    session = open_it()
    state = session.wait(WAIT_S)
    assert state.phase == "failed"
    assert said in state.notes[0]
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y)


def test_a_failed_build_is_tried_again_next_time(bench: Bench, open_it: Open) -> None:
    bench.error = BackendError("out of memory")
    open_it().wait(WAIT_S)
    bench.error = None
    assert open_it().wait(WAIT_S).phase == "serving"


@pytest.mark.parametrize("final", ["wrong", "refused"])
def test_what_would_fail_again_is_not_built_again(final: str, bench: Bench, open_it: Open) -> None:
    bench.plans = {"int8": b"2@0"} if final == "wrong" else {}
    bench.refused = {} if final == "wrong" else {"model": "Banana 'n': UNSUPPORTED_NODE"}
    first = open_it().wait(WAIT_S)
    second = open_it().wait(WAIT_S)
    assert (first.phase, second.phase, len(bench.builds)) == ("failed", "failed", 1)
    assert first.notes[0] in second.notes[0]
    assert "delete" in second.notes[0]


def test_a_cached_engine_is_loaded_and_checked_not_built(bench: Bench, open_it: Open) -> None:
    bench.plans = {"int8": b"1@0", "fp16": b"1@0.01"}
    first = open_it().wait(WAIT_S)
    second = open_it().wait(WAIT_S)
    assert len(bench.builds) == 1
    assert second == first


def test_engine_of_an_encrypted_package_is_cached_encrypted(bench: Bench, open_it: Open) -> None:
    plan = bench.plans["int8"]
    bench.local_key = make_content_key()
    first = open_it().wait(WAIT_S)
    (path,) = (bench.folder / "tensorrt").glob("*/engine.plan")
    assert plan not in path.read_bytes()
    assert open_it().wait(WAIT_S) == first
    assert len(bench.builds) == 1
    for other in (None, make_content_key()):  # each is built again, and replaces what it cannot read
        bench.local_key = other
        assert open_it().wait(WAIT_S).phase == "serving"
    assert len(bench.builds) == 3
    assert plan not in path.read_bytes()


def test_a_cached_engine_that_is_wrong_now_is_built_again(bench: Bench, open_it: Open) -> None:
    open_it().wait(WAIT_S)
    loads = iter([b"2@0", b"1@0"])
    load = bench._load
    state = open_it(load=lambda plan: load(next(loads))).wait(WAIT_S)
    assert (state.phase, len(bench.builds)) == ("serving", 2)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "10.16.1"},
        {"gpu": Gpu("Orin", "8.9")},
        {"gpu": Gpu("Thor", "8.7")},
        {"power_mode": "NV Power Mode: 15W 2"},
        {"options": {"precisions": ["int8"]}},
        {"options": {"workspace_bytes": 1 << 28}},
        {"options": {"shapes": {"x": [[1, 4], [1, 4], [2, 4]]}}},
    ],
)
def test_an_engine_is_built_anew_for_whatever_it_depends_on(
    change: dict[str, Any], bench: Bench, open_it: Open
) -> None:
    open_it().wait(WAIT_S)
    assert open_it(**change).wait(WAIT_S).phase == "serving"
    assert len(bench.builds) == 2


def test_an_entry_that_was_moved_from_another_version_is_not_loaded(bench: Bench, open_it: Open) -> None:
    open_it().wait(WAIT_S)
    (entry,) = (bench.folder / "tensorrt").glob("*/entry.json")
    stated = json.loads(entry.read_text())
    assert stated["key"]["tensorrt"] == "10.3.0"
    stated["key"]["tensorrt"] = "10.2.0"
    entry.write_text(json.dumps(stated))
    assert open_it().wait(WAIT_S).phase == "serving"
    assert len(bench.builds) == 2


@pytest.mark.parametrize("name", ["entry.json", "engine.plan"])
@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"1@0 "])
def test_a_damaged_cache_is_built_again(name: str, content: bytes, bench: Bench, open_it: Open) -> None:
    open_it().wait(WAIT_S)
    (path,) = (bench.folder / "tensorrt").glob(f"*/{name}")
    path.write_bytes(content)
    assert open_it().wait(WAIT_S).phase == "serving"
    assert len(bench.builds) == 2


@pytest.mark.parametrize("place", ["tensorrt", "tensorrt/*"])
def test_an_engine_that_others_could_have_written_is_not_loaded(
    place: str, bench: Bench, open_it: Open, caplog: pytest.LogCaptureFixture
) -> None:
    open_it().wait(WAIT_S)
    (folder,) = (path for path in bench.folder.glob(place) if path.is_dir())
    folder.chmod(0o770)
    assert open_it().wait(WAIT_S).phase == "serving"
    assert len(bench.builds) == 2
    assert "other users can write there; chmod 700" in caplog.text


def test_the_cache_keeps_the_newest_engines(bench: Bench, open_it: Open) -> None:
    for version in range(12):
        assert open_it(version=f"10.{version}").wait(WAIT_S).phase == "serving"
    entries = [json.loads(path.read_text()) for path in (bench.folder / "tensorrt").glob("*/entry.json")]
    assert {entry["key"]["tensorrt"] for entry in entries} == {f"10.{version}" for version in range(4, 12)}


def test_a_cache_that_cannot_be_written_costs_only_the_cache(
    bench: Bench, open_it: Open, caplog: pytest.LogCaptureFixture
) -> None:
    bench.folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert open_it().wait(WAIT_S).phase == "serving"
    assert "not cached" in caplog.text


def test_timings_are_handed_to_the_next_build(maker: Any, bench: Bench, open_it: Open) -> None:
    open_it().wait(WAIT_S)
    open_it(options={"precisions": ["int8"]}).wait(WAIT_S)
    open_it(version="10.16.1").wait(WAIT_S)
    assert bench.builds == [(), (b"timing 1",), ()]


def test_a_timing_cache_of_the_package_is_used(maker: Any, bench: Bench, open_it: Open) -> None:
    open_it(options={"timing_cache": "labels.txt"}).wait(WAIT_S)
    assert bench.builds == [(maker.artifacts["labels.txt"],)]


def test_one_key_is_built_once_by_two_sessions_at_a_time(bench: Bench, open_it: Open) -> None:
    bench.gate.clear()
    first, second = open_it(), open_it()
    bench.gate.set()
    assert first.wait(WAIT_S).phase == second.wait(WAIT_S).phase == "serving"
    assert len(bench.builds) == 1


def test_closing_stops_the_build(bench: Bench, open_it: Open) -> None:
    bench.gate.clear()
    session = open_it()
    session.close()
    session.close()
    assert session.state.phase == "closed"
    with pytest.raises(BackendError, match="closed"):
        session.run({"x": X})


def test_closing_frees_the_engine(bench: Bench, open_it: Open) -> None:
    session = open_it()
    session.wait(WAIT_S)
    session.close()
    assert bench.loaded[0].closed


def test_without_a_fallback_it_waits_for_the_engine(bench: Bench, open_it: Open) -> None:
    session = open_it(fallback=None)
    assert session.state.phase == "serving"
    np.testing.assert_array_equal(session.run({"x": X})["y"], Y)


def test_without_a_fallback_a_failed_build_is_an_error(bench: Bench, open_it: Open) -> None:
    bench.error = BackendError("out of memory")
    with pytest.raises(BackendError, match="out of memory"):
        open_it(fallback=None)


def test_a_fallback_without_its_engine_is_waited_over(bench: Bench, open_it: Open) -> None:
    assert open_it(fallback=BackendChoice("absent", "model.onnx")).state.phase == "serving"


def test_inputs_that_do_not_fit_are_refused_whoever_runs(bench: Bench, open_it: Open) -> None:
    bench.gate.clear()
    session = open_it()
    with pytest.raises(DataError, match="'x'"):
        session.run({"z": X})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"precisions": []}, "precisions is"),
        ({"precisions": ["int4"]}, "precisions is"),
        ({"precisions": "int8"}, "precisions is"),
        ({"shapes": [1]}, "shapes: expected a table, got a list"),
        ({"shapes": {"x": [[1, 4], [1, 4]]}}, "shapes is"),
        ({"shapes": {"x": [[2, 4], [1, 4], [3, 4]]}}, "shapes is"),
        ({"shapes": {"x": [[1], [1, 4], [3, 4]]}}, "shapes is"),
        ({"shapes": {"x": [[0, 4], [1, 4], [3, 4]]}}, "shapes is"),
        ({"shapes": {"x": [[True], [1], [3]]}}, r"shapes: x\[0\] is \[True\]"),
        ({"workspace_bytes": 0}, "workspace_bytes is 0"),
        ({"timing_cache": 1}, "timing_cache is 1"),
        ({"turbo": 1}, "unknown setting"),
    ],
)
def test_wrong_options_are_a_backend_error(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BackendError, match=reason):
        read_options(TensorRtOptions, "tensorrt", options)
