"""One service of the model `linear` for the tests of a file, models that hang, and what services need."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import PackageMaker, maker, other_signer
from tests.runtime.slot_cases import write_keys
from tests.service.gates import Gate, Gated
from tests.service.serve_parts import TOKEN, write_certificate
from tests.service.service_parts import Running, running_linear

from edgekit_runtime.service.serving import loader

__all__ = ["maker", "other_signer"]


@pytest.fixture(scope="module")
def linear(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_linear(maker, tmp_path_factory.mktemp("s")) as service:
        yield service


@pytest.fixture(scope="module", autouse=True)
def _copies(copied_children: None) -> None:
    """Each file has copies: services on threads start many processes."""


@pytest.fixture(scope="module")
def imported_opencv() -> None:
    """Import OpenCV if it is there, and restore `LD_LIBRARY_PATH`, so that capture processes are copies."""
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
        patch.setenv("LD_LIBRARY_PATH", "")
        import cv2  # noqa: F401


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Stands before every session that is opened from now on."""
    opened, made = loader.open_preferred, Gate()

    def open_gated(*args: Any) -> Any:
        variant, session = opened(*args)
        made.sessions.append(Gated(session))
        return variant, made.sessions[-1]

    monkeypatch.setattr(loader, "open_preferred", open_gated)
    yield made
    made.open()


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """An empty folder for packages."""
    folder = tmp_path / "packages"
    folder.mkdir()
    return folder


@pytest.fixture
def folder(maker: PackageMaker, tmp_path: Path) -> Path:
    """A folder with the package and the key that is trusted."""
    maker.write(tmp_path / "linear.edgepkg")
    write_keys(tmp_path / "keys")
    return tmp_path


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Paths of a certificate for 127.0.0.1 and of its key."""
    return write_certificate(tmp_path)
