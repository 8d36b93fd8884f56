"""A second `edgekit-device serve` beside one that runs: it refuses, and leaves what is not its own."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.descriptor_parts import count_descriptors
from tests.runtime.conftest import PackageMaker
from tests.runtime.slot_cases import write_keys
from tests.service.serve_parts import Served, served
from tests.service.service_parts import Replies, X, Y, infer_bytes, make_config, running
from tests.waiting import SHARED_S

from edgekit_runtime.errors import SlotError, TransportError
from edgekit_runtime.service.http.listeners import SocketFile, listen_unix
from edgekit_runtime.service.models.file_source import PackageFiles


def is_answered(service: Served) -> bool:
    with service.connect() as client:
        client.sendall(infer_bytes(X))
        return Replies(client).next().binary == Y


@pytest.fixture(scope="module")
def home(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and the key that is trusted."""
    home = tmp_path_factory.mktemp("s")
    maker.write(home / "linear.edgepkg")
    write_keys(home / "keys")
    return home


@pytest.fixture(scope="module")
def first(home: Path) -> Iterator[Served]:
    with served(home, installed=True, limit_s=SHARED_S) as service:
        yield service


def test_second_service_names_the_first_and_leaves_its_socket(first: Served, home: Path) -> None:
    code, printed = Served(home).end_by_itself()
    assert (code, "another service" in printed) == (TransportError.exit_code, True), printed
    assert f"process {first.process.pid}" in printed, printed
    assert str(first.socket_path) in printed
    assert is_answered(first)


def test_second_service_that_finds_its_port_taken_leaves_no_socket(first: Served, home: Path) -> None:
    second = Served(home, "--unix-socket", str(home / "other.sock"), "--port", first.tcp_port)
    code, printed = second.end_by_itself()
    assert (code, "choose another port" in printed) == (TransportError.exit_code, True), printed
    assert not (home / "other.sock").exists()
    assert is_answered(first)


def test_stop_leaves_a_socket_that_another_process_bound_at_its_path(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    path = Path(config.listen.unix_socket)
    with running(config, PackageFiles([], None)):  # type: ignore[arg-type]  # nothing to verify
        path.unlink()
        other = listen_unix(path)
    with other:
        assert path.is_socket()


def test_listener_that_is_closed_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = count_descriptors()
    listen_unix(tmp_path / "a.sock").close()
    assert count_descriptors() == before


def test_socket_that_is_removed_leaves_no_descriptor_open(tmp_path: Path) -> None:
    with listen_unix(tmp_path / "a.sock"):
        file = SocketFile.find(tmp_path / "a.sock")
        before = count_descriptors()
        file.remove()
        assert (count_descriptors(), file.path.exists()) == (before, False)


def test_listener_that_is_refused_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "a.sock").write_bytes(b"")
    before = count_descriptors()
    with pytest.raises(TransportError, match="is no socket"):
        listen_unix(tmp_path / "a.sock")
    assert count_descriptors() == before


def test_second_service_on_one_state_folder_refuses_also_at_another_socket(first: Served, home: Path) -> None:
    second = Served(home, "--unix-socket", str(home / "other.sock"), installed=True)
    code, printed = second.end_by_itself()
    assert code == SlotError.exit_code
    assert f"process {first.process.pid}" in printed, printed
    assert str(home / "state") in printed
    assert not (home / "other.sock").exists()
    assert is_answered(first)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_state_folder_and_socket_of_a_service_that_ended_are_free(folder: Path, number: int) -> None:
    with served(folder, installed=True) as first:
        first.end(number)
        assert first.socket_path.exists() == (number == signal.SIGKILL)
    with served(folder, installed=True) as second:
        assert is_answered(second)
