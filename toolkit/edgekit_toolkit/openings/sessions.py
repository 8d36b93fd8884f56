"""Opens models in the engines that are installed on this host.

Each model is first opened in a child process, see `model_opening`. Code that opens models without these
functions must call `check_opening` first.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.sessions.options import read_options
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.openings.model_opening import Feeds, check_opening

if TYPE_CHECKING:
    from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
    from edgekit_runtime.sessions.openvino import OpenVinoSession

_DEFAULTS = asdict(OrtOptions())


def open_ort(content: bytes, options: OrtOptions | None = None, feeds: Feeds | None = None) -> OrtSession:
    """Open a model without external data in onnxruntime, after a test in a child process.

    Args:
        content: The content of the model's file.
        options: The backend options, or None for the defaults.
        feeds: Inputs on which the child process runs the model, or None to only open the model.

    Raises:
        BackendError: onnxruntime refuses the model or crashes on it.
    """
    options = options or OrtOptions()
    stated = asdict(options).items()
    differing = {name: value for name, value in stated if name != "threads" and value != _DEFAULTS[name]}
    check_opening("ort", content, differing, () if feeds is None else (feeds,))
    return OrtSession(content, options)


def open_litert(content: bytes, options: "LiteRtOptions | None" = None) -> "LiteRtSession":
    """Open a model in LiteRT, after a test in a child process.

    Raises:
        BackendError: LiteRT refuses the model or crashes on it.
        EngineMissingError: LiteRT is not installed.
    """
    from edgekit_runtime.sessions.litert.session import LiteRtSession

    check_opening("litert", content, {})
    return LiteRtSession(content, options)


def open_openvino(content: bytes, threads: int, options: Mapping[str, JsonValue]) -> "OpenVinoSession":
    """Open a model in OpenVINO, after a test in a child process.

    Args:
        content: The content of an ONNX file.
        threads: The number of threads of one inference.
        options: The fields of `OpenVinoOptions` other than `threads`, by name.

    Raises:
        BackendError: OpenVINO refuses the model or crashes on it.
        EngineMissingError: OpenVINO is not installed, or cannot be loaded.
    """
    from edgekit_runtime.sessions.openvino import OpenVinoOptions, OpenVinoSession

    check_opening("openvino", content, options)
    return OpenVinoSession(content, read_options(OpenVinoOptions, "openvino", options, threads))
