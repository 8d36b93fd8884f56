import json
import os
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from securesystemslib.signer import SIGNER_FOR_URI_SCHEME, CryptoSigner, Signer
from tests.toolkit.cases import cases

from edgekit_runtime.errors import OutputError, SignatureError
from edgekit_runtime.trust.dsse import EVIDENCE_PREDICATE_TYPE, Statement
from edgekit_runtime.trust.trust_store import TrustStore, read_public_key
from edgekit_toolkit.packaging.signing_keys import (
    KeyInfo,
    StatementSigner,
    export_key,
    generate_key,
    list_keys,
    load_signer,
    register_uri,
    trust_key,
)

PAYLOAD = Statement("file", "0" * 64, EVIDENCE_PREDICATE_TYPE, {}).to_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "keys"


def signs(signer: StatementSigner, folder: Path) -> bool:
    """Whether a reader that trusts `folder` accepts the signer's signature."""
    trust = TrustStore.from_folder(folder)
    return trust.verify(signer(PAYLOAD), EVIDENCE_PREDICATE_TYPE, "here")[1] == signer.key_id


def test_a_generated_key_signs_and_is_trusted(folder: Path) -> None:
    key = generate_key("release", folder)
    signer = load_signer("release", folder)
    assert (signer.key_id, signs(signer, folder)) == (key.key_id, True)


def test_a_signature_is_the_same_each_time(folder: Path) -> None:
    generate_key("release", folder)
    assert load_signer("release", folder)(PAYLOAD) == load_signer("release", folder)(PAYLOAD)


def test_the_default_key_is_made_on_first_use_and_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    first = load_signer()
    assert load_signer().key_id == first.key_id
    assert list_keys() == (KeyInfo("default", first.key_id, "file"),)
    assert signs(first, tmp_path / "keys")


def test_two_first_uses_at_once_end_with_one_key(folder: Path) -> None:
    ids: list[str] = []
    barrier = threading.Barrier(8)

    def first_use() -> None:
        barrier.wait()
        ids.append(load_signer(folder=folder).key_id)

    threads = [threading.Thread(target=first_use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(ids), len(set(ids))) == (8, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["default.pem", "default.pub.pem"]


def test_only_the_owner_can_read_private_keys(folder: Path) -> None:
    before = os.umask(0)
    try:
        generate_key("release", folder)
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "release.pem")]
    assert modes == [0o700, 0o600]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_private_key_that_others_can_use_is_refused(mode: int, folder: Path) -> None:
    generate_key("release", folder)
    (folder / "release.pem").chmod(mode)
    with pytest.raises(SignatureError, match=f"mode {mode:04o}.*chmod 600"):
        load_signer("release", folder)


def test_a_name_that_is_taken_keeps_its_key(folder: Path) -> None:
    key = generate_key("release", folder)
    with pytest.raises(SignatureError, match="exists"):
        generate_key("release", folder)
    assert load_signer("release", folder).key_id == key.key_id


def test_a_lone_private_key_is_not_replaced(folder: Path) -> None:
    key = generate_key("release", folder)
    (folder / "release.pub.pem").unlink()
    with pytest.raises(SignatureError, match="exists"):
        generate_key("release", folder)
    assert load_signer("release", folder).key_id == key.key_id
    assert read_public_key(folder / "release.pub.pem").keyid == key.key_id


@cases("name", ["", "../x", "a/b", "a.pub", ".hidden", "-x", "a b", "x" * 65])
def test_a_malformed_name_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(SignatureError, match="key name"):
        generate_key(name, folder)
    with pytest.raises(SignatureError, match="key name"):
        load_signer(name, folder)


def test_a_missing_key_is_named(folder: Path) -> None:
    with pytest.raises(SignatureError, match="no signing key 'release'"):
        load_signer("release", folder)


def test_an_exported_key_makes_another_machine_trust_it(folder: Path, tmp_path: Path) -> None:
    key = generate_key("release", folder)
    export_key("release", tmp_path / "release.pem", folder)
    other = tmp_path / "other"
    assert trust_key(tmp_path / "release.pem", "vendor", other) == KeyInfo("vendor", key.key_id, None)
    assert signs(load_signer("release", folder), other)


def test_an_exported_key_holds_no_private_part(folder: Path, tmp_path: Path) -> None:
    generate_key("release", folder)
    export_key("release", tmp_path / "out.pem", folder)
    assert b"PRIVATE" not in (tmp_path / "out.pem").read_bytes()


def test_trusting_a_private_key_file_is_refused(folder: Path, tmp_path: Path) -> None:
    generate_key("release", folder)
    with pytest.raises(SignatureError, match="not a PEM public key"):
        trust_key(folder / "release.pem", "vendor", tmp_path)
    assert not (tmp_path / "vendor.pub.pem").exists()


def test_a_key_that_is_only_trusted_does_not_sign(folder: Path, tmp_path: Path) -> None:
    generate_key("release", folder)
    trust_key(folder / "release.pub.pem", "vendor", tmp_path)
    with pytest.raises(SignatureError, match="no signing key 'vendor'"):
        load_signer("vendor", tmp_path)


