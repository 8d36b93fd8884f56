"""LiteRT: runs `.tflite` models on the CPU."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.system.engines import Engine, Installation, SettingsToTry, register

if TYPE_CHECKING:
    from edgekit_runtime.sessions.session import Session


def _open_model(
    model: bytes | memoryview, options: Mapping[str, JsonValue], threads: int | None
) -> "Session":
    from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
    from edgekit_runtime.sessions.options import read_options

    return LiteRtSession(model, read_options(LiteRtOptions, LITERT.name, options, threads))


def _tuning_options(threads: Sequence[int]) -> SettingsToTry:
    settings: SettingsToTry = [{"threads": count} for count in threads]
    return [*settings, {"xnnpack": False}]


LITERT: Final = register(
    Engine(
        name="litert",
        title="LiteRT",
        installation=Installation(
            modules=("ai_edge_litert", "tflite_runtime"),
            distributions=("ai-edge-litert", "tflite-runtime"),
            extra="litert",
            host_extra="litert-host",
            pinned_list="device-litert.txt",
        ),
        open_model=_open_model,
        platform="litert_tflite",
        file_format="tflite",
        tuning_options=_tuning_options,
    )
)
