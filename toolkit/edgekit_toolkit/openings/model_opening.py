"""Tests in a child process whether an engine crashes when it opens a model.

Engines abort on some models. For example, onnxruntime aborts on quantized values that are read in a branch of
an `If`. A search that opens a hundred forms should skip such a form and continue. So each model is opened in
a child process before this process opens it. All models share one child process, which is restarted after a
crash.
"""

import atexit
import hashlib
import json
import signal
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError
from edgekit_runtime.system.child_process import JsonChild
from edgekit_runtime.system.engines import find_engine

_MODULE: Final = "edgekit_toolkit.openings.child"
_LIMIT_S: Final = 300.0
_END_S: Final = 5.0  # for the exit code of a child that closed its channel
_MAX_REASON: Final = 200  # characters. An engine's last line may be a whole signature of C++
_KILLED: Final = "by SIGKILL: often for lack of memory"

PACKAGE_LIMIT_S: Final = 3600.0
"""The longest time to open and test a package in a child process. An emulated device is slow."""

Feeds = Mapping[str, NDArray[Any]]
SHAPES: Final = "onnx"
"""Stands for onnx's shape inference where an engine is named. Its C++ code can also abort the process."""


class Openings:
    """Opens models in a child process, and stores the result for each model."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: dict[bytes, str] = {}  # digest of a model and its options -> how the child ended
        self._child: JsonChild | None = None

    def check(
        self, engine: str, content: bytes, options: Mapping[str, JsonValue], samples: Sequence[Feeds] = ()
    ) -> None:
        """Open a model in a child process, to check that the engine does not crash.

        The result is cached for each model and its options. No error is raised if the engine refuses the
        model without a crash. The caller gets that error when it opens the model itself.

        Args:
            engine: The name of an engine of this host, or `SHAPES` for the shape inference of onnx.
            content: The content of the model's file.
            options: The backend options, as in a manifest.
            samples: Inputs on which the child process also runs the model. With samples, the model is tested
                again unless an earlier test crashed.

        Raises:
            BackendError: The engine crashed, or did not open the model in time.
        """
        stated = json.dumps([engine, dict(options)], sort_keys=True).encode()
        digest = hashlib.sha256(stated + hashlib.sha256(content).digest()).digest()
        with self._lock:
            if not self._problems.get(digest) and (samples or digest not in self._problems):
                self._problems[digest] = self._open(engine, content, options, samples)
            problem = self._problems[digest]
        if problem:
            raise BackendError(problem)

    def close(self) -> None:
        """Stop the child process. The next `check` starts a new process."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _open(
        self, engine: str, content: bytes, options: Mapping[str, JsonValue], samples: Sequence[Feeds]
    ) -> str:
        """Return how the engine ended the child, or an empty text."""
        with tempfile.TemporaryDirectory(prefix="edgekit-opening-") as folder:
            model, arrays = Path(folder, "model"), Path(folder, "samples.npz")
            model.write_bytes(content)
            if samples:
                np.savez(arrays, *(array for feeds in samples for array in feeds.values()))
            request = {
                "engine": engine,
                "model": str(model),
                "options": dict(options),
                "inputs": [list(feeds) for feeds in samples],
                "arrays": str(arrays),
            }
            end = self._ask(request)
            if end == _KILLED:  # as by a lack of memory, or by the end of the thread that had started it
                end = self._ask(request)
        title = "onnx's inference of shapes" if engine == SHAPES else find_engine(engine).title
        return end and f"{title} ended the process that opened the model, {end}"

    def _ask(self, request: Mapping[str, Any]) -> str:
        """Return how the child ended over a request, or an empty text if it lives."""
        child = self._child = self._child or JsonChild(_MODULE, own_session=True)
        try:
            child.send(request, _LIMIT_S)
        except OSError:  # it had ended before
            self.close()
            child = self._child = JsonChild(_MODULE, own_session=True)
            child.send(request, _LIMIT_S)
        try:
            child.receive(_LIMIT_S)
        except (EOFError, OSError) as cause:
            code = None if isinstance(cause, TimeoutError) else child.wait(_END_S)
            if code is None:
                end = f"after {_LIMIT_S:g} s without an answer"
            else:
                end = _KILLED if code == -signal.SIGKILL else child.explain_end()[:_MAX_REASON]
            self.close()
            return end
        return ""


_openings = Openings()
atexit.register(_openings.close)
check_opening: Final = _openings.check
