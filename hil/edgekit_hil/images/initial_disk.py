"""Finds the kernel modules of an image, and writes the initial RAM disk (initrd) that loads them.

Source: Documentation/driver-api/early-userspace/buffer-format.rst of Linux ("newc").
"""

import lzma
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from edgekit_hil.images import recipe
from edgekit_runtime.errors import BenchError

_DEPENDS: Final = re.compile(rb"\0depends=([^\0]*)\0")
_FOLDERS: Final = ("bin", "dev", "proc", "root", "lib")
_FOLDER_MODE: Final = 0o40755
_PROGRAM_MODE: Final = 0o100755


class KernelModules:
    """The modules of a kernel.

    Attributes:
        release: The kernel release, such as `6.1.0-56-arm64`.
    """

    def __init__(self, unpacked: Path) -> None:
        """Find the modules in an unpacked kernel package."""
        (folder,) = (unpacked / "lib/modules").iterdir()
        self.release, self._folder = folder.name, folder
        files = (path for path in folder.rglob("*.ko*") if path.suffix in (".ko", ".xz"))
        self._modules = {_name(path): path for path in files}

    def close_over(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return modules and their dependencies. Each module comes after the modules that it depends on.

        Returns:
            The content of each module by its path in the folder of modules.

        Raises:
            BenchError: The kernel has no such module.
        """
        modules: dict[str, bytes] = {}

        def add(name: str) -> None:
            path = self._modules.get(name)
            if path is None:
                raise BenchError(f"the kernel {self.release} has no module {name!r}")
            module_path = str(path.relative_to(self._folder)).removesuffix(".xz")
            if module_path not in modules:
                content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
                depends = _DEPENDS.search(content)
                for needed in depends[1].decode().split(",") if depends and depends[1] else ():
                    add(needed.replace("-", "_"))
                modules[module_path] = content

        for name in names:
            add(name.replace("-", "_"))
        return modules

    def install(self, modules: Mapping[str, bytes], root: Path) -> None:
        """Write modules, and the lists that `depmod` needs, into a root folder."""
        to = root / "usr/lib/modules" / self.release
        for module_path, content in modules.items():
            (to / module_path).parent.mkdir(parents=True, exist_ok=True)
            (to / module_path).write_bytes(content)
        for path in self._folder.glob("modules.*"):
            shutil.copy(path, to)


def write_initrd(path: Path, busybox: Path, modules: Mapping[str, bytes]) -> None:
    """Write an initrd that loads `modules` in order and switches to the root on the disk."""
    members: list[tuple[str, int, bytes]] = [(name, _FOLDER_MODE, b"") for name in _FOLDERS]
    members.append(("bin/busybox", _PROGRAM_MODE, busybox.read_bytes()))
    members.append(("init", _PROGRAM_MODE, recipe.INIT.encode()))
    loaded = {f"lib/{module_path.rpartition('/')[2]}": content for module_path, content in modules.items()}
    members.append(("modules", _PROGRAM_MODE, "\n".join(f"/{name}" for name in loaded).encode()))
    members += [(name, _PROGRAM_MODE, content) for name, content in loaded.items()]
    with path.open("wb") as file:
        for part in _write_cpio(members):
            file.write(part)


def _write_cpio(members: Sequence[tuple[str, int, bytes]]) -> Iterator[bytes]:
    for number, (name, mode, content) in enumerate((*members, ("TRAILER!!!", 0, b"")), 1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        yield head + b"\0" * (-len(head) % 4)
        yield content + b"\0" * (-len(content) % 4)


def _name(path: Path) -> str:
    return path.name.removesuffix(".xz").removesuffix(".ko").replace("-", "_")
