"""Installed versions with a cut table: what is wrong with the server or its options is no fault of theirs."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.offload.session.hostile_server import HostileServer, tensor_reply
from tests.offload.session.offload_parts import LOCAL, RAW, X, set_server, write_offloaded
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Running, ask, infer_bytes, make_config, running
from tests.service.wiring_parts import load, served_version

from edgekit_runtime.offload.offload_options import find_options_file
from edgekit_runtime.offload.offload_plan import OffloadPlan
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.slots import Slots


def install(maker: PackageMaker, folder: Path, *plans: OffloadPlan) -> Slots:
    """Install 0.9.0 without plans, and 1.0.0 with them."""
    slots = Slots(folder / "state", maker.trust)
    maker.write(folder / "old.edgepkg", version="0.9.0")
    write_offloaded(maker, folder / "new.edgepkg", *plans)
    for name in ("old", "new"):
        slots.install(folder / f"{name}.edgepkg")
    return slots


def find_rejected(slots: Slots) -> list[str]:
    return [one.version for one in slots.load("linear").state.rejected]


def spoil_options(folder: Path, fault: str) -> None:
    """Make the options of this device unusable."""
    path = find_options_file()
    if fault == "malformed":
        path.write_text("{")
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), "token_file": str(folder / "none")}))


@pytest.mark.parametrize("fault", ["malformed", "no token"])
def test_options_that_cannot_be_used_leave_the_version_in_use_on_this_device(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    slots = install(maker, tmp_path, LOCAL, RAW)
    set_server(tmp_path, monkeypatch, "127.0.0.1:9")
    spoil_options(tmp_path, fault)
    with running(make_config(tmp_path), InstalledModels(slots)) as service:
        assert served_version(service) == "1.0.0"
    assert find_rejected(slots) == []


def infer(service: Running) -> int:
    return ask(service, infer_bytes(X)).status


@pytest.mark.parametrize("fault", ["malformed", "no token", "server away"])
def test_version_that_needs_the_server_waits_until_it_can_be_used(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    slots, server = install(maker, tmp_path, RAW), HostileServer()
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    if fault == "server away":
        server.misbehave = lambda *_: None  # ends each connection
    else:
        spoil_options(tmp_path, fault)
    with running(make_config(tmp_path), InstalledModels(slots)) as service:
        assert infer(service) == 503
        assert find_rejected(slots) == []
        server.misbehave = None
        set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
        assert infer(service) == 200
        assert served_version(service) == "1.0.0"
    server.close()


def test_version_whose_server_computes_something_else_is_rejected(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, server = install(maker, tmp_path, RAW), HostileServer()
    server.misbehave = lambda _server, _client, right: tensor_reply(
        (np.frombuffer(right, np.float32) + 1).tobytes()
    )
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{server.port}")
    with running(make_config(tmp_path), InstalledModels(slots)) as service:
        assert load(service).status == 200
        assert served_version(service) == "0.9.0"
    assert find_rejected(slots) == ["1.0.0"]
    server.close()
