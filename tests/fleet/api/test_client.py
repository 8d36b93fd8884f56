"""`edgekit fleet --server URL`: the same commands as on a folder, over HTTP."""

import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.api.conftest import Api
from tests.runtime.conftest import PackageMaker
from tests.runtime.conftest import maker as maker  # a fixture
from tests.runtime.slot_cases import write_keys
from tests.waiting import wait_for

from edgekit_cli.cli import main
from edgekit_fleet.api.client import drop_unset
from edgekit_fleet.api.endpoints.access import AddToken
from edgekit_fleet.operations.rollouts import RolloutLimits
from edgekit_fleet.store.tables import RolloutRow
from edgekit_runtime.dataclass_json import to_plain


class Shell:
    """Runs commands on the fleet of a folder, or on its server, and returns what they print as JSON."""

    def __init__(self, api: Api, capsys: pytest.CaptureFixture[str], token_file: Path) -> None:
        self.api, self.capsys = api, capsys
        token_file.write_text(api.token + "\n")
        self.server = ("--server", api.url, "--token-file", str(token_file))

    def there(self, *arguments: str | Path, code: int = 0) -> Any:
        return self._run([*self.server, *map(str, arguments), "--json"], code)

    def here(self, *arguments: str | Path) -> Any:
        return self._run([*map(str, arguments), "--folder", str(self.api.folder.path), "--json"], 0)

    def _run(self, arguments: list[str], code: int) -> Any:
        got = main(["fleet", *arguments])
        printed = self.capsys.readouterr()
        assert got == code, printed.err
        return json.loads(printed.out.splitlines()[-1] if code else printed.out)


@pytest.fixture
def shell(api: Api, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    return Shell(api, capsys, tmp_path / "token")


@pytest.mark.parametrize(
    "command",
    [
        ("devices", "site=lyon"),
        ("why", "d1"),
        ("device", "d1"),
        ("release", "--list"),
        ("rollout", "list"),
        ("rollout", "plan", "2026-11-16.1", "--to", "all"),
        ("user", "list"),
        ("webhook", "list"),
    ],
)
def test_command_prints_the_same_from_afar(shell: Shell, command: tuple[str, ...]):
    assert shell.there(*command) == shell.here(*command)


def test_audit_from_afar_is_complete(shell: Shell):
    there = shell.there("audit", "--limit", "2000")
    assert there == shell.here("audit", "--limit", "2000")
    assert [each["number"] for each in there] == list(range(1, len(there) + 1))
    assert shell.there("audit", "--limit", "3") == there[-3:]


def test_job_releases_rolls_out_waits_and_rolls_back(
    shell: Shell, maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    write_keys(tmp_path / "keys")
    package = tmp_path / "linear.edgepkg"
    maker.write(package, target="rpi5")
    shell.there("tag", "d1", "site=oslo")
    (release,) = shell.there("release", package, "--name", "v2")
    assert release["packages"][0][2] == "rpi5"
    (rollout,) = shell.there("rollout", "start", "v2", "--to", "site=oslo", "--name", "a", "--soak", "0")
    assert rollout["members"] == {"waiting": 1}
    shell.there("rollback", "a", "--note", "customers complain")
    with shell.api.store.transaction() as session:
        session.get(RolloutRow, "a").state = "aborted"
    assert main(["fleet", *shell.server, "rollout", "watch", "a"]) == 1
    assert "a: aborted" in shell.capsys.readouterr().out
    actions = {each["action"]: each["actor"] for each in shell.here("audit", "--limit", "20")}
    assert actions["device.tag"] == actions["release.make"] == "token:tests"


@pytest.mark.parametrize(("state", "goes_back"), [("succeeded", False), ("paused", True)])
def test_job_of_the_docs_with_curl_works_as_written(
    api: Api,
    maker: PackageMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    goes_back: bool,
):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    text = (Path(__file__).parents[3] / "docs/reference/fleet-api.md").read_text()
    script = text.partition("With curl:")[2].partition("```sh\n")[2].partition("```")[0]
    script = script.replace("https://fleet.example:8444", api.url).replace("--cacert authority.crt", "")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    monkeypatch.setenv("EDGEKIT_FLEET_TOKEN", api.token)
    write_keys(tmp_path / "keys")
    maker.write(tmp_path / "detector-1.5.0-rpi5.edgepkg", name="detector", version="1.5.0", target="rpi5")
    (tmp_path / "job").write_text(script)
    job = subprocess.Popen(["bash", "-e", "job"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    def has_begun() -> bool:
        with api.store.transaction() as session:
            row = session.get(RolloutRow, "a")
            if row is not None:
                row.state = state
            return row is not None or job.poll() is not None

    with job:
        wait_for(has_begun, "the rollout")
        printed = job.communicate(timeout=60)[0]
    assert job.returncode == 0, printed
    assert ("ordered the way back" in api.get("/rollouts/a").json["because"]) == goes_back


def test_users_and_tokens_are_made_from_afar(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("correct horse\n"))
    assert [each["name"] for each in shell.there("user", "add", "ann", "--role", "admin")] == ["ann"]
    made = shell.there("token", "add", "ci", "--scope", "read", "--days", "1")
    assert shell.api.get("/devices?limit=1", made["token"]).status == 200
    shell.there("token", "revoke", "ci")
    assert shell.api.get("/devices?limit=1", made["token"]).status == 401


def test_refusal_of_the_server_is_an_error_with_its_words(shell: Shell):
    error = shell.there("why", "nobody", code=15)["error"]
    assert error["message"].startswith("no device 'nobody' is enrolled")


def test_answer_of_a_newer_server_is_understood(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    def add_fields(record: Any) -> Any:
        plain = to_plain(record)
        return {**plain, "newer": [1], "items": [{**each, "newer": {}} for each in plain["items"]]}

    known = shell.there("devices")
    monkeypatch.setattr("edgekit_fleet.api.routes.to_plain", add_fields)
    assert shell.there("devices") == known


def test_command_of_the_own_machine_refuses_a_server(shell: Shell, capsys: pytest.CaptureFixture[str]):
    assert main(["fleet", *shell.server, "backup", "x"]) == 2
    assert "works on the fleet's own machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "code"),
    [("http://example.com", 17), ("ftp://x", 17), ("https://h:99999", 17), ("http://127.0.0.1:1", 16)],
)
def test_server_that_cannot_be_used_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str, code: int
):
    monkeypatch.setenv("EDGEKIT_FLEET_TOKEN", "ekt_x")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert main(["fleet", "--server", url, "devices"]) == code


def test_server_without_a_token_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("EDGEKIT_FLEET_TOKEN", raising=False)
    assert main(["fleet", "--server", "http://127.0.0.1:1", "devices"]) == 2
    assert "--token-file" in capsys.readouterr().err


def test_null_that_is_no_default_is_sent_and_one_that_is_a_default_is_not():
    endless = AddToken(name="ci", scopes=("read",), days=None)
    assert drop_unset(endless, to_plain(endless))["days"] is None
    limits = RolloutLimits(max_latency_ratio=1.5)
    assert drop_unset(limits, to_plain(limits)) == {"max_latency_ratio": 1.5}
