"""The commands that messages name: for the Python that runs this, and never with a folder of this machine."""

import sys
from pathlib import Path

import pytest

from edgekit_runtime.system import install_hint

ROOT = Path(install_hint.__file__).parents[3]


def test_checkout_names_the_python_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert install_hint.install_command("litert") == (
        ".venv/bin/python -m pip install -e '.[litert]' (in the checkout)"
    )
    monkeypatch.setattr(sys, "prefix", "/elsewhere")
    assert install_hint.install_command("litert") == "python -m pip install -e '.[litert]' (in the checkout)"


def test_install_names_the_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", "/elsewhere")
    assert install_hint.install_command("device", tmp_path) == "python -m pip install 'edgekit[device]'"


def test_environment_below_the_working_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.chdir(tmp_path)
    assert install_hint.python_here() == "env/bin/python"


def test_removed_working_folder_leaves_the_general_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", "/elsewhere")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert install_hint.python_here() == "python"
