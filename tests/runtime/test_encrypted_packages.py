"""Encrypted packages on a device: read and installed as others, opened nowhere else, plain on no disk."""

import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.conftest import PackageMaker
from tests.runtime.encryption_parts import encrypt_package, find_plaintext, make_device, make_heavy
from tests.runtime.slot_cases import MODEL, write_keys

from edgekit_runtime.encryption import container, key_path
from edgekit_runtime.encryption.container import EncryptionError, encrypt_file, make_content_key, read_header
from edgekit_runtime.encryption.device_key import DeviceKey, wrap_for
from edgekit_runtime.errors import PackageError, SignatureError, SlotError, UnavailableError
from edgekit_runtime.package.archive import Limits, read_package, read_unverified_manifest
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.slots import Permissions, Slots
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_runtime.trust.verifier_process import VerifyingProcess


@pytest.fixture(scope="module")
def heavy(maker: PackageMaker) -> tuple[PackageMaker, bytes]:
    return make_heavy(maker)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceKey:
    """The key of the device that this test runs on."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    return make_device(tmp_path / "home")


@pytest.fixture
def other_device(tmp_path: Path) -> DeviceKey:
    return make_device(tmp_path / "other")


@pytest.fixture
def slots(tmp_path: Path, maker: PackageMaker) -> Slots:
    return Slots(tmp_path / "state", maker.trust)


def write(heavy: tuple[PackageMaker, bytes], folder: Path, version: str = "1.0.0") -> Path:
    path = folder / f"{version}.edgepkg"
    heavy[0].write(path, version=version)
    return path


def write_encrypted(
    heavy: tuple[PackageMaker, bytes],
    folder: Path,
    device: DeviceKey,
    version: str = "1.0.0",
    *,
    beside: bool = False,
) -> Path:
    """Write an encrypted package; the plain one that it is made of is gone."""
    plain = write(heavy, folder, version)
    path = folder / f"{version}.encrypted.edgepkg"
    encrypt_package(plain, path, device, beside=beside)
    plain.unlink()
    return path


@pytest.mark.parametrize("beside", [False, True])
def test_device_opens_and_tests_what_is_encrypted_for_it(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, tmp_path: Path, beside: bool
) -> None:
    path = write_encrypted(heavy, tmp_path, device, beside=beside)
    with read_package(path, heavy[0].trust) as package:
        assert package.is_encrypted
        session = open_session(package)
        try:
            assert run_selftest(session, package).passed
        finally:
            session.close()
    assert read_unverified_manifest(path).manifest == heavy[0].manifest()


def test_verifying_process_decrypts_so_that_its_parent_needs_no_library(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, tmp_path: Path
) -> None:
    path = write_encrypted(heavy, tmp_path, device)
    write_keys(tmp_path / "trusted")
    program = (
        "import sys; from pathlib import Path;"
        "from edgekit_runtime.trust.verifier_process import VerifyingProcess;"
        "from edgekit_runtime.package.archive import read_package\n"
        "trust = VerifyingProcess(Path(sys.argv[2]))\n"
        "with trust, read_package(Path(sys.argv[1]), trust) as package:\n"
        "    print(package.manifest.version, package.is_encrypted, 'cryptography' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(tmp_path / "trusted")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["1.0.0", "True", "False"], "")


def test_verifying_process_says_why_it_does_not_decrypt(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, other_device: DeviceKey, tmp_path: Path
) -> None:
    path = write_encrypted(heavy, tmp_path, other_device)
    with VerifyingProcess(write_keys(tmp_path / "trusted")) as trust:
        with pytest.raises(EncryptionError, match="not encrypted for this device"):
            read_package(path, trust)
        read_package(write_encrypted(heavy, tmp_path, device, "2.0.0"), trust).close()


def test_other_device_opens_nothing(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, other_device: DeviceKey, tmp_path: Path
) -> None:
    path = write_encrypted(heavy, tmp_path, other_device)
    with pytest.raises(EncryptionError, match=r"not encrypted for this device, whose key is [0-9a-f]{16}"):
        read_package(path, heavy[0].trust)


def test_wrapped_key_of_another_device_beside_a_package_is_refused(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, other_device: DeviceKey, tmp_path: Path
) -> None:
    path = write_encrypted(heavy, tmp_path, other_device, beside=True)
    with pytest.raises(EncryptionError, match="key is of another device"):
        read_package(path, heavy[0].trust)


def test_wrapped_key_of_another_release_is_refused(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, tmp_path: Path
) -> None:
    paths = [write_encrypted(heavy, tmp_path, device, version, beside=True) for version in ("1.0.0", "2.0.0")]
    key_path(paths[0]).replace(key_path(paths[1]))
    with pytest.raises(EncryptionError, match=r"holds the key .*, the package needs"):
        read_package(paths[1], heavy[0].trust)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"format":1,"key_id":"x","wrapped":5}', b"\xff" * 9000]
)
def test_damaged_key_file_is_refused(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, tmp_path: Path, content: bytes
) -> None:
    path = write_encrypted(heavy, tmp_path, device, beside=True)
    key_path(path).write_bytes(content)
    with pytest.raises(EncryptionError, match=r"edgepkg\.key"):
        read_package(path, heavy[0].trust)


def test_key_file_that_is_a_pipe_keeps_nobody_waiting(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, tmp_path: Path
) -> None:
    path = write_encrypted(heavy, tmp_path, device, beside=True)
    key_path(path).unlink()
    os.mkfifo(key_path(path))
    with pytest.raises(EncryptionError, match=r"edgepkg\.key: is no regular file"):
        read_package(path, heavy[0].trust)


def test_device_without_a_key_says_how_to_get_one(
    heavy: tuple[PackageMaker, bytes],
    other_device: DeviceKey,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "empty"))
    path = write_encrypted(heavy, tmp_path, other_device)
    with pytest.raises(EncryptionError, match="edgekit-device keys device"):
        read_package(path, heavy[0].trust)


def test_size_over_the_limit_is_refused(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, tmp_path: Path
) -> None:
    path = write_encrypted(heavy, tmp_path, device)
    with pytest.raises(PackageError, match="limit"):
        read_package(path, heavy[0].trust, Limits(max_package_bytes=1000))


def test_package_that_would_fill_the_memory_is_refused_before_it_is_decrypted(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody who knows the public key of a device can make one: signatures are verified in the plaintext."""
    path = write_encrypted(heavy, tmp_path, device)
    size_bytes = read_header(path).plain_bytes
    monkeypatch.setattr(container, "machine_bytes", lambda: 2 * size_bytes - 2)
    with pytest.raises(UnavailableError, match="over half of this machine's memory"):
        read_package(path, heavy[0].trust)
    monkeypatch.setattr(container, "machine_bytes", lambda: 2 * size_bytes)
    read_package(path, heavy[0].trust).close()


