"""Small promises of the protocol: names of platforms and extensions, null for an id, rows in statistics."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import (
    Running,
    X,
    ask,
    get_bytes,
    make_config,
    post_bytes,
    running,
    running_linear,
)
from tests.service.wiring_parts import write

from edgekit_runtime.errors import ManifestError
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.options.resources import RegionLimits
from edgekit_runtime.slots import Slots

INFER = "/v2/models/linear/infer"


def request(**changes: Any) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": X.ravel().tolist()}
    return json.dumps({"inputs": [tensor], **changes}).encode()


def extensions(service: Running) -> list[str]:
    found: list[str] = ask(service, get_bytes("/v2")).json["extensions"]
    return found


def test_id_that_is_null_is_none(linear: Running) -> None:
    reply = ask(linear, post_bytes(INFER, request(id=None)))
    assert (reply.status, "id" in reply.json) == (200, False)


@pytest.mark.parametrize("stated", [0, False, []])
def test_id_that_is_no_text_is_refused(linear: Running, stated: Any) -> None:
    assert ask(linear, post_bytes(INFER, request(id=stated))).status == 400


def test_platform_is_a_name_of_the_protocol(linear: Running) -> None:
    assert ask(linear, get_bytes("/v2/models/linear")).json["platform"] == "onnx_onnxv1"


@pytest.mark.parametrize("allows_posix", [True, False])
def test_segments_by_key_are_advertised_where_they_are_taken(
    maker: PackageMaker, tmp_path: Path, allows_posix: bool
) -> None:
    limits = RegionLimits(allows_posix=allows_posix)
    with running_linear(maker, tmp_path, shared_memory=limits) as service:
        assert ("system_shared_memory" in extensions(service)) == allows_posix


def test_model_is_not_called_as_the_address_of_the_statistics(maker: PackageMaker) -> None:
    with pytest.raises(ManifestError, match="choose another name"):
        maker.manifest(name="stats")


def test_linked_folder_of_a_model_is_said_and_the_service_is_not_ready(
    maker: PackageMaker, tmp_path: Path
) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(write(maker, tmp_path, "1.0.0"))
    folder = slots.folder / "models" / "linear"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with running(make_config(tmp_path), InstalledModels(slots)) as service:
        (line,) = ask(service, post_bytes("/v2/repository/index", b"")).json
        assert (line["name"], line["state"]) == ("linear", "UNAVAILABLE")
        assert "is a link or no folder" in line["reason"]
        assert ask(service, get_bytes("/v2/health/ready")).status == 503


def test_link_that_cannot_be_followed_hides_no_other_model(maker: PackageMaker, tmp_path: Path) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(write(maker, tmp_path, "1.0.0"))
    (slots.folder / "models" / "gone").symlink_to(tmp_path / "nowhere")
    assert slots.models() == ("linear",)
