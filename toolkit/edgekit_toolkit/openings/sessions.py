"""Sessions of this host's engines for the toolkit.

A child opens each model first (`model_opening`), whatever the model is: the user's, a rewritten graph, a
form, a part of it, or a program of ours. Code with other settings than a device's calls `check_opening`.
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
    """Return the session of a model without external data, after a trial with `feeds` in a child process.

    Raises:
        BackendError: onnxruntime refuses the model, or would end this process.
    """
    options = options or OrtOptions()
    stated = asdict(options).items()
    differing = {name: value for name, value in stated if name != "threads" and value != _DEFAULTS[name]}
    check_opening("ort", content, differing, () if feeds is None else (feeds,))
    return OrtSession(content, options)


def open_litert(content: bytes, options: "LiteRtOptions | None" = None) -> "LiteRtSession":
    """Return LiteRT's session of a model, after a trial in a child process.

    Raises:
        BackendError: LiteRT refuses the model, or would end this process.
        EngineMissingError: LiteRT is not installed.
    """
    from edgekit_runtime.sessions.litert.session import LiteRtSession

    check_opening("litert", content, {})
    return LiteRtSession(content, options)


def open_openvino(content: bytes, threads: int, options: Mapping[str, JsonValue]) -> "OpenVinoSession":
    """Return OpenVINO's session of a model, after a trial in a child process.

    Args:
        content: ONNX model.
        threads: threads of one inference.
        options: other `OpenVinoOptions`.

    Raises:
        BackendError: OpenVINO refuses the model, or would end this process.
        EngineMissingError: OpenVINO is not installed, or cannot be loaded.
    """
    from edgekit_runtime.sessions.openvino import OpenVinoOptions, OpenVinoSession

    check_opening("openvino", content, options)
    return OpenVinoSession(content, read_options(OpenVinoOptions, "openvino", options, threads))