def test_trusting_another_key_under_a_taken_name_keeps_the_first(folder: Path, tmp_path: Path) -> None:
    first, second = generate_key("a", folder), generate_key("b", folder)
    trust_key(folder / "a.pub.pem", "vendor", tmp_path)
    with pytest.raises(SignatureError, match="is another key") as caught:
        trust_key(folder / "b.pub.pem", "vendor", tmp_path)
    assert caught.value.key_id == second.key_id
    assert read_public_key(tmp_path / "vendor.pub.pem").keyid == first.key_id


def test_keys_are_listed_by_name_with_what_signs(folder: Path, tmp_path: Path) -> None:
    vendor = generate_key("x", tmp_path)
    key = generate_key("release", folder)
    trust_key(tmp_path / "x.pub.pem", "vendor", folder)
    assert list_keys(folder) == (
        KeyInfo("release", key.key_id, "file"),
        KeyInfo("vendor", vendor.key_id, None),
    )


def test_a_missing_folder_lists_no_keys(folder: Path) -> None:
    assert list_keys(folder) == ()


def test_swapped_key_files_are_refused(folder: Path) -> None:
    generate_key("a", folder)
    generate_key("b", folder)
    (folder / "a.pub.pem").write_bytes((folder / "b.pub.pem").read_bytes())
    with pytest.raises(SignatureError, match="different keys"):
        load_signer("a", folder)


def write_private(path: Path, pem: bytes) -> None:
    path.write_bytes(pem)
    path.chmod(0o600)


@pytest.mark.parametrize("kind", ["garbage", "public", "encrypted", "DER"])
def test_a_file_that_is_no_usable_private_key_is_named(kind: str, folder: Path) -> None:
    generate_key("release", folder)
    private = load_pem_private_key((folder / "release.pem").read_bytes(), None)
    pem = {
        "garbage": b"hello",
        "public": (folder / "release.pub.pem").read_bytes(),
        "encrypted": private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")),
        "DER": private.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()),
    }[kind]
    write_private(folder / "release.pem", pem)
    with pytest.raises(SignatureError, match=r"private key .*release\.pem"):
        load_signer("release", folder)


def test_a_folder_that_cannot_be_made_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot make the key folder"):
        generate_key("release", tmp_path / "file" / "keys")


class VaultedSigner(Signer):
    """Stands for an HSM: its private key is reached by a URI alone."""

    crypto: CryptoSigner
    broken: str | None = None

    @property
    def public_key(self):  # type: ignore[no-untyped-def]
        return self.crypto.public_key

    @classmethod
    def from_priv_key_uri(cls, priv_key_uri, public_key, secrets_handler=None):  # type: ignore[no-untyped-def]
        if cls.broken == "open":
            raise RuntimeError("no such token")
        return cls()

    def sign(self, payload: bytes):  # type: ignore[no-untyped-def]
        if self.broken == "sign":
            raise OSError("token was removed")
        if self.broken == "other key":
            signature = CryptoSigner.generate_ed25519().sign(payload)
            signature.keyid = self.crypto.public_key.keyid
            return signature
        return self.crypto.sign(payload)


@pytest.fixture
def vaulted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A public key file whose private half is behind `vaulted:`."""
    generate_key("origin", tmp_path)
    private = load_pem_private_key((tmp_path / "origin.pem").read_bytes(), None)
    monkeypatch.setattr(VaultedSigner, "crypto", CryptoSigner(private), raising=False)
    monkeypatch.setattr(VaultedSigner, "broken", None)
    monkeypatch.setitem(SIGNER_FOR_URI_SCHEME, "vaulted", VaultedSigner)
    return tmp_path / "origin.pub.pem"


def test_a_key_behind_a_uri_signs_without_a_private_file(vaulted: Path, folder: Path) -> None:
    key = register_uri("hardware", "vaulted:slot=1", vaulted, folder)
    assert signs(load_signer("hardware", folder), folder)
    assert list_keys(folder) == (KeyInfo("hardware", key.key_id, "vaulted:slot=1"),)
    assert sorted(path.name for path in folder.iterdir()) == ["hardware.pub.pem", "hardware.uri"]


def test_the_file_uri_of_securesystemslib_signs(folder: Path, tmp_path: Path) -> None:
    generate_key("origin", tmp_path)
    register_uri("elsewhere", f"file2:{tmp_path / 'origin.pem'}", tmp_path / "origin.pub.pem", folder)
    assert signs(load_signer("elsewhere", folder), folder)


@pytest.mark.parametrize("uri", ["nonsense", "unknown:x", "file2:/nowhere/key.pem", ""])
def test_a_uri_that_does_not_open_is_not_registered(uri: str, vaulted: Path, folder: Path) -> None:
    with pytest.raises(SignatureError, match="cannot sign by"):
        register_uri("hardware", uri, vaulted, folder)
    assert list_keys(folder) == ()


@pytest.mark.parametrize("broken", ["open", "sign", "other key"])
def test_a_failing_token_is_a_signature_error(
    broken: str, vaulted: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = register_uri("hardware", "vaulted:slot=1", vaulted, folder)
    monkeypatch.setattr(VaultedSigner, "broken", broken)
    with pytest.raises(SignatureError) as caught:
        load_signer("hardware", folder)(PAYLOAD)
    assert caught.value.key_id == key.key_id


def test_an_envelope_names_the_key_that_signed_it(folder: Path) -> None:
    key = generate_key("release", folder)
    envelope = json.loads(load_signer("release", folder)(PAYLOAD))
    assert [signature["keyid"] for signature in envelope["signatures"]] == [key.key_id]
