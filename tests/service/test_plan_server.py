"""`edgekit offload plan --server URL`: a server that is measured over its link."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.runtime.conftest import PackageMaker
from tests.service.serve_parts import served

from edgekit_offload.planning.result import PlanningResult
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import CutError, TransportError
from edgekit_toolkit.cli import cli


def run_plan(model: Path, server: str, folder: Path) -> PlanningResult:
    options = ("--device", "local", "--seconds", "0.2", "--bandwidth", "0.5", "--rtt", "123")
    arguments = ["offload", "plan", model, *options, "--server", server, "-o", folder]
    CliRunner().invoke(cli, [str(one) for one in arguments], catch_exceptions=False, standalone_mode=False)
    return from_plain(PlanningResult, json.loads((folder / f"{model.stem}.plan.json").read_text()))


def test_server_of_a_url_is_modelled_and_its_link_is_in_the_table(maker: PackageMaker, folder: Path) -> None:
    model = folder / "linear.onnx"
    model.write_bytes(maker.artifacts["model.onnx"])
    with served(folder) as service:
        url = f"http://127.0.0.1:{service.tcp_port}"
        result = run_plan(model, url, folder / "plans")
        other = model.rename(folder / "another.onnx")
        with pytest.raises(CutError, match="another"):
            run_plan(other, url, folder / "plans")
    assert (result.server.label, url in result.server.name) == ("modelled", True)
    assert any(url in one and "modelled" in one and "setting of the table" in one for one in result.warnings)
    assert len(result.bandwidths_mbit_s) == len(result.rtts_ms) == 2  # the stated one, and the link's
    assert 123.0 in result.rtts_ms
    with pytest.raises(TransportError):
        run_plan(other, url, folder / "plans")