def test_encrypted_file_that_holds_no_package_is_refused(
    device: DeviceKey, maker: PackageMaker, tmp_path: Path
) -> None:
    content_key = make_content_key()
    for name, content in (("empty", b""), ("text", b"no package"), ("twice", None)):
        plain, path = tmp_path / f"{name}.plain", tmp_path / name
        if content is None:  # a file that is encrypted twice
            plain = tmp_path / "text"
            with pytest.raises(EncryptionError, match="already"):
                encrypt_file(plain, path, content_key)
            continue
        plain.write_bytes(content)
        encrypt_file(plain, path, content_key, wrap_for(content_key, [device.public_key]))
        with pytest.raises(PackageError):
            read_package(path, maker.trust)


def test_package_by_an_unknown_signer_is_refused(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, tmp_path: Path
) -> None:
    """The key of a device is public: that a package is encrypted for it says nothing about its maker."""
    path = write_encrypted(heavy, tmp_path, device)
    with pytest.raises(SignatureError):
        read_package(path, TrustStore([]))


@pytest.mark.parametrize("beside", [False, True])
def test_installed_package_lies_encrypted_and_starts(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, slots: Slots, tmp_path: Path, beside: bool
) -> None:
    for version in ("1.0.0", "2.0.0", "3.0.0"):
        path = write_encrypted(heavy, tmp_path, device, version, beside=beside)
        slots.install(path)
        slots.begin_start(MODEL).package.close()
        slots.confirm(MODEL, version)
    slots.rollback(MODEL)
    with slots.choose(MODEL).package as package:
        assert (package.manifest.version, package.is_encrypted) == ("2.0.0", True)
    names = sorted(path.name for path in (tmp_path / "state" / "models" / MODEL).iterdir())
    assert len(names) == (5 if beside else 3)  # two packages, with their keys, and the state
    assert find_plaintext(tmp_path, heavy[1]) == []


