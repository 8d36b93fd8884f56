"""Creates a Debian root folder for arm64. Packages are unpacked, but their maintainer scripts are not run.

The scripts would take nearly half an hour on an emulated processor. `recipe.FILES` and `recipe.LINKS` replace
them, and systemd creates the rest at the first boot.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from edgekit_hil.images import recipe
from edgekit_hil.images.programs import run_checked
from edgekit_runtime.errors import BenchError

_MERGED: Final = ("bin", "sbin", "lib")
_PLATFORMS: Final = [f"manylinux_2_{minor}" for minor in (36, 34, 31, 28, 27, 26, 17)] + ["manylinux2014"]


def make_root(root: Path, packages: Sequence[Path], show: Callable[[str], None]) -> None:
    """Unpack packages into the empty folder `root`, and configure it.

    Raises:
        BenchError: A package is damaged, or the disk is full.
    """
    for name in _MERGED:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for number, package in enumerate(packages, 1):
        show(f"unpacking packages: {number} of {len(packages)}")
        unpack(package, root)
    shutil.copy(root / "usr/share/base-passwd/passwd.master", root / "etc/passwd")
    shutil.copy(root / "usr/share/base-passwd/group.master", root / "etc/group")
    shutil.copy(root / "usr/share/libc-bin/nsswitch.conf", root / "etc/nsswitch.conf")
    for name in recipe.FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, text in recipe.FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, to in recipe.LINKS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(to)
    (root / "root").chmod(0o700)
    (root / "root/.ssh").chmod(0o700)


def unpack(package: Path, root: Path) -> None:
    """Unpack a `.deb` into a root whose `/bin`, `/sbin` and `/lib` are links into `/usr`.

    Raises:
        BenchError: The package is damaged, or the disk is full.
    """
    tar = ["tar", "--extract", "--keep-directory-symlink", f"--directory={root}"]
    tar += [f"--exclude=./{name}/*" for name in recipe.EXCLUDED]
    content = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], check=False, capture_output=True)
    unpacked = subprocess.run(tar, check=False, input=content.stdout, capture_output=True)
    if content.returncode or unpacked.returncode:
        message = (content.stderr + unpacked.stderr).decode(errors="replace").strip()
        raise BenchError(f"{package.name} cannot be unpacked: {message[-300:]}")


def find_python(root: Path) -> str:
    """Return the Python version of the root, such as `3.11`."""
    return (root / "usr/bin/python3").readlink().name.removeprefix("python")


def compile_modules(root: Path, python: str) -> None:
    """Compile the Python modules of a root, so that they load faster.

    `python` is the Python version of the root, such as `3.11`. If this process has another version, nothing
    is compiled.
    """
    if python == f"{sys.version_info.major}.{sys.version_info.minor}":
        names = (f"usr/lib/python{python}", "usr/lib/python3", f"usr/local/lib/python{python}")
        words = [sys.executable, "-m", "compileall", "-q", "-j", "0", "-s", str(root), "-p", "/"]
        # Modules of other versions of Python, and templates, do not compile.
        subprocess.run([*words, *(str(root / name) for name in names)], check=False, capture_output=True)


def install_wheels(
    requirements: Sequence[str], python: str, folder: Path, *, are_pinned: bool = False
) -> None:
    """Install wheels for arm64 into `folder` with the pip of this machine.

    Args:
        requirements: The lines of a pip requirements file.
        python: The Python version, such as `3.11`.
        folder: The folder to install into.
        are_pinned: Whether the lines include all dependencies with their hashes. Otherwise pip adds
            dependencies.

    Raises:
        BenchError: The package index has no such wheel, or does not answer.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--root-user-action=ignore", "--only-binary=:all:", "--no-compile", "--python-version", python]
    pip += ["--target", str(folder)]
    pip += [word for name in _PLATFORMS for word in ("--platform", f"{name}_{recipe.MACHINE}")]
    pip += ["--no-deps", "--require-hashes"] if are_pinned else []
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements))
        file.flush()
        run_checked([*pip, "--requirement", file.name])
