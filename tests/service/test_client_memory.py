"""Arrays that a client shares: those that are refused, given back, registered again, or of the wrong kind."""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.descriptor_parts import count_descriptors
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.service_parts import Running, ask, get_bytes, running_linear

from edgekit_runtime import Client
from edgekit_runtime.errors import DataError, RequestError, TransportError
from edgekit_runtime.service.options.resources import RegionLimits

X = np.array([[1, 2, 3, 4]], np.float32)


@pytest.fixture(scope="module")
def cramped(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = RegionLimits(max_regions=2, max_region_bytes=1000)
    with running_linear(maker, tmp_path_factory.mktemp("cramped"), shared_memory=limits) as service:
        yield service


def test_refused_region_fails_only_the_calls_that_need_it(cramped: Running) -> None:
    with Client(cramped.socket_path) as client:
        x, large = client.shared((1, 4)), client.shared((300, 4))
        x[...] = X
        for _ in range(2):
            with pytest.raises(RequestError, match="limit"):
                client.infer("linear", {"x": large})
            with pytest.raises(RequestError, match="limit"):
                client.infer("linear", {"x": X}, outputs={"y": large})
            assert client.ready()
            assert np.array_equal(client.infer("linear", {"x": x})["y"], X @ WEIGHT)
            assert np.array_equal(client.infer("linear", {"x": X})["y"], X @ WEIGHT)


def test_released_array_makes_room_for_another_and_is_one_like_any(cramped: Running) -> None:
    with Client(cramped.socket_path) as client:
        arrays = [client.shared((1, 4)) for _ in range(3)]
        for array in arrays:
            array[...] = X
        calls = [client.bind("linear", {"x": array}) for array in arrays]
        for call in calls[:2]:
            call()
        with pytest.raises(RequestError, match="2 regions"):
            calls[2]()
        client.release(arrays[0])
        assert np.array_equal(calls[2]()["y"], X @ WEIGHT)
        with pytest.raises(DataError, match="bind again"):
            calls[0]()
        with pytest.raises(DataError, match="released"):
            client.release(arrays[0])
        assert np.array_equal(client.infer("linear", {"x": arrays[0]})["y"], X @ WEIGHT)
        status = get_bytes("/v2/systemsharedmemory/status")
        assert len(ask(cramped, status).json) == 2


def test_many_arrays_one_after_the_other_leave_no_descriptors(cramped: Running) -> None:
    with Client(cramped.socket_path) as client:
        client.infer("linear", {"x": client.shared((1, 4))})
        before = count_descriptors()
        for _ in range(100):
            x = client.shared((1, 4))
            client.infer("linear", {"x": x})
            client.release(x)
        assert count_descriptors() <= before + 2


def test_region_is_registered_anew_where_the_service_had_closed_the_connection(linear: Running) -> None:
    """Also one that the connection before did not have."""
    with Client(linear.socket_path) as client:
        client.ready()
        x = client.shared((1, 4))
        x[...] = X
        linear.call(lambda: [one.close() for one in list(linear.service.http._connections)])
        assert np.array_equal(client.infer("linear", {"x": x})["y"], X @ WEIGHT)
        client.close()
        assert np.array_equal(client.infer("linear", {"x": x})["y"], X @ WEIGHT)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((-1, 3), "f4"), ((1, 4), "O"), ((1, 4), ">f4"), ((1, 4), "U3"), ((1, 4), "c8")]
)
def test_shared_array_that_no_tensor_can_be_is_refused(
    linear: Running, shape: tuple[int, ...], dtype: str
) -> None:
    before = count_descriptors()
    with Client(linear.socket_path) as client, pytest.raises(DataError, match="shared memory"):
        client.shared(shape, dtype)
    assert count_descriptors() <= before


@pytest.mark.parametrize("shape", [(1 << 62, 4), (1 << 62,), (1 << 70,)])
def test_shared_array_beyond_all_memory_is_refused(linear: Running, shape: tuple[int, ...]) -> None:
    before = count_descriptors()
    with Client(linear.socket_path) as client, pytest.raises(TransportError, match="cannot make"):
        client.shared(shape)
    assert count_descriptors() <= before


def test_output_into_an_array_of_another_dtype_is_refused(linear: Running) -> None:
    with Client(linear.socket_path) as client:
        y = client.shared((1, 2))
        for _ in range(2):  # the second answer is like one that was read before
            client.infer("linear", {"x": X}, outputs={"y": y})
            with pytest.raises(DataError, match=r"'y' is float32.* is int32"):
                client.infer("linear", {"x": X}, outputs={"y": y.view(np.int32)})
        with pytest.raises(DataError, match="float32"):
            client.bind("linear", {"x": X}, outputs={"y": client.shared((1, 2), np.int32)})()
        assert np.array_equal(client.infer("linear", {"x": X})["y"], X @ WEIGHT)
