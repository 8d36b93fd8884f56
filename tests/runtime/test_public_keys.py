"""The files and the folder of public keys that are trusted."""

import os
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from edgekit_runtime.errors import SignatureError, UnavailableError
from edgekit_runtime.trust.dsse import PACKAGE_PREDICATE_TYPE, Statement
from edgekit_runtime.trust.keys import list_keys, stamp_keys
from edgekit_runtime.trust.trust_store import TrustStore, read_public_file, read_public_key
from edgekit_toolkit.packaging.signing_keys import StatementSigner

PAYLOAD = Statement("manifest.json", "0" * 64, PACKAGE_PREDICATE_TYPE, {"a": 1}).to_bytes()
KEY_FILE_LIMIT_BYTES = 65536


def to_pem(key: ed25519.Ed25519PublicKey | x25519.X25519PublicKey) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


PEM = to_pem(ed25519.Ed25519PrivateKey.from_private_bytes(b"\1" * 32).public_key())  # the maker's


def test_a_key_file_at_its_limit_is_read(maker: Any, tmp_path: Path) -> None:
    path = tmp_path / "long.pub.pem"
    path.write_bytes(PEM.ljust(KEY_FILE_LIMIT_BYTES, b"\n"))
    assert read_public_key(path).keyid == maker.signer.key_id


@pytest.mark.parametrize("over", [1, 2, 1000])
def test_a_key_file_beyond_its_limit_is_refused(over: int, tmp_path: Path) -> None:
    path = tmp_path / "long.pub.pem"
    path.write_bytes(PEM.ljust(KEY_FILE_LIMIT_BYTES + over, b"\n"))
    with pytest.raises(SignatureError, match=r"long\.pub\.pem: over 65536 bytes, so not a key"):
        read_public_key(path)


def test_a_key_comes_without_what_else_its_file_holds(maker: Any, tmp_path: Path) -> None:
    path = tmp_path / "vendor.pub.pem"
    path.write_bytes(b"of the vendor\n" + PEM + b"until 2030\n")
    key, pem = read_public_file(path)
    assert (key.keyid, pem) == (maker.signer.key_id, PEM)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_key_that_is_no_regular_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pub.pem"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(SignatureError, match=r"x\.pub\.pem: is no regular file; put the key itself there"):
        read_public_key(path)


def test_a_folder_in_the_place_of_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pub.pem").mkdir()
    with pytest.raises(SignatureError, match=r"cannot read public key .*x\.pub\.pem: Is a directory"):
        read_public_key(tmp_path / "x.pub.pem")


def test_a_public_key_that_cannot_sign_is_refused(tmp_path: Path) -> None:
    key = x25519.X25519PrivateKey.from_private_bytes(b"\1" * 32).public_key()
    (tmp_path / "x.pub.pem").write_bytes(to_pem(key))
    with pytest.raises(SignatureError, match=r"x\.pub\.pem: not a PEM public key"):
        read_public_key(tmp_path / "x.pub.pem")


def test_keys_are_listed_by_name_without_other_files(tmp_path: Path) -> None:
    for name in ("c.pub.pem", "a.pub.pem", "b.pub.pem", "a.pem", "pub.pem.txt"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in list_keys(tmp_path)] == ["a.pub.pem", "b.pub.pem", "c.pub.pem"]


def test_a_file_in_the_place_of_the_folder_of_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"")
    with pytest.raises(SignatureError, match=r"keys is not a folder of keys; .* keys trust .*/keys$"):
        list_keys(tmp_path / "keys")


def test_a_folder_of_keys_below_a_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "home").write_bytes(b"")
    assert list_keys(tmp_path / "home" / "keys") == []


@pytest.mark.parametrize(
    ("error", "outcome"), [(PermissionError(13, "closed"), None), (OSError(5, "broken"), UnavailableError)]
)
def test_a_folder_of_keys_that_is_closed_is_empty_and_one_that_fails_is_no_verdict(
    error: OSError, outcome: type[Exception] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise error

    monkeypatch.setattr(Path, "iterdir", fail)
    if outcome is None:
        assert list_keys(tmp_path) == []
        return
    with pytest.raises(outcome, match="the keys cannot be listed: broken; try again"):
        list_keys(tmp_path)


def test_the_stamp_of_keys_tells_each_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.pub.pem").write_bytes(b"x" * ord(name))
    expected = []
    for name in ("a", "b"):
        status = (tmp_path / f"{name}.pub.pem").stat()
        place = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        expected.append((f"{name}.pub.pem", *place))
    assert stamp_keys(tmp_path) == tuple(expected)


def test_the_stamp_of_a_key_that_cannot_be_found_is_zero_and_the_others_follow(tmp_path: Path) -> None:
    (tmp_path / "a.pub.pem").symlink_to(tmp_path / "gone")
    (tmp_path / "b.pub.pem").write_bytes(b"b")
    first, second = stamp_keys(tmp_path)
    assert first == ("a.pub.pem", 0, 0, 0, 0)
    assert (second[0], second[2]) == ("b.pub.pem", 1)


def test_the_stamp_of_a_missing_folder_is_empty(tmp_path: Path) -> None:
    assert stamp_keys(tmp_path / "nowhere") == ()


@pytest.mark.parametrize("place", ["none", "usual", "another", "other"])
def test_a_key_that_is_not_trusted_comes_with_what_to_do(
    place: str, maker: Any, other_signer: StatementSigner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    folder = None if place == "none" else tmp_path / {"usual": "keys"}.get(place, place)
    (tmp_path / "vendor.pub.pem").write_bytes(PEM)
    trust = TrustStore([read_public_key(tmp_path / "vendor.pub.pem")], folder)
    with pytest.raises(SignatureError) as caught:
        trust.verify(other_signer(PAYLOAD), PACKAGE_PREDICATE_TYPE, "here")
    advice = (
        f" (in {folder}); if you know the owner of that key, get its public part from them and trust it:"
        " edgekit-device keys trust FILE"
    )
    if place == "none":
        advice = "; trust that key if you know its owner"
    elif place != "usual":
        advice += f" --keys {folder}"
    said = f"here: signed by key {other_signer.key_id}, trusted are: {maker.signer.key_id}{advice}"
    assert str(caught.value) == said
