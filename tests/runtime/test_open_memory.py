"""What stays in, and passes through, the memory of a process that opens a package."""

import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgekit_runtime import open_session
from edgekit_runtime.errors import SignatureError
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.system.child_process import child_environment
from edgekit_runtime.system.mapped_file import parts
from edgekit_toolkit.packaging.signing_keys import load_signer

MIB = 1 << 20
_OPEN = """
import sys
from pathlib import Path
import numpy as np
import onnxruntime
from edgekit_runtime import open_session
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.verifier_process import VerifyingProcess

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) << 10

path, before = Path(sys.argv[1]), peak()
with VerifyingProcess() as trust:
    read_package(path, trust).close()
read = peak()
session = open_session(path)
session.run({"x": np.zeros((1, 4), np.float32)})
print(read - before, peak() - before, *sys.modules)
"""
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))


def large_model(rows: int) -> bytes:
    """y = x @ w, beside a weight [rows, 256, 1024] that is read in parts of 1 MiB and not run."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((4, 2)).astype(np.float32),
        "unused": rng.random((rows, 256, 1024), np.float32),
    }
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "large",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(made.SerializeToString())


def opened_in_a_process(path: Path) -> tuple[int, int, set[str]]:
    """Growth of the peak by reading the package, and by opening a session too; all modules imported."""
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, str(path)],
        env=child_environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    read, opened, *modules = done.stdout.split()
    return int(read), int(opened), set(modules)


@linux_only
@pytest.mark.usefixtures("own_home")
def test_neither_pages_of_a_package_nor_what_verifies_it_stay_in_the_process(
    maker: Any, tmp_path: Path
) -> None:
    model = large_model(32)
    artifacts = {**maker.artifacts, "model.onnx": model}
    path = tmp_path / "x.edgepkg"
    write_package(path, maker.manifest(artifacts), artifacts, load_signer())
    read, opened, modules = opened_in_a_process(path)
    # A MiB is hashed at a time; the rest is what imports and child processes take.
    assert read < 12 * MIB
    # The engine reads the 32 MiB of the tensor once; the package's pages would be as much again.
    assert opened < len(model) + 20 * MIB
    assert not modules & {"cryptography", "securesystemslib", "edgekit_runtime.trust.trust_store"}


@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("frozen", [False, True])
def test_untrusted_package_is_refused_by_default(
    frozen: bool, maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if frozen:  # its executable is no Python that could be started
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        monkeypatch.setattr(sys, "executable", "/nonexistent")
    path = tmp_path / "x.edgepkg"
    maker.write(path)
    with pytest.raises(SignatureError, match="trusted are: none"):
        open_session(path)


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, 3 * MIB + 5])
def test_parts_are_all_of_a_mapped_file(size: int, tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(size + 1)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[1:]
        assert b"".join(bytes(part) for part in parts(view)) == content[1:]
        assert bytes(view) == content[1:]  # it can be read again
