"""Backends of third parties."""

import importlib
import sys
from pathlib import Path

import pytest

from edgekit_runtime.system.engines import ENTRY_POINT_GROUP

_RECORD = """
from edgekit_runtime.sessions import Engine, Installation
THIRD = Engine(
    name="third",
    title="third",
    installation=Installation(modules=("third_backend",), distributions=("third",)),
    open=open_third,
)
"""


def install_backend(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Put a distribution with the engine `third` on the path; `source` defines `open_third`."""
    information = folder / "third-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nthird = third_backend:THIRD\n")
    (folder / "third_backend.py").write_text(source + _RECORD)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "third_backend", raising=False)
