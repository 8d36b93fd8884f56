"""What a service does not use takes no memory: it is not imported at all."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from tests.service.test_serve_command import folder
from tests.waiting import bounded

import edgekit_runtime
from edgekit_runtime import Client

__all__ = ["folder"]

# Serves as ever, and says at the end what was ever imported.
SERVE = (
    "import sys; from edgekit_runtime.cli import main; code = main(sys.argv[1:]);"
    " print(*sys.modules); sys.exit(code)"
)
UNUSED = (
    "cryptography",  # 9 MB, with the library that it brings
    "securesystemslib",
    "onnx",
    "decimal",  # by `statistics`
    "random",
    "tomllib",
    "multiprocessing",
    "http.client",
    "edgekit_runtime.client",
    "edgekit_runtime.signing",
    "edgekit_runtime.power.governor",
    "edgekit_runtime.service.governing",
    "edgekit_runtime.service.isolated_model",
    "edgekit_runtime.service.logs",
    "edgekit_runtime.service.tls",
    "edgekit_runtime.sessions.litert",
    "edgekit_runtime.sessions.tensorrt",
    "edgekit_runtime.sessions.tournament",
)


def test_service_imports_nothing_that_it_does_not_use(folder: Path) -> None:
    path = folder / "serve.sock"
    service = subprocess.Popen(
        [
            *(sys.executable, "-c", SERVE, "serve", "--package", str(folder / "linear.edgepkg")),
            *("--unix-socket", str(path), "--port", "0"),
        ],
        env={
            **os.environ,
            "EDGEKIT_HOME": str(folder),
            "PYTHONPATH": str(Path(edgekit_runtime.__file__).parents[1]),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with bounded(service):
        assert service.stderr is not None
        assert any("ready at" in line for line in service.stderr)
        with Client(str(path)) as client:
            client.infer("linear", {"x": np.zeros((1, 4), np.float32)})
        libraries = Path(f"/proc/{service.pid}/maps").read_text()
        service.terminate()
        printed, _ = service.communicate()
    imported = set(printed.split())
    assert "edgekit_runtime.service.server" in imported
    assert {
        name for name in imported if any(name == one or name.startswith(f"{one}.") for one in UNUSED)
    } == set()
    assert "_rust.abi3.so" not in libraries
