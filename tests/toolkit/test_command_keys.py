"""`edgekit keys`: what the commands print and refuse; the keys themselves are tested in test_sign."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from tests.toolkit.command_run import invoker

from edgekit_cli.cli import main
from edgekit_cli.keys import command
from edgekit_runtime.errors import OutputError, SignatureError
from edgekit_runtime.trust.trust_store import read_public_key
from edgekit_toolkit.packaging.signing_keys import list_keys, load_signer


@pytest.fixture(autouse=True)
def keys(new_home: Path) -> Path:
    return new_home / "keys"


invoke = invoker(command)


def flat(result: Result) -> str:
    return " ".join(result.stdout.split())


def test_generate_makes_the_default_key_and_shows_its_id() -> None:
    result = invoke("generate")
    (key,) = list_keys()
    assert (key.name, key.signs_with, result.exit_code) == ("default", "file", 0)
    assert f"key id {key.key_id}" in result.stdout


def test_generate_with_json_prints_the_key() -> None:
    document = json.loads(invoke("generate", "release", "--json").stdout)
    assert document == {"name": "release", "key_id": load_signer("release").key_id, "signs_with": "file"}


def test_generate_does_not_replace_a_key() -> None:
    key_id = json.loads(invoke("generate", "--json").stdout)["key_id"]
    with pytest.raises(SignatureError, match="exists"):
        invoke("generate")
    assert load_signer().key_id == key_id


def test_list_without_keys_says_how_to_make_one(keys: Path) -> None:
    assert "`edgekit keys generate` makes one" in flat(invoke("list"))
    assert json.loads(invoke("list", "--json").stdout) == []


def test_list_shows_each_key_with_its_means_and_whole_id(keys: Path, tmp_path: Path) -> None:
    invoke("generate", "release")
    load_signer(folder=tmp_path)
    invoke("trust", tmp_path / "default.pub.pem", "vendor")
    result = invoke("list")
    release, vendor = list_keys()
    assert f"release signs with the private key here key id {release.key_id}" in flat(result)
    assert f"vendor is trusted; cannot sign here key id {vendor.key_id}" in flat(result)
    assert [key["name"] for key in json.loads(invoke("list", "--json").stdout)] == ["release", "vendor"]


def test_an_exported_key_is_trusted_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("generate", "release")
    exported = json.loads(invoke("export", "release", tmp_path / "release.pem", "--json").stdout)
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "elsewhere"))
    result = invoke("trust", tmp_path / "release.pem", "vendor")
    assert exported["key_id"] in result.stdout
    assert [(key.name, key.key_id, key.signs_with) for key in list_keys()] == [
        ("vendor", exported["key_id"], None)
    ]


def test_export_never_replaces_a_file_such_as_the_private_key(keys: Path) -> None:
    invoke("generate", "release")
    private = (keys / "release.pem").read_bytes()
    with pytest.raises(OutputError, match="exists"):
        invoke("export", "release", keys / "release.pem")
    assert (keys / "release.pem").read_bytes() == private


def test_export_of_a_missing_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SignatureError, match=r"cannot read public key .*release\.pub\.pem"):
        invoke("export", "release", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_trust_of_a_private_key_is_refused_without_showing_it(
    keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invoke("generate", "release")
    assert main(["keys", "trust", str(keys / "release.pem"), "vendor", "--json"]) == SignatureError.exit_code
    output = capsys.readouterr()
    assert json.loads(output.out)["error"]["type"] == "SignatureError"
    secret = (keys / "release.pem").read_text().splitlines()[1]
    assert secret not in output.out + output.err


def test_register_names_where_the_key_signs(tmp_path: Path) -> None:
    signer = load_signer(folder=tmp_path)
    uri = f"file2:{tmp_path / 'default.pem'}"
    document = json.loads(invoke("register", "hardware", uri, tmp_path / "default.pub.pem", "--json").stdout)
    assert document == {"name": "hardware", "key_id": signer.key_id, "signs_with": uri}
    assert load_signer("hardware").key_id == signer.key_id
    assert f"hardware signs with {uri.split('/')[0]}" in flat(invoke("list"))


def test_register_of_a_uri_that_does_not_open_is_refused(tmp_path: Path) -> None:
    load_signer(folder=tmp_path)
    with pytest.raises(SignatureError, match="cannot sign by"):
        invoke("register", "hardware", "nowhere:x", tmp_path / "default.pub.pem")
    assert list_keys() == ()


def test_no_command_prints_a_private_key(keys: Path, tmp_path: Path) -> None:
    outputs = [
        invoke(*arguments).output
        for arguments in (
            ("generate", "release"),
            ("list",),
            ("list", "--json"),
            ("export", "release", tmp_path / "release.pem"),
            ("trust", tmp_path / "release.pem", "same"),
        )
    ]
    secret = (keys / "release.pem").read_text().splitlines()[1]
    assert not [text for text in outputs if "PRIVATE" in text or secret in text]
    assert read_public_key(tmp_path / "release.pem").keyid == load_signer("release").key_id


def test_without_a_subcommand_the_help_is_shown() -> None:
    result = invoke()
    assert result.exit_code == 2
    for name in ("generate", "list", "export", "trust", "register"):
        assert name in result.output


def test_subcommands_are_completed_through_the_lazy_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_EDGEKIT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "edgekit keys gen")
    monkeypatch.setenv("COMP_CWORD", "2")
    main([])
    assert capsys.readouterr().out == "plain,generate\n"
