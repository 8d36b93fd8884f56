"""Images of ARM64 systems: what is in them, and what they need."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgekit_hil.drivers.userland import require_userland
from edgekit_hil.images import recipe, root_folder
from edgekit_hil.images.debian_archive import DebianArchive
from edgekit_hil.images.image_cache import Image, find_image, make_image
from edgekit_hil.images.initial_disk import KernelModules, write_initrd
from edgekit_hil.images.root_folder import unpack
from edgekit_host.pinned_packages import read_pinned
from edgekit_runtime.errors import BenchError, BenchUnavailableError


def make_modules(folder: Path, depends: dict[str, str]) -> KernelModules:
    drivers = folder / "lib/modules/6.1.0-test/kernel/drivers"
    drivers.mkdir(parents=True)
    for name, needed in depends.items():
        (drivers / f"{name}.ko").write_bytes(b"\x7fELF\0license=GPL\0depends=%b\0" % needed.encode())
    return KernelModules(folder)


def read_cpio(content: bytes) -> dict[str, tuple[int, bytes]]:
    """Return name -> (mode, content) of an archive in the form `newc`."""
    members, at = {}, 0
    while True:
        assert content[at : at + 6] == b"070701"
        fields = [int(content[at + 6 + 8 * index : at + 14 + 8 * index], 16) for index in range(13)]
        begin = at + 110
        name = content[begin : begin + fields[11] - 1].decode()
        begin = (begin + fields[11] + 3) & ~3
        at = (begin + fields[6] + 3) & ~3
        if name == "TRAILER!!!":
            return members
        members[name] = (fields[1], content[begin : begin + fields[6]])


def test_modules_come_after_those_that_they_depend_on(tmp_path: Path) -> None:
    modules = make_modules(tmp_path, {"dm-flakey": "dm-mod", "dm-mod": "dax", "dax": "", "unused": ""})

    found = [Path(place).stem for place in modules.close_over(["dm-flakey", "dax"])]

    assert found == ["dax", "dm-mod", "dm-flakey"]


def test_module_that_the_kernel_lacks_is_refused_by_name(tmp_path: Path) -> None:
    modules = make_modules(tmp_path, {"ext4": "jbd2"})

    with pytest.raises(BenchError, match=r"kernel 6\.1\.0-test has no module 'jbd2'"):
        modules.close_over(["ext4"])


def test_initrd_holds_its_program_and_the_modules_in_their_order(tmp_path: Path) -> None:
    modules = make_modules(tmp_path, {"ext4": "jbd2", "jbd2": ""})
    (tmp_path / "busybox").write_bytes(b"program")

    write_initrd(tmp_path / "initrd", tmp_path / "busybox", modules.close_over(["ext4"]))

    members = read_cpio((tmp_path / "initrd").read_bytes())
    assert members["init"] == (0o100755, recipe.INIT.encode())
    assert members["bin/busybox"] == (0o100755, b"program")
    assert members["modules"][1] == b"/lib/jbd2.ko\n/lib/ext4.ko"
    assert members["lib/ext4.ko"][1].endswith(b"depends=jbd2\0")


def test_newer_version_of_a_package_is_another_image() -> None:
    assert recipe.hash_recipe("bash_5.2_arm64.deb") != recipe.hash_recipe("bash_5.3_arm64.deb")


def test_changed_pins_of_an_engine_make_another_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recipe.hash_recipe()
    changed = tmp_path / "device.txt"
    changed.write_text("onnxruntime==1.0.0\n")
    monkeypatch.setattr(recipe, "find_list", lambda engine: changed)

    assert recipe.hash_recipe() != before


def test_image_gets_the_packages_of_a_device_by_their_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str | Path], str]] = []
    monkeypatch.setattr(
        root_folder, "run_checked", lambda words: seen.append((words, Path(words[-1]).read_text()))
    )
    pinned = read_pinned("ort", recipe.MACHINE, "3.11")

    root_folder.install_wheels(pinned, "3.11", Path("root"), are_pinned=True)

    ((words, lines),) = seen
    assert "--require-hashes" in words
    assert lines.splitlines() == pinned
    assert any(line.startswith("onnxruntime==1.24.4 --hash=sha256:") for line in pinned)


def test_image_in_use_is_not_removed(tmp_path: Path) -> None:
    image = Image(tmp_path / "image")
    image.root.mkdir(parents=True)

    with image.hold(), pytest.raises(BenchError, match="another process makes or uses an image"):
        image.remove()
    assert image.root.exists()
    image.remove()
    assert not image.folder.exists()


@pytest.mark.parametrize(("booted", "what"), [(False, "no ARM64 image"), (True, "no booted ARM64 image")])
def test_missing_image_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, booted: bool, what: str
) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))

    with pytest.raises(BenchUnavailableError, match=f"^{what} .* run `edgekit hil image` first"):
        find_image(booted=booted)


def test_image_without_a_program_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(BenchUnavailableError, match=r"qemu-img.* is missing: apt-get install .*qemu-utils"):
        make_image(print)


def test_image_on_a_full_disk_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("edgekit_hil.images.image_cache.require", lambda *_: None)
    monkeypatch.setattr(DebianArchive, "update", lambda _: None)
    monkeypatch.setattr(DebianArchive, "find", lambda *_: ["bash_5.2_arm64.deb"])
    monkeypatch.setattr(DebianArchive, "fetch", lambda *_: pytest.fail("packages are fetched"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))

    with pytest.raises(BenchUnavailableError, match=r"1024 MiB are free in .*an image needs 2560 MiB"):
        make_image(print)


def test_image_without_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(BenchUnavailableError, match="needs root"):
        make_image(print)


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("Ubuntu|deb http://a jammy main", "apt has those of Ubuntu here: use a machine or a container"),
        ("|deb http://a own main", "run `apt-get update` first"),
        ("", "run `apt-get update` first"),
    ],
)
def test_machine_without_lists_of_debian_is_refused_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, message: str
) -> None:
    monkeypatch.setattr("edgekit_hil.images.debian_archive.run_checked", lambda _: printed)

    with pytest.raises(BenchError, match=message):
        DebianArchive(tmp_path).update()


@pytest.mark.parametrize(
    ("user", "release", "message"),
    [
        (1000, "6.12.1", "the ARM64 userland needs root"),
        (0, "6.6.51+rpt-rpi-v8", "needs Linux 6.7 or newer, this is 6.6.51"),
        (0, "5.15.148-tegra", "this is 5.15.148-tegra"),
    ],
)
def test_machine_that_cannot_run_the_userland_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, user: int, release: str, message: str
) -> None:
    monkeypatch.setattr("edgekit_hil.drivers.userland.require", lambda *_: None)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))

    with pytest.raises(BenchUnavailableError, match=message):
        require_userland()


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_damaged_package_is_refused_by_name(tmp_path: Path) -> None:
    package = tmp_path / "bash_5.2_arm64.deb"
    package.write_bytes(b"!<arch>\nnot one")

    with pytest.raises(BenchError, match=r"bash_5\.2_arm64\.deb cannot be unpacked"):
        unpack(package, tmp_path)
