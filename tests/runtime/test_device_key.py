"""The key of a device: each holder gives out what was wrapped for it, and nothing else."""

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from tests.waiting import wait_for

from edgekit_runtime.encryption import DEVICE_KEY, kernel_keyring
from edgekit_runtime.encryption.container import EncryptionError, make_content_key
from edgekit_runtime.encryption.device_key import (
    DeviceKey,
    make_device_key,
    parse_public_device_key,
    read_device_key,
    read_public_device_key,
)
from edgekit_runtime.encryption.holders import HOLDERS, find_holder
from edgekit_runtime.encryption.key_wrapping import encode_point, wrap_key
from edgekit_runtime.errors import UnavailableError

ADD_KEY, KEYCTL = 248, 250  # of x86-64
USER_KEYRING, UNLINK = -4, 9


class SoftwareTpm:
    """A TPM 2.0 in software, with its state in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        server, control = folder / "s", folder / "s.ctrl"
        for path in (server, control):
            path.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [
                *("swtpm", "socket", "--tpm2", "--tpmstate", f"dir={folder}"),
                *("--server", f"type=unixio,path={server}", "--ctrl", f"type=unixio,path={control}"),
                *("--flags", "not-need-init,startup-clear"),
            ]
        )
        wait_for(lambda: server.exists() and control.exists(), "the TPM in software")
        monkeypatch.setenv("TPM2TOOLS_TCTI", f"swtpm:path={server}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def check(key: DeviceKey, folder: Path) -> None:
    """Check that a key opens what was wrapped for it, also once it is read again."""
    content_key = make_content_key()
    wrapped = wrap_key(content_key, key.public_key)
    assert key.unwrap(wrapped, content_key.key_id) == content_key
    again = read_device_key(folder)
    assert again is not None
    assert again.unwrap(wrapped, content_key.key_id) == content_key
    assert (folder / DEVICE_KEY).stat().st_mode & 0o777 == 0o600


def test_key_in_a_file_is_made_once_and_found_again(tmp_path: Path) -> None:
    assert read_device_key(tmp_path / "keys") is None
    key = make_device_key(tmp_path / "keys", holder="file")
    check(key, tmp_path / "keys")
    assert make_device_key(tmp_path / "keys").public_key == key.public_key
    assert "copied package only" in key.holder.sentence


def test_public_key_is_pem_that_others_read(tmp_path: Path) -> None:
    key = make_device_key(tmp_path, holder="file")
    public = load_pem_public_key(key.pem.encode())
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert encode_point(public) == key.public_key == parse_public_device_key(key.pem)
    (tmp_path / "device.pub").write_text(key.pem)
    assert read_public_device_key(tmp_path / "device.pub") == key.public_key


@pytest.mark.parametrize("content", [b"", b"no key", b"\xff\xfe", b"-----BEGIN PUBLIC KEY-----\n!\n"])
def test_file_that_is_no_public_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "device.pub").write_bytes(content)
    with pytest.raises(EncryptionError, match="keys device"):
        read_public_device_key(tmp_path / "device.pub")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"format":1', b'"format":2'),
        (b'"holder":"file"', b'"holder":"cloud"'),
        (b'"public":"', b'"public":"!'),
        (b'"scalar":"', b'"scalar":"!'),
        (b'"scalar"', b'"scalax"'),
        (b"{", b""),
    ],
)
def test_damaged_key_of_a_device_is_said(tmp_path: Path, before: bytes, after: bytes) -> None:
    key, content_key = make_device_key(tmp_path, holder="file"), make_content_key()
    path = tmp_path / DEVICE_KEY
    path.write_bytes(path.read_bytes().replace(before, after, 1))

    def use() -> None:
        damaged = read_device_key(tmp_path)
        assert damaged is not None
        damaged.unwrap(wrap_key(content_key, key.public_key), content_key.key_id)

    with pytest.raises(EncryptionError, match=r"device-key|holds keys"):
        use()


def test_new_key_goes_to_the_first_holder_that_is_available(tmp_path: Path) -> None:
    expected = next(holder for holder in HOLDERS if holder.is_available())
    assert make_device_key(tmp_path).holder is expected


def test_tpm_that_refuses_leaves_the_choice_of_another_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose owner has set a password: enrolments need a key, and a file must be a decision."""
    for name in ("tpm2_createprimary", "tpm2_ecdhzgen", "tpm2_flushcontext"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho 'ERROR: needs authorization' >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TPM2TOOLS_TCTI", "none")
    keys = tmp_path / "keys"
    with pytest.raises(UnavailableError, match=r"needs authorization; try again, or .* --holder file"):
        make_device_key(keys)
    assert make_device_key(keys, holder="file").holder.name == "file"
    assert make_device_key(keys).holder.name == "file"


def test_tpm_keeps_the_key_over_a_restart_and_another_tpm_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("swtpm"):
        pytest.skip("needs swtpm")
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    tpm = SoftwareTpm(folders[0], monkeypatch)
    try:
        if not find_holder("tpm").is_available():
            pytest.skip("needs tpm2-tools")
        key = make_device_key(tmp_path / "keys")
        assert key.holder.name == "tpm"
        check(key, tmp_path / "keys")
        content_key = make_content_key()
        wrapped = wrap_key(content_key, key.public_key)
    finally:
        tpm.stop()
    for folder, opens in zip(folders, (True, False), strict=True):
        tpm = SoftwareTpm(folder, monkeypatch)
        try:
            if opens:
                assert key.unwrap(wrapped, content_key.key_id) == content_key
            else:
                with pytest.raises(EncryptionError, match="another device"):
                    key.unwrap(wrapped, content_key.key_id)
        finally:
            tpm.stop()
    with pytest.raises(UnavailableError, match="TPM refused"):
        key.unwrap(wrapped, content_key.key_id)


@pytest.fixture
def boot_key() -> Iterator[int]:
    """A key as the boot of a device loads it."""
    library = ctypes.CDLL(None)
    content = (ctypes.c_char_p(b"k" * 32), ctypes.c_long(32))
    name = kernel_keyring.NAME.encode()
    number = -1
    if platform.machine() == "x86_64":
        number = library.syscall(ctypes.c_long(ADD_KEY), b"user", name, *content, ctypes.c_long(USER_KEYRING))
    if number <= 0:
        pytest.skip("the kernel lets this user load no key")
    yield number
    unload(number)


def unload(number: int) -> None:
    numbers = (KEYCTL, UNLINK, number, USER_KEYRING)
    ctypes.CDLL(None).syscall(*(ctypes.c_long(value) for value in numbers))


def test_key_under_the_keyring_opens_only_while_the_boot_key_is_loaded(tmp_path: Path, boot_key: int) -> None:
    key = make_device_key(tmp_path, holder="keyring")
    check(key, tmp_path)
    content_key = make_content_key()
    unload(boot_key)
    with pytest.raises(UnavailableError, match="a restart empties it"):
        key.unwrap(wrap_key(content_key, key.public_key), content_key.key_id)
    with pytest.raises(EncryptionError, match="cannot hold a key"):
        make_device_key(tmp_path / "next", holder="keyring")
