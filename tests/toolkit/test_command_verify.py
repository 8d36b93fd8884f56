"""`edgekit verify`: exit code 0 only for a package that a trusted key signed and that works here."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.toolkit.command_run import invoker
from tests.toolkit.package_sample import write_linear

from edgekit_cli.cli import main
from edgekit_cli.verify import command
from edgekit_runtime.errors import BackendError, DigestError, PackageError, SignatureError
from edgekit_runtime.package.manifest_entries import BackendChoice
from edgekit_toolkit.packaging.evidence import evidence_path, write_evidence
from edgekit_toolkit.packaging.signing_keys import export_key, load_signer

pytestmark = pytest.mark.usefixtures("new_home")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_linear(tmp_path / "linear-1.0.0-x86-64.edgepkg")


@pytest.fixture
def public_key(path: Path, tmp_path: Path, new_home: Path) -> Path:
    """The key of the package as a file, and no longer in the folder of trusted keys."""
    export_key("default", tmp_path / "vendor.pem")
    shutil.rmtree(new_home)
    return tmp_path / "vendor.pem"


invoke = invoker(command)


def test_a_right_package_passes_each_check(path: Path) -> None:
    result = invoke(path)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert [line for line in lines if not line.startswith(("ok ", "   "))] == []
    for check in ("form and digests", "signature", "self-test"):
        assert f"ok {check}: " in result.stdout


def test_json_names_key_and_self_test(path: Path) -> None:
    document = json.loads(invoke(path, "--json").stdout)
    assert (document["name"], document["key_id"]) == ("linear", load_signer().key_id)
    (check,) = document["self_test"]
    assert (check["name"], check["passed"], check["wrong_count"]) == ("y", True, 0)
    assert document["evidence"] is None


def test_the_self_test_can_be_left_out(path: Path) -> None:
    assert "self-test" not in invoke(path, "--no-self-test").stdout
    assert json.loads(invoke(path, "--no-self-test", "--json").stdout)["self_test"] is None


def test_a_package_by_an_unknown_key_is_refused_with_its_id(path: Path, tmp_path: Path) -> None:
    stranger = load_signer(folder=tmp_path / "stranger")
    write_linear(path, sign=stranger)
    with pytest.raises(SignatureError) as caught:
        invoke(path)
    assert caught.value.key_id == stranger.key_id


def test_a_given_key_is_trusted(path: Path, public_key: Path) -> None:
    assert invoke(path, "--key", public_key).exit_code == 0


def test_a_given_key_replaces_the_folder(path: Path, tmp_path: Path) -> None:
    load_signer(folder=tmp_path / "other")
    export_key("default", tmp_path / "other.pem", tmp_path / "other")
    with pytest.raises(SignatureError, match="trusted are"):
        invoke(path, "--key", tmp_path / "other.pem")


def test_a_given_folder_of_keys_is_trusted_beside_given_keys(
    path: Path, public_key: Path, tmp_path: Path
) -> None:
    load_signer(folder=tmp_path / "other")
    assert invoke(path, "--keys", tmp_path / "other", "--key", public_key).exit_code == 0
    folder = tmp_path / "keys"
    folder.mkdir()
    public_key.rename(folder / "vendor.pub.pem")
    assert invoke(path, "--keys", folder).exit_code == 0


def test_a_missing_folder_of_keys_is_a_usage_error(path: Path, tmp_path: Path) -> None:
    assert invoke(path, "--keys", tmp_path / "missing").exit_code == 2


def test_a_key_file_that_is_no_key_is_refused(path: Path) -> None:
    with pytest.raises(SignatureError, match="not a PEM public key"):
        invoke(path, "--key", path)


@pytest.mark.parametrize("options", [[], ["--no-self-test"]])
def test_a_changed_artifact_is_refused(options: list[str], path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"no\nyes\n")] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError, match=r"labels\.txt"):
        invoke(path, *options)


def test_a_missing_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="No such file"):
        invoke(tmp_path / "missing")


def test_right_evidence_is_verified_too(path: Path) -> None:
    write_evidence(evidence_path(path), path, {}, load_signer())
    assert "ok evidence: linear-1.0.0-x86-64.evidence.json" in invoke(path).stdout
    assert json.loads(invoke(path, "--json").stdout)["evidence"] == str(evidence_path(path))


def test_evidence_by_an_unknown_key_is_refused(path: Path, tmp_path: Path) -> None:
    write_evidence(evidence_path(path), path, {}, load_signer(folder=tmp_path / "stranger"))
    with pytest.raises(SignatureError, match=r"evidence\.json.*signed by key"):
        invoke(path)


def test_evidence_about_another_package_is_refused(path: Path, tmp_path: Path) -> None:
    other = write_linear(tmp_path / "other", version="2")
    write_evidence(evidence_path(path), other, {}, load_signer())
    with pytest.raises(DigestError, match="is about"):
        invoke(path)


def test_a_model_that_computes_something_else_fails_the_self_test(tmp_path: Path) -> None:
    path = write_linear(tmp_path / "x", golden_y=np.array([[1.0, 0.25]]))
    with pytest.raises(BackendError, match=r"self-test failed.*'y': 1 of 2 values differ"):
        invoke(path)


def test_what_held_before_a_failed_self_test_has_been_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_linear(tmp_path / "x", golden_y=np.array([[1.0, 0.25]]))
    assert main(["verify", str(path)]) == BackendError.exit_code
    output = capsys.readouterr()
    assert "ok signature: " in output.out
    assert "ok self-test" not in output.out
    assert "self-test failed" in output.err


def test_an_error_with_json_leaves_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_linear(tmp_path / "x", golden_y=np.array([[1.0, 0.25]]))
    assert main(["verify", str(path), "--json"]) == BackendError.exit_code
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "BackendError"


@pytest.fixture
def no_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "edgekit_runtime.sessions.ort", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)


def test_a_missing_engine_is_named_with_what_to_install(path: Path, no_onnxruntime: Any) -> None:
    with pytest.raises(BackendError, match=r"needs onnxruntime.*pip install.*--no-self-test checks the rest"):
        invoke(path)


def test_without_self_test_no_engine_is_needed(path: Path, no_onnxruntime: Any) -> None:
    assert invoke(path, "--no-self-test").exit_code == 0


def test_an_engine_that_is_nowhere_is_named(tmp_path: Path) -> None:
    path = write_linear(tmp_path / "x", backend=BackendChoice("abacus", "model.onnx"))
    with pytest.raises(BackendError, match="no backend 'abacus' here"):
        invoke(path)
