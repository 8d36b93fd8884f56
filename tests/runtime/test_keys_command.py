"""`edgekit-device keys`, and what is said where a key is not trusted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tests.runtime.conftest import PackageMaker
from tests.runtime.slot_cases import write_keys

from edgekit_runtime.cli import main
from edgekit_runtime.errors import SignatureError
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust import trust_store

Run = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device without keys."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGEKIT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return find_keys_folder()


@pytest.fixture
def public_key(tmp_path: Path) -> Path:
    """The key of the packages, as its owner sends it."""
    write_keys(tmp_path / "sent")
    (path,) = (tmp_path / "sent").iterdir()
    return path.rename(tmp_path / "vendor.pub.pem")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


def test_key_that_is_trusted_lets_its_packages_in_and_after_its_removal_no_more(
    run: Run, public_key: Path, package_path: Path, maker: PackageMaker
) -> None:
    assert run("keys", "trust", public_key)[0] == 0
    listed = json.loads(run("keys", "list", "--json")[1])
    assert listed["keys"] == [{"name": "vendor", "key_id": maker.signer.key_id}]
    assert run("install", package_path)[0] == 0
    assert run("keys", "remove", "vendor")[0] == 0
    assert json.loads(run("keys", "list", "--json")[1])["keys"] == []
    assert run("install", package_path)[0] == SignatureError.exit_code


def test_key_that_is_exchanged_after_it_was_read_is_not_trusted(
    run: Run, public_key: Path, maker: PackageMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_key = trust_store.SSlibKey.from_crypto

    def exchange(key: Any) -> Any:
        other = Ed25519PrivateKey.generate().public_key()
        public_key.write_bytes(other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        return name_key(key)

    with monkeypatch.context() as patched:
        patched.setattr(trust_store.SSlibKey, "from_crypto", exchange)
        shown = json.loads(run("keys", "trust", public_key, "--json")[1])["key_id"]
    listed = json.loads(run("keys", "list", "--json")[1])["keys"]
    assert [key["key_id"] for key in listed] == [shown] == [maker.signer.key_id]


def test_error_of_a_key_that_is_not_trusted_names_folder_and_command(
    run: Run, folder: Path, package_path: Path, tmp_path: Path, maker: PackageMaker
) -> None:
    code, printed = run("install", package_path)
    assert code == SignatureError.exit_code
    assert maker.signer.key_id in printed
    assert f"(in {folder})" in printed
    assert printed.endswith("edgekit-device keys trust FILE\n")
    printed = run("install", package_path, "--keys", tmp_path)[1]
    assert printed.endswith(f"edgekit-device keys trust FILE --keys {tmp_path}\n")


@pytest.mark.parametrize("command", ["install", "serve", "status", "keys"])
def test_file_in_the_place_of_the_folder_is_said(
    run: Run, public_key: Path, package_path: Path, command: str
) -> None:
    arguments = {"install": [package_path], "serve": ["--package", package_path], "keys": ["list"]}
    code, printed = run(command, *arguments.get(command, []), "--keys", public_key)
    assert code == SignatureError.exit_code
    assert f"{public_key} is not a folder" in printed
    assert f"edgekit-device keys trust {public_key}" in printed


def test_user_without_a_home_trusts_nobody(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", "/dev/null")
    assert json.loads(run("keys", "list", "--json")[1])["keys"] == []


def test_key_does_not_take_the_name_of_another(run: Run, public_key: Path, tmp_path: Path) -> None:
    run("keys", "trust", public_key)
    other = tmp_path / "other.pem"
    pem = Ed25519PrivateKey.from_private_bytes(bytes([2]) * 32).public_key()
    other.write_bytes(pem.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    code, printed = run("keys", "trust", other, "vendor")
    assert (code, "is another key" in printed) == (SignatureError.exit_code, True)
    assert run("keys", "trust", other)[0] == 0
    assert [line.split()[0] for line in run("keys", "list")[1].splitlines()] == ["other", "vendor"]


def test_file_without_a_public_key_is_not_trusted(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("nothing")
    code, printed = run("keys", "trust", tmp_path / "a.pem")
    assert (code, "not a PEM public key" in printed) == (SignatureError.exit_code, True)
    assert not folder.exists()


def test_removal_names_the_keys_that_are_there_and_spares_one_that_signs_here(
    run: Run, folder: Path, public_key: Path
) -> None:
    run("keys", "trust", public_key)
    assert "there are: vendor" in run("keys", "remove", "vendro")[1]
    (folder / "vendor.pem").touch()
    code, printed = run("keys", "remove", "vendor")
    assert (code, "signs on this machine" in printed) == (SignatureError.exit_code, True)
    assert (folder / "vendor.pub.pem").exists()
