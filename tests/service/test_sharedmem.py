"""Shared memory: in place by memfd, by key where that is allowed, and memory that is not what it seems."""

import ctypes
import fcntl
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.descriptor_parts import count_descriptors
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.gates import ON_THREADS, Gate
from tests.service.region_parts import REGION, SEALS, infer_in, memfd, register, register_bytes
from tests.service.service_parts import (
    Replies,
    Reply,
    Running,
    X,
    Y,
    ask,
    get_bytes,
    infer_bytes,
    make_config,
    post_bytes,
    running,
    running_linear,
    write_identity,
)
from tests.waiting import wait_for

from edgekit_runtime import Client
from edgekit_runtime.errors import DataError, RequestError, TransportError
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.options.resources import RegionLimits


def test_arrays_of_the_client_are_read_and_written_in_place(linear: Running) -> None:
    with Client(linear.socket_path) as client:
        x, y = client.shared((1, 4)), client.shared((1, 2))
        for factor in (1, 2):
            x[...] = X * factor
            found = client.infer("linear", {"x": x}, outputs={"y": y})
            assert np.array_equal(y, X * factor @ WEIGHT)
            assert np.shares_memory(found["y"], y)


def test_bound_call_goes_through_shared_memory_both_ways(linear: Running) -> None:
    with Client(linear.socket_path) as client:
        x, y = client.shared((1, 4)), client.shared((3, 2))
        call = client.bind("linear", {"x": x}, outputs={"y": y})
        for factor in (1, 2):
            x[...] = X * factor
            assert np.array_equal(call()["y"], X * factor @ WEIGHT)
            linear.call(lambda: [one.close() for one in list(linear.service.http._connections)])


def test_part_of_a_shared_array_is_found_at_its_offset(linear: Running) -> None:
    with Client(linear.socket_path) as client:
        x = client.shared((5, 4))
        x[...] = np.arange(20).reshape(5, 4)
        assert np.array_equal(client.infer("linear", {"x": x[2:4]})["y"], x[2:4] @ WEIGHT)
        assert np.array_equal(
            client.infer("linear", {"x": x[::2]})["y"], x[::2] @ WEIGHT
        )  # has gaps: is sent


def test_output_that_is_not_shared_is_refused_by_the_client(linear: Running) -> None:
    with Client(linear.socket_path) as client, pytest.raises(DataError, match="shared"):
        client.infer("linear", {"x": X}, outputs={"y": np.zeros((1, 2), np.float32)})


def test_shared_memory_over_tcp_is_refused_by_the_client(linear: Running) -> None:
    with Client(f"127.0.0.1:{linear.port}") as client, pytest.raises(TransportError, match="Unix"):
        client.shared((1, 4))


def test_region_is_listed_unregistered_and_gone(linear: Running) -> None:
    with linear.connect() as client, memfd(64) as descriptor:
        assert register(client, "mine", [descriptor], byte_size=32, offset=16).status == 200
        (line,) = ask(linear, get_bytes(f"{REGION}/mine/status")).json
        assert line == {"name": "mine", "key": "k", "offset": 16, "byte_size": 32}
        assert line in ask(linear, get_bytes("/v2/systemsharedmemory/status")).json
        os.pwrite(descriptor, X.tobytes(), 16)
        client.sendall(infer_in("mine", out=16))
        assert Replies(client).next().status == 200
        assert os.pread(descriptor, 8, 32) == Y
        assert ask(linear, post_bytes(f"{REGION}/mine/unregister", b"")).status == 200
        client.sendall(infer_in("mine"))
        assert Replies(client).next().status == 400
        assert ask(linear, get_bytes(f"{REGION}/mine/status")).status == 400


def test_unregistering_all_leaves_the_memory_of_others_alone(linear: Running) -> None:
    everything = post_bytes("/v2/systemsharedmemory/unregister", b"")
    with linear.connect() as client, linear.connect() as other, memfd(64) as descriptor:
        for name in ("first", "second"):
            assert register(client, name, [descriptor], byte_size=64).status == 200
        assert register(other, "other", [descriptor], byte_size=64).status == 200
        assert ask(linear, everything).status == 200
        client.sendall(infer_in("first") + everything + infer_in("second"))
        replies = Replies(client)
        assert [replies.next().status for _ in range(3)] == [200, 200, 400]
        (line,) = ask(linear, get_bytes("/v2/systemsharedmemory/status")).json
        assert line["name"] == "other"