def test_plain_package_is_found_by_the_search(heavy: tuple[PackageMaker, bytes], tmp_path: Path) -> None:
    path = write(heavy, tmp_path)
    assert [found for found, _ in find_plaintext(tmp_path, heavy[1])] == [path]


def test_plain_version_after_an_encrypted_one_needs_permission(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, slots: Slots, tmp_path: Path
) -> None:
    slots.install(write_encrypted(heavy, tmp_path, device))
    plain = write(heavy, tmp_path, "2.0.0")
    with pytest.raises(SlotError, match="--allow-plain"):
        slots.install(plain)
    assert slots.install(plain, Permissions(plain=True)).active


def test_plain_factory_package_beside_an_encrypted_version_needs_permission(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, slots: Slots, tmp_path: Path
) -> None:
    slots.install(write_encrypted(heavy, tmp_path, device))
    plain = write(heavy, tmp_path, "0.9.0")
    with pytest.raises(SlotError, match="--allow-plain"):
        slots.install(plain, factory=True)
    assert list(slots.folder.rglob("*0.9.0*")) == []
    slots.install(plain, Permissions(plain=True), factory=True)


def test_same_version_not_encrypted_needs_permission_too(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, slots: Slots, tmp_path: Path
) -> None:
    slots.install(write_encrypted(heavy, tmp_path, device))
    with pytest.raises(SlotError, match="--allow-plain"):
        slots.install(write(heavy, tmp_path))
    assert slots.load(MODEL).state.active.encrypted  # type: ignore[union-attr]


def test_encrypted_package_replaces_the_same_version_in_the_clear(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, slots: Slots, tmp_path: Path
) -> None:
    plain = write(heavy, tmp_path)
    slots.install(plain)
    slots.install(write_encrypted(heavy, tmp_path, device))
    assert slots.load(MODEL).state.active.encrypted  # type: ignore[union-attr]
    assert find_plaintext(tmp_path, heavy[1]) == []


def test_failing_encrypted_version_goes_back_to_the_plain_one_before(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, slots: Slots, tmp_path: Path
) -> None:
    slots.install(write(heavy, tmp_path))
    slots.begin_start(MODEL).package.close()
    slots.confirm(MODEL, "1.0.0")
    slots.install(write_encrypted(heavy, tmp_path, device, "2.0.0"))
    choice = slots.reject(MODEL, "2.0.0", "failed its self-test")
    assert choice is not None
    choice.package.close()
    assert choice.version == "1.0.0"


def test_rebuilt_state_knows_what_is_encrypted(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, slots: Slots, tmp_path: Path
) -> None:
    slots.install(write_encrypted(heavy, tmp_path, device))
    (tmp_path / "state" / "models" / MODEL / "state.json").unlink()
    with pytest.raises(SlotError, match="--allow-plain"):
        slots.install(write(heavy, tmp_path, "2.0.0"))


def test_process_that_holds_plaintext_writes_no_core(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, tmp_path: Path
) -> None:
    path = write_encrypted(heavy, tmp_path, device)
    program = (
        "import resource, sys; from pathlib import Path;"
        "from edgekit_runtime.package.archive import read_unverified_manifest;"
        "read_unverified_manifest(Path(sys.argv[1]));"
        "print(Path('/proc/self/coredump_filter').read_text().strip());"
        "print(*resource.getrlimit(resource.RLIMIT_CORE))"
    )
    limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (limit, limit)),
    )
    # Of 1 byte, where that is allowed: 0 does not hold where cores go to a program.
    expected = str(1 if limit == resource.RLIM_INFINITY else min(limit, 1))
    assert done.stdout.split() == ["00000000", expected, expected]


def test_closed_package_frees_its_memory(
    heavy: tuple[PackageMaker, bytes], device: DeviceKey, tmp_path: Path
) -> None:
    path = write_encrypted(heavy, tmp_path, device)
    package = read_package(path, heavy[0].trust)
    shared = package.share()
    package.close()
    assert np.frombuffer(shared.read("golden/x.bin"), np.uint8).tolist() == [0, 1, 2, 3]
    assert _count_memory_files() > 0
    shared.close()
    assert _count_memory_files() == 0


def _count_memory_files() -> int:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            links.append(path.readlink().name)
    return sum("edgekit-decrypted" in link for link in links)
