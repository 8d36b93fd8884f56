"""onnxruntime: runs ONNX models on the CPU."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.system.engines import Engine, Installation, SettingsToTry, register

if TYPE_CHECKING:
    from edgekit_runtime.package.archive import OpenedPackage
    from edgekit_runtime.package.manifest import BackendChoice
    from edgekit_runtime.sessions.session import Session


def _open(package: "OpenedPackage", choice: "BackendChoice", threads: int | None) -> "Session":
    from edgekit_runtime.sessions.ort import open_ort

    return open_ort(package, choice, threads)


def _open_model(
    model: bytes | memoryview, options: Mapping[str, JsonValue], threads: int | None
) -> "Session":
    from edgekit_runtime.sessions.options import read_options
    from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

    return OrtSession(model, read_options(OrtOptions, ORT.name, options, threads))


def _tuning_options(threads: Sequence[int]) -> SettingsToTry:
    settings: SettingsToTry = [{"threads": count, "spinning": False} for count in threads]
    settings += [{"threads": count, "spinning": True} for count in threads if count > 1]
    return [*settings, {"arena": False}]


ORT: Final = register(
    Engine(
        name="ort",
        title="onnxruntime",
        installation=Installation(
            modules=("onnxruntime",),
            distributions=("onnxruntime", "onnxruntime-gpu"),
            extra="device",
            pinned_list="device.txt",
        ),
        open=_open,
        open_model=_open_model,
        platform="onnx_onnxv1",
        file_format="onnx",
        tuning_options=_tuning_options,
        can_stop_runs=True,
        shares_model=True,
    )
)