def test_memory_of_a_client_that_ends_is_forgotten(linear: Running) -> None:
    before = count_descriptors()
    for _ in range(100):
        with linear.connect() as client, memfd(64) as descriptor:
            assert register(client, "short", [descriptor], byte_size=64).status == 200
        deadline_s = time.monotonic() + 10
        while ask(linear, get_bytes("/v2/systemsharedmemory/status")).json:
            assert time.monotonic() < deadline_s
    wait_for(lambda: count_descriptors() <= before + 5, "the end of its descriptors")


@pytest.mark.parametrize(
    ("size", "seals", "stated", "message"),
    [
        (64, 0, {"byte_size": 64}, "shrunk"),
        (64, fcntl.F_SEAL_GROW, {"byte_size": 64}, "shrunk"),
        (64, SEALS, {"byte_size": 65}, "64 bytes"),
        (64, SEALS, {"byte_size": 64, "offset": 1}, "64 bytes"),
        (64, SEALS, {"byte_size": 0}, "at least"),
        (64, SEALS, {"byte_size": -1}, "whole number"),
        (64, SEALS, {"byte_size": 2**62, "offset": 2**62}, "limit"),
        (64, SEALS, {"byte_size": "64"}, "whole number"),
        (64, SEALS, {"byte_size": 64, "key": 3}, "key"),
        (64, SEALS | fcntl.F_SEAL_WRITE, {"byte_size": 64}, "write"),
    ],
)
def test_memory_that_is_not_what_is_stated_is_refused(
    linear: Running, size: int, seals: int, stated: dict[str, Any], message: str
) -> None:
    before = count_descriptors()
    with linear.connect() as client, memfd(size, seals) as descriptor:
        reply = register(client, "bad", [descriptor], **stated)
        assert (reply.status, message in reply.json["error"]) == (400, True), reply.body
    assert ask(linear, get_bytes("/v2/systemsharedmemory/status")).json == []
    wait_for(lambda: count_descriptors() <= before + 3, "the end of its descriptors")


def test_memory_of_huge_pages_is_refused(linear: Running) -> None:
    """A hole in it ends the process that reads there, where the system has no such page left."""
    size = 2 << 20
    try:
        huge = memfd(size, flags=os.MFD_HUGETLB)
        with linear.connect() as client, huge as descriptor:
            reply = register(client, "huge", [descriptor], byte_size=64)
            assert (reply.status, "huge pages" in reply.json["error"]) == (400, True), reply.body
    except OSError as cause:
        pytest.skip(f"this system makes no memory of huge pages: {cause}")
    assert ask(linear, infer_bytes(X)).binary == Y


def test_hole_in_ordinary_memory_is_read_as_zeros(linear: Running) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    punch, size = 0x02 | 0x01, 1 << 16  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    with linear.connect() as client, memfd(size) as descriptor:
        os.pwrite(descriptor, X.tobytes() * 64, 0)
        assert register(client, "hole", [descriptor], byte_size=size).status == 200
        assert libc.fallocate(descriptor, punch, ctypes.c_long(0), ctypes.c_long(size)) == 0
        client.sendall(infer_in("hole"))
        assert Replies(client).next().json["outputs"][0]["data"] == [0.0, 0.0]


