"""`edgekit offload plan --server URL`: a server that is measured over its link."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.runtime.conftest import PackageMaker
from tests.service.serve_parts import served

from edgekit_cli.cli import cli
from edgekit_offload.planning.result import PlanningResult
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import ConfigError, CutError, TransportError


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


@pytest.mark.parametrize("words", [(), ("--token-file", "token")])
@pytest.mark.parametrize("command", ["plan", "profile"])
def test_plain_http_to_another_machine_is_refused_before_anything_is_measured(
    maker: PackageMaker, folder: Path, command: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    Path("linear.onnx").write_bytes(maker.artifacts["model.onnx"])
    Path("token").write_text("abcdefgh" * 4)
    # A machine that does not exist shows that the check comes first.
    machine = ("--device", "ssh:machine.invalid") if command == "plan" else ("--on", "ssh:machine.invalid")
    arguments = ["offload", command, "linear.onnx", *machine, "--server", "http://192.0.2.1:8000", *words]
    with pytest.raises(ConfigError, match="plain HTTP to another machine"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)


def test_server_that_wants_a_token_is_said_before_anything_is_measured(
    maker: PackageMaker, folder: Path
) -> None:
    model = folder / "linear.onnx"
    model.write_bytes(maker.artifacts["model.onnx"])
    (folder / "token").write_text("abcdefgh" * 4)
    (folder / "token").chmod(0o600)
    (folder / "service.toml").write_text('[listen]\ntoken_file = "token"\n')
    with served(folder, "--config", "service.toml") as service:
        arguments = ["offload", "plan", str(model), "--device", "ssh:machine.invalid"]
        arguments += ["--server", f"http://127.0.0.1:{service.tcp_port}"]
        with pytest.raises(CutError, match="--token-file"):
            CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)
