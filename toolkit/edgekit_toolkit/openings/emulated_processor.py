"""Runs models on an emulated Cortex-A76, which has float16 arithmetic that this processor lacks.

The emulator is qemu-user. The engine and Python come from the ARM64 image of `edgekit hil image`, so the
engine has the same release as on devices.
"""

import atexit
import fcntl
import shutil
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

import edgekit_runtime
import edgekit_toolkit
from edgekit_runtime.errors import BackendError
from edgekit_runtime.system.child_process import JsonChild
from edgekit_runtime.system.engines import EngineMissingError
from edgekit_runtime.system.paths import find_cache_folder
from edgekit_toolkit.openings.emulated_child import from_json, to_json

PROCESSOR: Final = "Cortex-A76, emulated"

_QEMU: Final = "qemu-aarch64-static"
_CPU: Final = "cortex-a76"
_MODULE: Final = "edgekit_toolkit.openings.emulated_child"
_ROOTS: Final = "hil-images/*/root"
_ENGINE: Final = "usr/local/lib/python3.*/dist-packages/ai_edge_litert"
_LIMIT_S: Final = 600.0


def find_emulated_python() -> Path:
    """Return the folder of Python packages in the newest device image.

    Raises:
        EngineMissingError: There is no image, or no emulator.
    """
    folders = [path.parent for root in find_cache_folder().glob(_ROOTS) for path in root.glob(_ENGINE)]
    if not folders or shutil.which(_QEMU) is None:
        raise EngineMissingError(
            "half-precision arithmetic runs on an emulated Cortex-A76 here: install qemu-user-static and run"
            " `edgekit hil image`, or leave out the form"
        )
    return max(folders, key=lambda folder: folder.stat().st_mtime)


class EmulatedProcessor:
    """Runs models in a child process on an emulated Arm processor. The first `run` starts the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: JsonChild | None = None
        self._image: IO[str] | None = None  # locked: an image in use is not removed
        self._content = b""  # of the model that the child has open

    def run(self, engine: str, content: bytes, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs of a model for `feeds`, in the order of the model.

        Raises:
            EngineMissingError: There is no image, or no emulator.
            BackendError: The engine refuses the model or the inputs, or the emulator exited.
        """
        with self._lock:
            if content != self._content:
                with tempfile.NamedTemporaryFile(prefix="edgekit-emulated-") as file:
                    file.write(content)
                    file.flush()
                    self._ask({"engine": engine, "model": file.name})
                self._content = content
            inputs = {name: to_json(np.asarray(value)) for name, value in feeds.items()}
            return [from_json(value) for value in self._ask({"inputs": inputs})["outputs"]]

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        child = self._child = self._child or self._start()
        try:
            child.send(request, _LIMIT_S)
            answer: dict[str, Any] = child.receive(_LIMIT_S)
        except (EOFError, OSError) as cause:
            end = f"ended {child.explain_end()}" if child.wait(1.0) is not None else str(cause)
            self.close()
            raise BackendError(f"the emulated {_CPU} did not run the model: {end}") from cause
        if "refusal" in answer:
            raise BackendError(answer["refusal"])
        return answer

    def close(self) -> None:
        """Stop the child process. The next `run` starts a new process."""
        self._content = b""
        if self._child is not None:
            self._child.close()
            self._child = None
        if self._image is not None:
            self._image.close()
            self._image = None

    def _start(self) -> JsonChild:
        packages = find_emulated_python()
        root = next(folder for folder in packages.parents if folder.name == "root")
        self._image = (root.parent / "versions.txt").open()
        with suppress(OSError):
            fcntl.flock(self._image, fcntl.LOCK_SH | fcntl.LOCK_NB)
        python = root / "usr/bin" / packages.parent.name
        own = {Path(str(module.__file__)).parents[1] for module in (edgekit_runtime, edgekit_toolkit)}
        return JsonChild(
            _MODULE,
            own_session=True,
            python=[_QEMU, "-cpu", _CPU, "-L", str(root), str(python)],
            variables={"PYTHONPATH": ":".join(map(str, (packages, *own))), "PYTHONDONTWRITEBYTECODE": "1"},
        )


EMULATED: Final = EmulatedProcessor()
atexit.register(EMULATED.close)
