"""The protocol as a client understands it that nobody here wrote: tritonclient over HTTP."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.sequence_parts import write_sums
from tests.service.service_parts import Running, make_config, running, write_identity

from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.resources import RegionLimits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of gevent, about what it patches
    triton: Any = pytest.importorskip("tritonclient.http")
    shm: Any = pytest.importorskip("tritonclient.utils.shared_memory")

InferenceServerException = triton.InferenceServerException
DTYPES = list(DATATYPE_OF_DTYPE)
X = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)


@pytest.fixture(scope="module")
def service(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("triton")
    maker.write(folder / "linear.edgepkg")
    write_identity(maker, folder / "echo.edgepkg", DTYPES)
    write_sums(maker, folder / "sums.edgepkg")
    paths = [folder / "linear.edgepkg", folder / "echo.edgepkg", folder / "sums.edgepkg"]
    config = make_config(folder, shared_memory=RegionLimits(allows_posix=True))
    with running(config, PackageFiles(paths, maker.trust)) as service:
        yield service


@pytest.fixture
def client(service: Running) -> Iterator[Any]:
    client = triton.InferenceServerClient(f"127.0.0.1:{service.port}")
    yield client
    client.close()


def make_input(name: str, array: Any, *, is_binary: bool = True) -> Any:
    tensor = triton.InferInput(name, list(array.shape), DATATYPE_OF_DTYPE[array.dtype.name])
    tensor.set_data_from_numpy(array, binary_data=is_binary)
    return tensor


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("linear")
    assert client.is_model_ready("linear", "1.0.0")
    assert not client.is_model_ready("other")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("linear")["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [-1, 2]}
    ]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_inference_with_tensors_in_every_form(client: Any, binary_in: bool, binary_out: bool | None) -> None:
    outputs = None if binary_out is None else [triton.InferRequestedOutput("y", binary_data=binary_out)]
    result = client.infer(
        "linear", [make_input("x", X, is_binary=binary_in)], "1.0.0", outputs, request_id="an id"
    )
    assert np.array_equal(result.as_numpy("y"), X @ WEIGHT)
    response = result.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == ("linear", "1.0.0", "an id")


def test_every_datatype_comes_back_as_it_was_sent(client: Any) -> None:
    arrays = {f"in_{dtype}": np.array([[1, 0, 1]], dtype) for dtype in DTYPES}
    result = client.infer("echo", [make_input(name, array) for name, array in arrays.items()])
    for name, array in arrays.items():
        found = result.as_numpy(name.replace("in_", "out_"))
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())


def test_priority_and_timeout_are_taken(client: Any) -> None:
    result = client.infer("linear", [make_input("x", X)], priority=1, timeout=5_000_000)
    assert np.array_equal(result.as_numpy("y"), X @ WEIGHT)


def test_requests_at_the_same_time_get_their_own_answers(service: Running) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{service.port}", concurrency=4)
    requests = [client.async_infer("linear", [make_input("x", X * n)]) for n in range(40)]
    for number, request in enumerate(requests):
        assert np.array_equal(request.get_result().as_numpy("y"), X * number @ WEIGHT)
    client.close()


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


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_request_is_answered_alike(client: Any, coding: str) -> None:
    plain, packed = (
        client.infer("linear", [make_input("x", X)], request_compression_algorithm=each)
        for each in (None, coding)
    )
    np.testing.assert_array_equal(packed.as_numpy("y"), plain.as_numpy("y"))


def test_repository_and_statistics(client: Any) -> None:
    assert {line["name"]: line["state"] for line in client.get_model_repository_index()} == {
        "echo": "READY",
        "linear": "READY",
        "sums": "READY",
    }
    client.unload_model("echo")
    assert not client.is_model_ready("echo")
    client.load_model("echo")
    assert client.is_model_ready("echo")
    client.infer("linear", [make_input("x", X)])
    (line,) = client.get_inference_statistics("linear")["model_stats"]
    assert line["inference_count"] >= 1
    with pytest.raises(InferenceServerException, match="signed"):
        client.load_model("echo", config="{}")


def test_posix_shared_memory(client: Any, tmp_path: Path) -> None:
    key = f"/edgekit-{tmp_path.name}"
    region = shm.create_shared_memory_region("io", key, X.nbytes + 16)
    try:
        shm.set_shared_memory_region(region, [X])
        client.register_system_shared_memory("io", key, X.nbytes + 16)
        assert client.get_system_shared_memory_status()[0]["name"] == "io"
        source = triton.InferInput("x", list(X.shape), "FP32")
        source.set_shared_memory("io", X.nbytes)
        target = triton.InferRequestedOutput("y")
        target.set_shared_memory("io", 16, offset=X.nbytes)
        result = client.infer("linear", [source], outputs=[target])
        assert result.get_output("y")["shape"] == [2, 2]
        found = shm.get_contents_as_numpy(region, np.float32, [2, 2], offset=X.nbytes)
        assert np.array_equal(found, X @ WEIGHT)
        client.unregister_system_shared_memory("io")
        assert client.get_system_shared_memory_status() == []
    finally:
        shm.destroy_shared_memory_region(region)


@pytest.mark.parametrize("sequence_id", [3, "microphone 3"])
def test_a_sequence_keeps_its_states(client: Any, sequence_id: int | str) -> None:
    for index in range(3):
        result = client.infer(
            "sums",
            [make_input("x", X[:1, :2])],
            sequence_id=sequence_id,
            sequence_start=index == 0,
            sequence_end=index == 2,
        )
        assert result.as_numpy("y").tolist() == ((index + 1) * X[:1, :2]).tolist()
    with pytest.raises(InferenceServerException, match="must set sequence_start"):
        client.infer("sums", [make_input("x", X[:1, :2])], sequence_id=sequence_id)
