"""Engines that take this processor for one with AVX2, without AVX-512 and VNNI: other kernels, one clock.

    python benchmarks/hidden_vnni.py FOLDER COMMAND...      # runs a command in which the engines are such

Engines ask the processor by the instruction CPUID, which no setting hides. So copies of their libraries have
a breakpoint in its place, and a library that is loaded first answers it. Needs gcc and objdump. The copies
stay in FOLDER for the next time.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_ENGINES: Final = {
    "onnxruntime": ("capi/onnxruntime_pybind11_state*.so",),
    "ai_edge_litert": ("libpywrap_litert_common.so", "libLiteRt.so"),
    "openvino": ("libs/libopenvino.so.*", "libs/libopenvino_intel_cpu_plugin.so"),
}
_CPUID, _BREAKPOINT = b"\x0f\xa2", b"\xcc\x90"
_SOURCE: Final = Path(__file__).parent / "peers" / "hidden_vnni.c"


def hide_vnni(folder: Path) -> dict[str, str]:
    """Return the variables with which engines find copies of themselves in `folder`, made on first use."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        _copy_engines(made)
        with suppress(OSError):  # another process was faster
            made.rename(folder)
        shutil.rmtree(made, ignore_errors=True)
    paths = [str(folder / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"LD_PRELOAD": str(folder / "hidden_vnni.so"), "PYTHONPATH": os.pathsep.join(paths)}


def _copy_engines(folder: Path) -> None:
    packages = folder / "packages"
    for name, patterns in _ENGINES.items():
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        shutil.copytree(Path(spec.origin).parent, packages / name)
        for pattern in patterns:
            for library in (packages / name).glob(pattern):
                _patch(library)
    command = ["gcc", "-O2", "-shared", "-fPIC", "-o", folder / "hidden_vnni.so", _SOURCE]
    subprocess.run(command, check=True)


def _patch(library: Path) -> None:
    """Replace each CPUID instruction of a library by a breakpoint."""
    content = bytearray(library.read_bytes())
    sections = subprocess.run(["objdump", "-h", library], capture_output=True, text=True, check=True).stdout
    text = re.search(r"\.text +\w+ +(\w+) +\w+ +(\w+)", sections)
    assert text is not None
    offset = int(text[2], 16) - int(text[1], 16)
    command = ["objdump", "-d", "-j", ".text", "--no-show-raw-insn", library]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        for line in listing.stdout:
            if line.endswith("\tcpuid\n") or "\tcpuid " in line:
                position = int(line.partition(":")[0], 16) + offset
                assert content[position : position + 2] == _CPUID
                content[position : position + 2] = _BREAKPOINT
    library.write_bytes(content)


if __name__ == "__main__":
    os.environ.update(hide_vnni(Path(sys.argv[1]).absolute()))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606  # the caller's command
