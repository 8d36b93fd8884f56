"""TensorRT: runs ONNX models on an NVIDIA GPU. The engine is built on the device."""

from typing import TYPE_CHECKING, Final

from edgekit_runtime.system.engines import Engine, Installation, register

if TYPE_CHECKING:
    from edgekit_runtime.package.archive import OpenedPackage
    from edgekit_runtime.package.manifest import BackendChoice
    from edgekit_runtime.sessions.session import Session


def _open(package: "OpenedPackage", choice: "BackendChoice", threads: int | None) -> "Session":
    from edgekit_runtime.sessions.tensorrt import open_tensorrt

    return open_tensorrt(package, choice, threads)


TENSORRT: Final = register(
    Engine(
        name="tensorrt",
        title="TensorRT",
        installation=Installation(
            modules=("tensorrt",),
            distributions=("tensorrt",),
            advice="on a Jetson it comes with JetPack: apt-get install python3-libnvinfer",
        ),
        open=_open,
        platform="tensorrt_plan",
        file_format="onnx",
        builds_for_s=3600.0,  # large models take tens of minutes on a Jetson Orin Nano
        on_gpu=True,
    )
)
