"""A session with a server: against the real service."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
from tests.offload.session.offload_parts import (
    LOCAL,
    RAW,
    X,
    Y,
    offloading,
    set_server,
    wait_until,
    write_offloaded,
)
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.service_parts import running_linear

from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.golden import GoldenRows, RowsOutput, resample
from edgekit_runtime.sessions.backends import open_session


def test_without_server_the_plain_local_session_is_returned(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    session = open_session(path, trust=maker.trust)
    assert not isinstance(session, RemoteSession)
    np.testing.assert_allclose(session.run({"x": X})["y"], Y)
    session.close()


def test_proved_server_that_is_faster_takes_over(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    with running_linear(maker, tmp_path) as service:
        set_server(tmp_path, monkeypatch, f"127.0.0.1:{service.port}")
        with offloading(maker, path) as session:
            np.testing.assert_allclose(session.run({"x": X})["y"], Y)
            wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
            before = session.counts.remote + session.counts.hedged  # the proof may come before any request
            np.testing.assert_allclose(session.run({"x": X})["y"], Y)
            assert session.counts.remote + session.counts.hedged == before + 1
            assert "Mbit/s" in session.decision().reason


def test_server_is_proved_by_a_package_with_several_golden_rows(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds, plain, path = (4, 9), maker.manifest().golden, tmp_path / "offloaded.edgepkg"
    first = {"x": plain.inputs[0].decode(maker.artifacts["golden/x.bin"])}
    expected = np.concatenate([resample(first, seed)["x"] @ WEIGHT for seed in seeds])
    maker.artifacts["golden/rows.bin"], maker.roles["golden/rows.bin"] = expected.tobytes(), "golden"
    output = RowsOutput(name="y", path="golden/rows.bin", atol=(1e-5, 1e-5))
    golden = dataclasses.replace(plain, rows=GoldenRows(seeds, (output,)))
    monkeypatch.setattr(maker, "manifest", functools.partial(maker.manifest, golden=golden))
    write_offloaded(maker, path, LOCAL, RAW)
    with running_linear(maker, tmp_path) as service:
        set_server(tmp_path, monkeypatch, f"127.0.0.1:{service.port}")
        with offloading(maker, path) as session:
            wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")


def test_several_rows_take_a_plan_that_carries_them_where_the_device_cannot_run_the_model(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    slow = dataclasses.replace(RAW, costs=dataclasses.replace(RAW.costs, server_s=1.0))
    jpeg = dataclasses.replace(RAW, name="jpeg", media={"x": "jpeg:90"})
    write_offloaded(maker, path, jpeg, slow)
    with running_linear(maker, tmp_path) as service:
        set_server(tmp_path, monkeypatch, f"127.0.0.1:{service.port}")
        with offloading(maker, path) as session:
            wait_until(lambda: session.decision().plan.name == "jpeg", "the file is not sent")
            rows = np.concatenate([X, 2 * X, 3 * X])
            np.testing.assert_allclose(session.run({"x": rows})["y"], np.concatenate([Y, 2 * Y, 3 * Y]))
            predicted_s = session.decision(rows=3).predicted_s
            assert predicted_s > 3.0  # three times the time of one row


def test_server_that_ends_costs_no_answer(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "offloaded.edgepkg"
    write_offloaded(maker, path, LOCAL, RAW)
    with contextlib.ExitStack() as server:
        service = server.enter_context(running_linear(maker, tmp_path))
        set_server(tmp_path, monkeypatch, f"127.0.0.1:{service.port}")
        with offloading(maker, path) as session:
            wait_until(lambda: session.decision().plan.name == "raw", "the server is not used")
            np.testing.assert_allclose(session.run({"x": X})["y"], Y)
            server.close()
            for _ in range(5):
                np.testing.assert_allclose(session.run({"x": X})["y"], Y)
            assert session.counts.failed + session.counts.hedged >= 1
            assert session.decision().plan.name == "local"
