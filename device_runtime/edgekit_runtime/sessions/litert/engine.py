"""Imports the LiteRT engine, and loads model files into its interpreter.

The engine prints a line to standard error when a process opens its first session. This module suppresses it.
"""

import contextlib
import importlib
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from edgekit_runtime.errors import BackendError
from edgekit_runtime.system.engines import EngineMissingError
from edgekit_runtime.system.install_hint import install_command
from edgekit_runtime.system.mapped_file import parts
from edgekit_runtime.system.resource_errors import check_lack

_STDERR: Final = 2
_first = threading.Lock()
_greeted = threading.Event()


def find_engine() -> ModuleType:
    """Import and return the module with the interpreter, from ai-edge-litert or else from tflite-runtime.

    Raises:
        EngineMissingError: Both imports failed. The message contains both reasons.
    """
    try:
        return importlib.import_module("ai_edge_litert.interpreter")
    except ImportError as first:
        try:
            return importlib.import_module("tflite_runtime.interpreter")
        except ImportError as second:
            raise EngineMissingError(
                f"backend 'litert' needs ai-edge-litert or tflite-runtime ({first}; {second}):"
                f" {install_command('litert')}"
            ) from second


def load_interpreter(model: bytes | memoryview | Path, *, threads: int | None, xnnpack: bool) -> Any:
    """Return an interpreter that has loaded `model` and allocated its tensors.

    Args:
        model: The content or path of a `.tflite` file. The interpreter keeps a copy of the content.
        threads: The number of threads per inference, at least 1, or None for the default of the engine.
        xnnpack: Whether to use XNNPACK for the operators that it supports.

    Raises:
        EngineMissingError: No engine is installed.
        BackendError: The engine refused the model.
    """
    engine = find_engine()
    resolvers = engine.OpResolverType
    resolver = resolvers.AUTO if xnnpack else resolvers.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    try:
        # Always from bytes: the engine would keep a file mapped, and a change to the file while the session
        # lives would change the model, or end the process.
        content = model.read_bytes() if isinstance(model, Path) else _copy(model)
        with _quiet_first_time() if xnnpack else contextlib.nullcontext():
            interpreter = engine.Interpreter(
                model_content=content, num_threads=threads, experimental_op_resolver_type=resolver
            )
            interpreter.allocate_tensors()
    except Exception as cause:  # bindings raise any error of the C++ side and pybind11
        check_lack(cause, "backend 'litert': the model cannot be given to the engine")
        raise BackendError(f"backend 'litert': the engine refused the model: {cause}") from cause
    return interpreter


def _copy(model: bytes | memoryview) -> bytes:
    if isinstance(model, bytes):
        return model
    copied = io.BytesIO()
    copied.writelines(parts(model))
    return copied.getvalue()  # its own buffer, no further copy


@contextlib.contextmanager
def _quiet_first_time() -> Iterator[None]:
    """Suppress the standard error of the process until the first model is loaded.

    Output of other threads is lost during this time, so this is done only once, not for every session.
    """
    with _first:
        if not _greeted.is_set():
            with _dropped_stderr():
                yield
            _greeted.set()
            return
    yield


@contextlib.contextmanager
def _dropped_stderr() -> Iterator[None]:
    try:
        saved = os.dup(_STDERR)
    except OSError:  # closed, as in some services: there is nothing to drop
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device, not a path of ours
            os.dup2(nowhere.fileno(), _STDERR)
        yield
    finally:
        os.dup2(saved, _STDERR)
        os.close(saved)