def test_descriptor_of_something_else_is_refused(linear: Running, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    with linear.connect() as client, path.open("r+b") as file, open("/dev/null", "rb") as null:  # noqa: PTH123
        for descriptor in (file.fileno(), null.fileno(), client.fileno()):
            assert register(client, "bad", [descriptor], byte_size=64).status == 400


def test_several_or_no_descriptors_leak_nothing(linear: Running) -> None:
    with linear.connect() as client, memfd(64) as descriptor:
        before = count_descriptors()
        assert register(client, "many", [descriptor] * 4, byte_size=64).status == 200
        assert ask(linear, post_bytes(f"{REGION}/many/unregister", b"")).status == 200
        assert register(client, "none", [], byte_size=64).status == 400
        wait_for(lambda: count_descriptors() <= before + 2, "the end of its descriptors")


def test_descriptors_on_other_requests_are_dropped(linear: Running) -> None:
    with linear.connect() as client, memfd(64) as descriptor:
        before = count_descriptors()
        for _ in range(50):
            socket.send_fds(client, [get_bytes("/v2/health/live")], [descriptor])
            assert Replies(client).next().status == 200
        assert count_descriptors() <= before + 2


def test_name_that_is_taken_is_refused(linear: Running) -> None:
    with linear.connect() as client, memfd(64) as descriptor, memfd(64) as other:
        assert register(client, "taken", [descriptor], byte_size=64).status == 200
        assert register(client, "taken", [other], byte_size=64).status == 400


def test_memory_that_is_registered_again_belongs_to_the_later_connection(linear: Running) -> None:
    with linear.connect() as later, memfd(64) as descriptor:
        with linear.connect() as client:
            assert register(client, "again", [descriptor], byte_size=64).status == 200
            assert register(later, "again", [descriptor], byte_size=64).status == 200
        wait_for(lambda: linear.service.http.connection_count == 1, "the end of the first connection")
        later.sendall(infer_in("again", offset=0, size=16))
        assert Replies(later).next().status == 200


@pytest.mark.parametrize("isolated", [False, True])
def test_call_that_timed_out_spoils_none_that_follows(
    isolated: bool, maker: PackageMaker, tmp_path: Path, gate: Gate
) -> None:
    maker.write(tmp_path / "linear.edgepkg")
    write_identity(maker, tmp_path / "echo.edgepkg", ["float32"])
    models = {"linear": ON_THREADS, "echo": ModelOptions(isolated=isolated)}
    files = PackageFiles([tmp_path / "linear.edgepkg", tmp_path / "echo.edgepkg"], maker.trust)
    with (
        running(make_config(tmp_path, models=models), files) as service,
        Client(service.socket_path) as client,
    ):
        x, echoed = client.shared((1, 4)), client.shared((1, 3))
        y = echoed[:, :2]
        call = client.bind("linear", {"x": x}, outputs={"y": y}, timeout_s=0.5)
        call()
        gate.shut()
        for session in gate.sessions:
            if session.inputs[0].name != "x":
                session.may_run.set()
        for _ in range(3):
            with pytest.raises((TransportError, RequestError), match=r"no answer|deadline"):
                call()
        given = np.full((1, 3), 7, np.float32)
        client.infer("echo", {"in_float32": given}, outputs={"out_float32": echoed})
        assert np.array_equal(echoed, given)
        gate.open()
        lane = service.service.registry.models.find("linear", None).own_lane
        wait_for(lambda: lane.is_idle, "the end of the calls that nobody waits for")
        assert np.array_equal(echoed, given)  # no late answer is written to memory that is in use again
        x[...] = X
        assert np.array_equal(call()["y"], X @ WEIGHT)


@pytest.mark.parametrize(
    ("offset", "size"), [(49, 16), (64, 16), (2**62, 16), (0, 15), (0, 17), (-1, 16), (1, 16)]
)
def test_place_that_is_not_in_the_region_is_refused(linear: Running, offset: int, size: int) -> None:
    with linear.connect() as client, memfd(64) as descriptor:
        assert register(client, "small", [descriptor], byte_size=64).status == 200
        client.sendall(infer_in("small", offset=offset, size=size))
        status = Replies(client).next().status
        assert status == (200 if (offset, size) == (1, 16) else 400)  # what is not aligned is copied


def test_output_that_does_not_fit_is_refused(linear: Running) -> None:
    with linear.connect() as client, memfd(64) as descriptor:
        assert register(client, "tight", [descriptor], byte_size=64).status == 200
        client.sendall(infer_in("tight", out=60))
        assert Replies(client).next().status == 400


def test_segments_by_key_are_off_unless_allowed(linear: Running) -> None:
    body = json.dumps({"key": "/some", "byte_size": 16}).encode()
    reply = ask(linear, post_bytes(f"{REGION}/r/register", body))
    assert (reply.status, "allows_posix" in reply.json["error"]) == (400, True)


@pytest.fixture(scope="module")
def open_to_posix(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = RegionLimits(max_regions=3, max_region_bytes=1000, allows_posix=True)
    with running_linear(maker, tmp_path_factory.mktemp("posix"), shared_memory=limits) as service:
        yield service


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path("/dev/shm") / f"edgekit-test-{secrets.token_hex(6)}"  # noqa: S108
    path.write_bytes(X.tobytes() + bytes(48))
    yield path
    path.unlink(missing_ok=True)


def register_key(service: Running, name: str, **stated: Any) -> Reply:
    return ask(service, post_bytes(f"{REGION}/{name}/register", json.dumps(stated).encode()))


def test_segment_by_key_is_read_and_written(open_to_posix: Running, segment: Path) -> None:
    assert register_key(open_to_posix, "p", key=f"/{segment.name}", byte_size=64).status == 200
    assert ask(open_to_posix, infer_in("p", out=16)).status == 200
    assert segment.read_bytes()[16:24] == Y
    assert ask(open_to_posix, post_bytes("/v2/systemsharedmemory/unregister", b"")).status == 200


def test_segment_that_shrinks_after_registering_is_refused_and_kills_nobody(
    open_to_posix: Running, segment: Path
) -> None:
    assert register_key(open_to_posix, "s", key=segment.name, byte_size=64).status == 200
    os.truncate(segment, 8)
    reply = ask(open_to_posix, infer_in("s"))
    assert (reply.status, "smaller" in reply.json["error"]) == (400, True)
    os.truncate(segment, 20)
    assert ask(open_to_posix, infer_in("s", out=16)).status == 400
    assert segment.stat().st_size == 20
    assert ask(open_to_posix, post_bytes(f"{REGION}/s/unregister", b"")).status == 200


@pytest.mark.parametrize("key", ["/../etc/passwd", "..", "a/b", "", "/nothing-here", "x" * 300, "\x00"])
def test_key_that_is_none_is_refused(open_to_posix: Running, key: str) -> None:
    assert register_key(open_to_posix, "k", key=key, byte_size=1).status == 400


def test_link_in_the_place_of_a_segment_is_refused(open_to_posix: Running, segment: Path) -> None:
    link = segment.with_name(f"{segment.name}-link")
    link.symlink_to("/etc/passwd")
    try:
        assert register_key(open_to_posix, "l", key=link.name, byte_size=1).status == 400
    finally:
        link.unlink()


def test_regions_beyond_the_limits_are_refused(open_to_posix: Running, segment: Path) -> None:
    assert [register_key(open_to_posix, f"n{i}", key=segment.name, byte_size=8).status for i in range(4)] == [
        *(200, 200, 200),
        400,
    ]
    assert ask(open_to_posix, post_bytes("/v2/systemsharedmemory/unregister", b"")).status == 200
    assert register_key(open_to_posix, "large", key=segment.name, byte_size=1001).status == 400


# It imports nothing of ours, which would take half a second.
ELSEWHERE = """
import fcntl, os, socket, sys
seals, unregister, head, body = map(bytes.fromhex, sys.argv[2:])
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
lines = client.makefile("rb")
def read_status():
    first, *fields = iter(lines.readline, b"\\r\\n")
    lines.read(sum(int(field[16:]) for field in fields if field.lower().startswith(b"content-length: ")))
    return int(first.split()[1])
descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
os.ftruncate(descriptor, 64)
fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals[0])
client.sendall(unregister)
print(read_status())
client.sendall(head)
assert read_status() == 100
socket.send_fds(client, [body], [descriptor])
print(read_status())
"""


def act_elsewhere(service: Running, name: str) -> list[int]:
    """Let another process unregister a region and register one; return both statuses."""
    unregister = post_bytes(f"{REGION}/{name}/unregister", b"")
    sent = bytes([SEALS]), unregister, *register_bytes("elsewhere", byte_size=64)
    command = [sys.executable, "-c", ELSEWHERE, service.socket_path, *(data.hex() for data in sent)]
    printed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    return [int(status) for status in printed.split()]


def test_region_of_another_process_is_not_unregistered(linear: Running) -> None:
    with linear.connect() as client, memfd(64) as descriptor:
        assert register(client, "mine", [descriptor], byte_size=64).status == 200
        assert act_elsewhere(linear, "mine") == [400, 200]
        assert ask(linear, get_bytes(f"{REGION}/mine/status")).status == 200


@pytest.mark.parametrize("limits", [RegionLimits(max_regions=8), RegionLimits(max_region_bytes=8 * 64)])
def test_process_that_registers_all_it_can_leaves_some_to_others(
    maker: PackageMaker, tmp_path: Path, limits: RegionLimits
) -> None:
    with (
        running_linear(maker, tmp_path, shared_memory=limits) as service,
        service.connect() as first,
        service.connect() as second,  # another connection is no other process
        memfd(64) as descriptor,
    ):
        statuses = [
            register(client, f"{number}", [descriptor], byte_size=64).status
            for number, client in enumerate([first, second] * 4)
        ]
        assert statuses == [200] * 6 + [400] * 2
        assert act_elsewhere(service, "none") == [200, 200]


def test_client_registers_again_on_a_new_connection(linear: Running) -> None:
    with Client(linear.socket_path) as client:
        x = client.shared((1, 4))
        x[...] = X
        assert np.array_equal(client.infer("linear", {"x": x})["y"], X @ WEIGHT)
        linear.call(lambda: [one.close() for one in list(linear.service.http._connections)])
        assert np.array_equal(client.infer("linear", {"x": x})["y"], X @ WEIGHT)


def test_error_of_the_service_reaches_the_caller(linear: Running) -> None:
    with Client(linear.socket_path) as client, pytest.raises(RequestError, match="FP32") as caught:
        client.infer("linear", {"x": X.astype(np.float64)})
    assert caught.value.status == 400
