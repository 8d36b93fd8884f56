"""Finds the engines that are installed on this device, without an import, which would take memory."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from edgekit_runtime.errors import BackendError
from edgekit_runtime.system.install_hint import install_command

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP: Final = "edgekit.backends"


class EngineMissingError(BackendError):
    """The engine of a backend cannot be imported; another backend may be tried."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """One of our backends, imported when used: each needs an engine, and a device has one or two engines.

    Attributes:
        module, function: module and function that open a package.
        engines: Python packages of engines, of which it needs one.
        advice: how to install one.
    """

    module: str
    function: str
    engines: tuple[str, ...]
    advice: str


BUILT_IN: Final[Mapping[str, BuiltIn]] = {
    "ort": BuiltIn("edgekit_runtime.sessions.ort", "open_ort", ("onnxruntime",), install_command("device")),
    "offload": BuiltIn(
        "edgekit_runtime.offload.backend", "open_offload", ("onnxruntime",), install_command("device")
    ),
    "tensorrt": BuiltIn(
        "edgekit_runtime.sessions.tensorrt",
        "open_tensorrt",
        ("tensorrt",),
        "on a Jetson it comes with JetPack: apt-get install python3-libnvinfer",
    ),
    "litert": BuiltIn(
        "edgekit_runtime.sessions.litert.session",
        "open_litert",
        ("ai_edge_litert", "tflite_runtime"),
        install_command("litert"),
    ),
}


def check_backends(backends: Sequence[str], where: str) -> None:
    """Check that an engine is installed here for one of `backends`.

    This does not detect an installed engine that cannot be imported.

    Raises:
        EngineMissingError: no engine is installed; the message says what to install for each.
    """
    lacks = [_find_lack(backend) for backend in backends]
    if all(lacks):
        raise EngineMissingError(f"{where}: no engine for it is installed here: {'; or '.join(lacks)}")


def list_engines() -> tuple[str, ...]:
    """Return the built-in backends with an installed engine."""
    return tuple(sorted(backend for backend in BUILT_IN if not _find_lack(backend)))


def find_entry_point(name: str) -> "EntryPoint":
    """Return the entry point of another distribution's backend.

    Raises:
        EngineMissingError: no distribution offers it.
    """
    from importlib.metadata import entry_points  # takes 10 ms and a megabyte, which few need

    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        if entry_point.name == name:
            return entry_point
    raise EngineMissingError(
        f"no backend '{name}' here; install a distribution that offers the entry point '{name}' in the group"
        f" '{ENTRY_POINT_GROUP}', or a package with a backend that is here ({', '.join(BUILT_IN)})"
    )


def _find_lack(backend: str) -> str:
    """Return what to install for a backend, or an empty text."""
    built_in = BUILT_IN.get(backend)
    if built_in is None:
        try:
            find_entry_point(backend)
        except EngineMissingError as cause:
            return str(cause)
    elif not any(importlib.util.find_spec(engine) for engine in built_in.engines):
        return f"backend '{backend}' needs {' or '.join(built_in.engines)}; {built_in.advice}"
    return ""
