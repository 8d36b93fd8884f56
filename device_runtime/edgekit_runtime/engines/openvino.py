"""OpenVINO: runs ONNX models on the CPU."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.system.engines import Engine, Installation, SettingsToTry, register

if TYPE_CHECKING:
    from edgekit_runtime.sessions.session import Session


def _open_model(
    model: bytes | memoryview, options: Mapping[str, JsonValue], threads: int | None
) -> "Session":
    from edgekit_runtime.sessions.openvino import OpenVinoOptions, OpenVinoSession
    from edgekit_runtime.sessions.options import read_options

    return OpenVinoSession(model, read_options(OpenVinoOptions, OPENVINO.name, options, threads))


def _tuning_options(threads: Sequence[int]) -> SettingsToTry:
    return [{"threads": count} for count in threads]


OPENVINO: Final = register(
    Engine(
        name="openvino",
        title="OpenVINO",
        installation=Installation(
            modules=("openvino",),
            distributions=("openvino",),
            extra="openvino",
            host_extra="openvino",
            pinned_list="device-openvino.txt",
        ),
        open_model=_open_model,
        platform="onnx_openvino",
        file_format="onnx",
        tuning_options=_tuning_options,
    )
)
