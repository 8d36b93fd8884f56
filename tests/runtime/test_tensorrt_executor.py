"""The execution of an engine: on a stand-in of the driver everywhere, on a GPU where there is one."""

import ctypes
import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.tensorrt_fakes import FAKE_TENSORRT, compile_driver

from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.sessions import EngineMissingError
from edgekit_runtime.sessions.tensorrt.cuda import Cuda, Gpu
from edgekit_runtime.sessions.tensorrt.executor import EngineExecutor

X = np.array([[1, 0, 0, 0], [0, 1, 0, 1]], np.float32)
Y = np.array([[1, 2], [10, 12]], np.float32)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def executor(driver: Path) -> EngineExecutor:
    return EngineExecutor(FAKE_TENSORRT, Cuda(str(driver)), b"1")


def test_the_driver_states_the_gpu(driver: Path) -> None:
    assert Cuda(str(driver)).gpu == Gpu("Fake Orin", "8.7")


def test_no_driver_is_a_missing_engine() -> None:
    with pytest.raises(EngineMissingError, match="needs an NVIDIA GPU with its driver"):
        Cuda("libcuda-of-nowhere.so.1")


def test_a_driver_without_a_gpu_is_a_missing_engine(driver: Path) -> None:
    failing = ctypes.c_int.in_dll(ctypes.CDLL(str(driver)), "fail_with")
    failing.value = 100
    try:
        with pytest.raises(EngineMissingError, match=r"cuInit failed with 100 \(CUDA_ERROR_NO_DEVICE\)"):
            Cuda(str(driver))
    finally:
        failing.value = 0


def test_an_engine_runs_with_the_shapes_that_it_is_given(executor: EngineExecutor) -> None:
    assert [spec.shape for spec in (*executor.inputs, *executor.outputs)] == [("x_0", 4), ("y_0", 2)]
    for rows in (1, 2, 1):
        np.testing.assert_array_equal(executor.run({"x": X[:rows]})["y"], Y[:rows])
    np.testing.assert_array_equal(executor.run({"x": np.asfortranarray(X)})["y"], Y)


def test_any_thread_may_run_an_engine(executor: EngineExecutor) -> None:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(executor.run({"x": X})["y"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(results, [Y] * 4)


def test_closing_frees_what_was_reserved(driver: Path) -> None:
    library = ctypes.CDLL(str(driver))
    blocks, streams = (ctypes.c_int.in_dll(library, name) for name in ("live_blocks", "live_streams"))
    before = (blocks.value, streams.value)
    executor = EngineExecutor(FAKE_TENSORRT, Cuda(str(driver)), b"1")
    for rows in (1, 2):
        executor.run({"x": X[:rows]})
    assert (blocks.value, streams.value) == (before[0] + 2, before[1] + 1)
    executor.close()
    executor.close()
    assert (blocks.value, streams.value) == before
    with pytest.raises(BackendError, match="closed"):
        executor.run({"x": X})


def test_an_engine_of_another_version_is_refused(driver: Path) -> None:
    with pytest.raises(BackendError, match="cannot be loaded: magicTag does not match"):
        EngineExecutor(FAKE_TENSORRT, Cuda(str(driver)), b"of TensorRT 8")


def test_a_failure_on_the_gpu_is_a_backend_error(driver: Path) -> None:
    with pytest.raises(BackendError, match="running the engine failed"):
        EngineExecutor(FAKE_TENSORRT, Cuda(str(driver)), b"0").run({"x": X})


def test_too_little_memory_is_a_backend_error(executor: EngineExecutor) -> None:
    executor._engine.max_batch = 1 << 40
    with pytest.raises(BackendError, match=r"cuMemAlloc_v2 failed with 2 \(CUDA_ERROR_OUT_OF_MEMORY\)"):
        executor.run({"x": np.zeros((1 << 17, 4), np.float32)})
    np.testing.assert_array_equal(executor.run({"x": X})["y"], Y)


def test_shapes_outside_the_profile_are_told_apart_and_refused(executor: EngineExecutor) -> None:
    many = np.zeros((9, 4), np.float32)
    assert executor.accepts({"x": X})
    assert not executor.accepts({"x": many})
    with pytest.raises(BackendError, match=r"set_input_shape of 'x' to \(9, 4\) failed"):
        executor.run({"x": many})


def test_outputs_whose_size_depends_on_values_are_refused(executor: EngineExecutor) -> None:
    executor._engine.unknown_output = True
    with pytest.raises(BackendError, match="shape of 'y' depends on values"):
        executor.run({"x": X})


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({}, r"got inputs \[\], expected \['x'\]"),
        ({"z": X}, r"got inputs \['z'\], expected \['x'\]"),
        ({"x": X.astype(np.float64)}, "got dtype <f8"),
        ({"x": X[0]}, "got shape"),
    ],
)
def test_inputs_that_do_not_fit_never_reach_the_gpu(
    inputs: dict[str, Any], reason: str, executor: EngineExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cuda, "enter", lambda _: pytest.fail("the GPU was asked"))
    with pytest.raises(DataError, match=reason):
        executor.run(inputs)
    monkeypatch.undo()  # the executor is closed on the GPU


def _why_no_gpu() -> str | None:
    if importlib.util.find_spec("tensorrt") is None:
        return "TensorRT is not installed"
    try:
        Cuda()
    except EngineMissingError as error:
        return str(error)
    return None


def test_a_real_engine_computes_the_model_on_a_real_gpu(maker: Any, tmp_path: Path) -> None:
    reason = _why_no_gpu()
    if reason is not None:
        pytest.skip(f"needs an NVIDIA GPU: {reason}")
    from edgekit_runtime.sessions.tensorrt import TensorRtOptions, find_machine

    machine = find_machine()
    engines = machine.build(
        maker.artifacts["model.onnx"], TensorRtOptions(), timings=(), stop=threading.Event()
    )
    assert engines.refused == {}
    for precision, plan in engines.plans.items():
        engine = machine.load(plan)
        np.testing.assert_allclose(engine.run({"x": X})["y"], Y, rtol=1e-2, err_msg=precision)
        engine.close()
