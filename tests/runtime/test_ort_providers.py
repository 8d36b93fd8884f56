"""onnxruntime on a GPU, with a stand-in: which provider a package gets, and why it gets the processor."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.gpu_stand_in import CPU, CUDA, TENSORRT, GpuState, give_gpu

from edgekit_runtime.errors import BackendError
from edgekit_runtime.offload.measurement.job import Job, JobGraph
from edgekit_runtime.offload.measurement.job_runner import measure
from edgekit_runtime.sessions import Session, open_session
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_runtime.sessions.ort_providers import choose_provider, find_gpus

X = np.array([[1, 0, 0, 0]], np.float32)


@pytest.fixture
def sessions(maker: Any, package_path: Path) -> Iterator[Any]:
    opened: list[Session] = []

    def open_package() -> Any:
        opened.append(open_session(package_path, trust=maker.trust))
        return opened[-1]

    yield open_package
    for session in opened:
        session.close()


def test_package_runs_on_cuda_where_the_wheel_has_it(sessions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = give_gpu(monkeypatch)
    session = sessions()
    assert session.provider == "cuda"
    np.testing.assert_array_equal(session.run({"x": X})["y"], [[1, 2]])
    assert list(opened[-1]) == [CUDA, CPU]
    assert opened[-1][CUDA]["use_tf32"] == "0"


def test_tensorrt_is_taken_if_asked_for_with_cuda_behind_it(
    sessions: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = give_gpu(monkeypatch)
    monkeypatch.setenv("EDGEKIT_PROVIDER", "tensorrt")
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))
    assert sessions().provider == "tensorrt"
    assert list(opened[-1]) == [TENSORRT, CUDA, CPU]
    assert opened[-1][TENSORRT]["trt_fp16_enable"] == "0"
    assert opened[-1][TENSORRT]["trt_engine_cache_path"].startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("no device", "no CUDA-capable device"),
        ("no libraries", "its libraries are missing"),
        ("no memory", "out of memory"),
        ("wrong results", "the self-test failed there: output 'y'"),
    ],
)
def test_gpu_that_does_not_work_gives_way_to_the_processor_with_the_reason(
    sessions: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    state: GpuState,
    reason: str,
) -> None:
    give_gpu(monkeypatch, state)
    with caplog.at_level(logging.WARNING):
        session = sessions()
    assert session.provider == "cpu"
    np.testing.assert_array_equal(session.run({"x": X})["y"], [[1, 2]])
    (warning,) = [record.message for record in caplog.records]
    assert reason in warning
    assert warning.endswith("using the processor")


def test_plain_wheel_runs_on_the_processor_without_a_word(
    sessions: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert sessions().provider == "cpu"
    assert not caplog.records


def test_provider_that_the_wheel_lacks_is_said_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [CPU])
    monkeypatch.setenv("EDGEKIT_PROVIDER", "cuda")
    assert choose_provider() == "cpu"
    assert "edgekit[gpu]" in caplog.text


def test_cuda_on_arm_is_used_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpu(monkeypatch)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert choose_provider() == "cpu"
    monkeypatch.setenv("EDGEKIT_PROVIDER", "cuda")
    assert choose_provider() == "cuda"


def test_unknown_provider_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_PROVIDER", "gpu")
    with pytest.raises(BackendError, match="'gpu', expected one of auto, cpu, cuda, tensorrt"):
        choose_provider()


def test_session_of_the_toolkit_stays_on_the_processor(maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = give_gpu(monkeypatch)
    assert OrtSession(maker.artifacts["model.onnx"]).provider == "cpu"
    assert list(opened[-1]) == [CPU]


def make_job(maker: Any, kind: Any) -> tuple[Job, list[memoryview]]:
    model = maker.artifacts["model.onnx"]
    return Job(kind=kind, graphs=(JobGraph(0),), blob_bytes=(len(model),), seconds=0.1), [memoryview(model)]


def test_whole_runs_of_a_profile_are_the_gpus_and_its_nodes_the_processors(
    maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = give_gpu(monkeypatch)
    result = measure(*make_job(maker, "profile"))
    assert result.machine.gpu == f"{', '.join(find_gpus()) or 'GPU'} by CUDA"
    assert result.nodes
    assert [list(stated) for stated in opened[1:]] == [[CUDA, CPU], [CUDA, CPU], [CPU]]  # [0] looks for it


@pytest.mark.parametrize("state", ["no device", "no libraries"])
def test_measurement_without_a_working_gpu_names_none(
    maker: Any, monkeypatch: pytest.MonkeyPatch, state: GpuState
) -> None:
    give_gpu(monkeypatch, state)
    assert measure(*make_job(maker, "time")).machine.gpu == ""


def test_measurement_of_a_graph_that_the_gpu_refuses_says_how_to_measure_the_processor(
    maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpu(monkeypatch, "no memory")
    with pytest.raises(BackendError, match="EDGEKIT_PROVIDER=cpu"):
        measure(*make_job(maker, "time"))
    monkeypatch.setenv("EDGEKIT_PROVIDER", "cpu")
    assert measure(*make_job(maker, "time")).timings
