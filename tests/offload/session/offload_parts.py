"""Packages with cut tables, and sessions of them against a real service."""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import WEIGHT, PackageMaker

from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_options import OffloadOptions, write_offload_options
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.manifest_entries import Artifact, BackendChoice
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.sessions.session import Session

X = np.array([[1, 2, 3, 4]], np.float32)
Y = X @ WEIGHT

# The runtime corrects costs by at most a factor of 100, so this device always seems to take a second.
LOCAL = OffloadPlan("local", PlanCosts(100.0))
RAW = OffloadPlan("raw", PlanCosts(0.0, 1e-4, 16.0, 8.0), tail="linear")


def write_offloaded(
    maker: PackageMaker, path: Path, *plans: OffloadPlan, version: str = "1.0.0", **changes: Any
) -> None:
    """Write `linear` with a cut table of `plans`."""
    table = CutTable(plans, **changes)
    contents = {**maker.artifacts, "cut-table.json": json.dumps(to_plain(table)).encode()}
    roles = {**maker.roles, "cut-table.json": "cut-table"}
    choice = BackendChoice(
        "offload", "model.onnx", {"threads": 1}, BackendChoice("ort", "model.onnx", {"threads": 1})
    )
    artifacts = tuple(
        Artifact(name, len(data), hashlib.sha256(data).hexdigest(), roles[name])
        for name, data in sorted(contents.items())
    )
    manifest = dataclasses.replace(maker.manifest(version=version), artifacts=artifacts, backend=choice)
    write_package(path, manifest, contents, maker.signer)


def set_server(folder: Path, monkeypatch: pytest.MonkeyPatch, server: str, **options: Any) -> None:
    """Make this device use a server, with folders of its own for options and status."""
    monkeypatch.setenv("EDGEKIT_HOME", str(folder / "home"))
    monkeypatch.setenv("EDGEKIT_CACHE", str(folder / "cache"))
    write_offload_options(OffloadOptions(server, **options))


@contextlib.contextmanager
def offloading(maker: PackageMaker, path: Path) -> Iterator[RemoteSession]:
    """Open a package that was written by `write_offloaded`."""
    session: Session = open_session(path, trust=maker.trust)
    assert isinstance(session, RemoteSession)
    try:
        yield session
    finally:
        session.close()


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait for what another thread does; how long it takes decides nothing."""
    until_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until_s, what
        time.sleep(0.01)
