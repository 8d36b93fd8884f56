from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hil.ssh_board import SshBoard, run_ssh_board


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshBoard]:
    """An OpenSSH server on loopback, the stand-in for a board."""
    with run_ssh_board(tmp_path_factory.mktemp("board")) as board:
        yield board


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user with a configuration of its own."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path
