"""The TensorRT backend, which runs ONNX models on an NVIDIA GPU with engines that are built on the device.

A package contains no engine, because an engine works only with one version of TensorRT and one GPU. The
device builds the engine once, in a background process. Until it is ready, the fallback of the package runs.
"""

import functools
import hashlib
import importlib
import logging
from types import ModuleType

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.sessions.backends import open_choice
from edgekit_runtime.sessions.options import read_options
from edgekit_runtime.sessions.selftest import read_golden
from edgekit_runtime.sessions.tensorrt.build import build_engines
from edgekit_runtime.sessions.tensorrt.cache import (
    EngineCache,
    EngineKey,
    read_power_mode,
)
from edgekit_runtime.sessions.tensorrt.cuda import Cuda
from edgekit_runtime.sessions.tensorrt.executor import EngineExecutor
from edgekit_runtime.sessions.tensorrt.options import TensorRtOptions
from edgekit_runtime.sessions.tensorrt.prepare import BuildJob, Machine, prepare
from edgekit_runtime.sessions.tensorrt.session import EngineState, TensorRtSession
from edgekit_runtime.system.engines import EngineMissingError
from edgekit_runtime.system.install_hint import install_command
from edgekit_runtime.system.paths import find_cache_folder

__all__ = [
    "EngineState",
    "Machine",
    "TensorRtOptions",
    "TensorRtSession",
    "find_machine",
    "open_on",
    "open_tensorrt",
]

_logger = logging.getLogger(__name__)


def open_tensorrt(package: OpenedPackage, choice: BackendChoice, threads: int | None) -> TensorRtSession:
    """Return a session for the artifact that `choice` names, see `OpenBackend`.

    Until the TensorRT engine is ready, the session runs the fallback of `choice`. If no fallback can run
    here, this call waits for the TensorRT engine.

    Raises:
        EngineMissingError: This machine has no TensorRT or no GPU.
        BackendError: An option is invalid, the fallback refused the model, or there is no fallback and no
            engine could be built.
    """
    return open_on(find_machine(), package, choice, threads)


def open_on(
    machine: Machine, package: OpenedPackage, choice: BackendChoice, threads: int | None
) -> TensorRtSession:
    """Return a session on `machine`, see `open_tensorrt`."""
    options = read_options(TensorRtOptions, "tensorrt", choice.options)
    model = bytes(package.read(choice.artifact))
    key = EngineKey(
        model_sha256=hashlib.sha256(model).hexdigest(),
        tensorrt=machine.version,
        gpu=machine.gpu.name,
        compute_capability=machine.gpu.compute_capability,
        power_mode=machine.power_mode,
        options=encode_json(options.to_json()).decode(),
    )
    timings = () if options.timing_cache is None else (bytes(package.read(options.timing_cache)),)
    manifest = package.manifest
    job = BuildJob(
        key=key,
        model=model,
        options=options,
        golden=read_golden(package),
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        timings=timings,
        local_key=package.local_key,
    )
    fallback = None
    if choice.fallback is not None:
        try:
            fallback = open_choice(package, choice.fallback, options.threads if threads is None else threads)
        except EngineMissingError as cause:
            _logger.warning("%s; waiting for TensorRT's engine", cause)
    return TensorRtSession(
        manifest.inputs, manifest.outputs, fallback, functools.partial(prepare, job, machine)
    )


def find_machine() -> Machine:
    """Return the TensorRT library, the GPU and the cache of engines of this device.

    Raises:
        EngineMissingError: This machine has no TensorRT or no GPU.
    """
    trt = _find_tensorrt()
    cuda = Cuda()
    return Machine(
        version=trt.__version__,
        gpu=cuda.gpu,
        power_mode=read_power_mode(),
        cache=EngineCache(find_cache_folder()),
        build=build_engines,
        load=lambda plan: EngineExecutor(trt, cuda, plan),
    )


def _find_tensorrt() -> ModuleType:
    try:
        return importlib.import_module("tensorrt")
    except ImportError as cause:
        raise EngineMissingError(
            f"backend 'tensorrt' needs TensorRT 10 ({cause}); on a Jetson it comes with JetPack:"
            " apt-get install python3-libnvinfer, and make the environment with --system-site-packages;"
            f" {install_command('jetson')} brings the rest"
        ) from cause
