"""Backends of third parties."""

import importlib
import sys
from pathlib import Path

import pytest

from edgekit_runtime.system.engines import ENTRY_POINT_GROUP


def install_backend(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Put a distribution with the backend `third` on the path."""
    information = folder / "third-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: third\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\nthird = third_backend:open_third\n"
    )
    (folder / "third_backend.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "third_backend", raising=False)
