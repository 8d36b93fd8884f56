"""The protocol over gRPC as a client understands it that nobody here wrote: tritonclient on grpcio."""

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.answer_parts import draw, encode, write_cell_detector
from tests.service.grpc_parts import grpc_path, running_grpc
from tests.service.sequence_parts import write_sums
from tests.service.service_parts import Running, write_identity

from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.resources import RegionLimits

triton: Any = pytest.importorskip("tritonclient.grpc")
triton_aio: Any = pytest.importorskip("tritonclient.grpc.aio")
shm: Any = pytest.importorskip("tritonclient.utils.shared_memory")

InferenceServerException = triton.InferenceServerException
DTYPES = list(DATATYPE_OF_DTYPE)
X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)


@pytest.fixture(scope="module")
def service(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("triton")
    maker.write(folder / "linear.edgepkg")
    write_identity(maker, folder / "echo.edgepkg", DTYPES)
    write_cell_detector(maker, folder / "cells.edgepkg")
    write_sums(maker, folder / "sums.edgepkg")
    source = PackageFiles([folder], maker.trust)
    regions = RegionLimits(allows_posix=True)
    with running_grpc(maker, folder, source, shared_memory=regions, grpc={"port": 0}) as service:
        yield service


@pytest.fixture(scope="module", params=["unix", "tcp"])
def client(service: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    addresses = dict(address.split("://", 1) for address in service.addresses if "://" in address)
    url = f"unix:{grpc_path(service)}" if request.param == "unix" else addresses["grpc"]
    client = triton.InferenceServerClient(url)
    yield client
    client.close()


def make_input(name: str, array: Any) -> Any:
    tensor = triton.InferInput(name, list(array.shape), DATATYPE_OF_DTYPE[array.dtype.name])
    tensor.set_data_from_numpy(array)
    return tensor


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("linear")
    assert client.is_model_ready("linear", "1.0.0")
    assert not client.is_model_ready("other")
    assert "statistics" in client.get_server_metadata().extensions
    (output,) = client.get_model_metadata("linear").outputs
    assert (output.name, output.datatype, list(output.shape)) == ("y", "FP32", [-1, 2])


@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_inference_with_every_option_is_answered(client: Any, coding: str | None) -> None:
    result = client.infer(
        "linear",
        [make_input("x", X)],
        "1.0.0",
        [triton.InferRequestedOutput("y")],
        request_id="an id",
        priority=1,
        timeout=5_000_000,
        client_timeout=60,
        headers={"x-anything": "a"},
        compression_algorithm=coding,
    )
    assert np.array_equal(result.as_numpy("y"), X @ WEIGHT)
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("linear", "1.0.0", "an id")


def test_every_datatype_comes_back_as_it_was_sent(client: Any) -> None:
    arrays = {f"in_{dtype}": np.array([[1, 0, 1]], dtype) for dtype in DTYPES}
    result = client.infer("echo", [make_input(name, array) for name, array in arrays.items()])
    for name, array in arrays.items():
        answer = result.as_numpy(name.replace("in_", "out_"))
        assert (answer.dtype, answer.tolist()) == (array.dtype, array.tolist())


def test_large_tensors_pass_both_ways(client: Any) -> None:
    x = np.arange(2_000_000, dtype=np.float32).reshape(-1, 4)  # 8 MB in, 4 MB out
    assert np.array_equal(client.infer("linear", [make_input("x", x)]).as_numpy("y"), x @ WEIGHT)


def test_requests_at_the_same_time_get_their_own_answers(client: Any) -> None:
    answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    for number in range(40):
        client.async_infer(
            "linear",
            [make_input("x", X * number)],
            callback=lambda result, error, number=number: answers.put((number, result, error)),
        )
    for _ in range(40):
        number, result, error = answers.get(timeout=60)
        assert error is None
        assert np.array_equal(result.as_numpy("y"), X * number @ WEIGHT)


def test_stream_answers_in_order_and_survives_an_error(client: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for number in range(20):
        model = "other" if number == 5 else "linear"
        client.async_stream_infer(model, [make_input("x", X * number)], request_id=str(number))
    for number in range(20):
        result, error = answers.get(timeout=60)
        if number == 5:
            assert "unknown" in str(error)
            continue
        assert error is None
        assert result.get_response().id == str(number)
        assert np.array_equal(result.as_numpy("y"), X * number @ WEIGHT)
    client.stop_stream()


def test_asyncio_client_infers_and_streams(service: Running) -> None:
    async def ask() -> None:
        client = triton_aio.InferenceServerClient(f"unix:{grpc_path(service)}")
        results = await asyncio.gather(
            *(client.infer("linear", [make_input("x", X * number)]) for number in range(10))
        )
        for number, result in enumerate(results):
            assert np.array_equal(result.as_numpy("y"), X * number @ WEIGHT)

        async def requests() -> Any:
            for number in range(5):
                yield {"model_name": "linear", "inputs": [make_input("x", X * number)]}

        number = 0
        async for result, error in client.stream_infer(requests()):
            assert error is None
            assert np.array_equal(result.as_numpy("y"), X * number @ WEIGHT)
            number += 1
        assert number == 5
        await client.close()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("model", "array", "word"),
    [
        ("other", X, "unknown"),
        ("linear", X[:, :3].copy(), "shape"),
        ("linear", X.astype(np.float64), "FP64"),
    ],
)
def test_refusal_is_an_error_with_the_reason(client: Any, model: str, array: Any, word: str) -> None:
    with pytest.raises(InferenceServerException, match=word):
        client.infer(model, [make_input("x", array)])


def test_photograph_in_a_byte_string_gets_the_answer_of_the_task(client: Any) -> None:
    for column in (1, 2):  # files of other lengths, of which the rest of the message is the same
        file = encode(draw(128, 128, red=(column, 1), green=(3, column)))
        tensor = triton.InferInput("pixels", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([file], object))
        result = client.infer("cells", [tensor], outputs=[triton.InferRequestedOutput("answer")])
        answer = json.loads(result.as_numpy("answer")[0])
        boxes = {entry["label"]: entry["box"] for entry in answer["detections"]}
        assert boxes == {
            "red": [32 * column, 32, 32 * column + 32, 64],
            "green": [96, 32 * column, 128, 32 * column + 32],
        }


def test_classification_states_the_best_classes(client: Any) -> None:
    outputs = [triton.InferRequestedOutput("y", class_count=1)]
    result = client.infer("linear", [make_input("x", X)], outputs=outputs).as_numpy("y")
    best = (X @ WEIGHT).argmax(axis=1)
    assert [text.decode().split(":")[1] for text in result.reshape(-1)] == [str(index) for index in best]


def test_sequence_keeps_its_states_between_requests(client: Any, request: pytest.FixtureRequest) -> None:
    totals = []
    for number in range(3):
        result = client.infer(
            "sums",
            [make_input("x", np.full((1, 2), number + 1, np.float32))],
            sequence_id=f"of {request.node.name}",
            sequence_start=number == 0,
            sequence_end=number == 2,
        )
        totals.append(result.as_numpy("y").reshape(-1).tolist())
    assert totals == [[1, 1], [3, 3], [6, 6]]


def test_repository_and_statistics(client: Any) -> None:
    index = {line.name: line.state for line in client.get_model_repository_index().models}
    assert index == {"cells": "READY", "echo": "READY", "linear": "READY", "sums": "READY"}
    client.unload_model("echo")
    assert not client.is_model_ready("echo")
    client.load_model("echo")
    assert client.is_model_ready("echo")
    client.infer("linear", [make_input("x", X)])
    (line,) = client.get_inference_statistics("linear").model_stats
    assert line.inference_count >= 1
    with pytest.raises(InferenceServerException, match="signed"):
        client.load_model("echo", config="{}")


def test_posix_shared_memory(client: Any, tmp_path: Path) -> None:
    key = f"/edgekit-{tmp_path.name}"
    region = shm.create_shared_memory_region("io", key, X.nbytes + 16)
    try:
        shm.set_shared_memory_region(region, [X])
        client.register_system_shared_memory("io", key, X.nbytes + 16)
        assert client.get_system_shared_memory_status().regions["io"].byte_size == X.nbytes + 16
        source = triton.InferInput("x", list(X.shape), "FP32")
        source.set_shared_memory("io", X.nbytes)
        target = triton.InferRequestedOutput("y")
        target.set_shared_memory("io", 16, offset=X.nbytes)
        result = client.infer("linear", [source], outputs=[target])
        assert list(result.get_output("y").shape) == [2, 2]
        written = shm.get_contents_as_numpy(region, np.float32, [2, 2], offset=X.nbytes)
        assert np.array_equal(written, X @ WEIGHT)
        client.unregister_system_shared_memory("io")
        assert not client.get_system_shared_memory_status().regions
    finally:
        shm.destroy_shared_memory_region(region)


def test_threads_share_one_client(client: Any) -> None:
    failures: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            for _ in range(20):
                result = client.infer("linear", [make_input("x", X * number)])
                assert np.array_equal(result.as_numpy("y"), X * number @ WEIGHT)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
