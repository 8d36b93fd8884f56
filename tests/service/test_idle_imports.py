"""What a service does not use takes no memory: it is not imported at all."""

from pathlib import Path

import numpy as np
from tests.runtime.conftest import PackageMaker
from tests.service.serve_parts import Served
from tests.waiting import bounded

from edgekit_runtime import Client

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
    "email",
    "importlib.metadata",
    "logging.handlers",
    "tempfile",
    "urllib.request",
    "edgekit_runtime.client",
    "edgekit_runtime.trust.trust_store",
    "edgekit_runtime.power.governor.governor",
    "edgekit_runtime.service.governor.profile",
    "edgekit_runtime.service.workers.isolated_model",
    "edgekit_runtime.service.observability.json_log",
    "edgekit_runtime.service.http.tls",
    "edgekit_runtime.sessions.litert.session",
    "edgekit_runtime.sessions.tensorrt",
    "edgekit_runtime.autotune.tournament",
    "edgekit_runtime.tasks",
    "edgekit_runtime.preprocessing.images",
    "edgekit_runtime.preprocessing.wav",
    "edgekit_runtime.pipelines",
    "edgekit_runtime.package.pipeline",
    "edgekit_runtime.service.api.streams",
    "edgekit_runtime.service.grpc",
    "edgekit_runtime.service.rollout",
    "edgekit_runtime.service.scheduling.sequence_lane",
    "edgekit_runtime.service.streams",
    "numpy.typing",
    "numpy.fft",
    "numpy.ma",
    "numpy.random",
)


def test_service_imports_nothing_that_it_does_not_use(folder: Path, maker: PackageMaker) -> None:
    maker.write(folder / "linear.edgepkg", labels=None)  # which are for answers
    service = Served(folder, command=("-c", SERVE))
    with bounded(service.process):
        assert "ready at" in service.wait_ready()
        with Client(str(service.socket_path)) as client:
            client.infer("linear", {"x": np.zeros((1, 4), np.float32)})
        libraries = Path(f"/proc/{service.process.pid}/maps").read_text()
        code, printed = service.end()
    assert code == 0
    imported = set(printed.split())
    assert "edgekit_runtime.service.server" in imported
    assert {
        name for name in imported if any(name == one or name.startswith(f"{one}.") for one in UNUSED)
    } == set()
    assert "_rust.abi3.so" not in libraries
