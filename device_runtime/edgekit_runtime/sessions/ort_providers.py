"""Runs onnxruntime on a GPU with its CUDA or TensorRT provider, or else on the processor.

The wheel `onnxruntime-gpu` contains both providers. Packages were tested on a processor, so a session on a
GPU must pass the self-test of its package before it is used. `$EDGEKIT_PROVIDER` selects the provider:

    auto      CUDA on x86 if onnxruntime supports it, else the processor (the default)
    cpu, cuda, tensorrt     this provider, or the processor if it does not work

Source: onnxruntime, CUDAExecutionProvider and TensorrtExecutionProvider.
"""

import contextlib
import io
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from edgekit_runtime.errors import BackendError
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.ort_products import LOG_FATAL_ONLY, PROBE, X86
from edgekit_runtime.system.paths import find_cache_folder

if TYPE_CHECKING:
    import onnxruntime

PROCESSOR: Final = "cpu"
VARIABLE: Final = "EDGEKIT_PROVIDER"
ProviderList: TypeAlias = Sequence[str | tuple[str, Mapping[str, Any]]]
ON_PROCESSOR: Final[ProviderList] = ("CPUExecutionProvider",)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GpuProvider:
    """A provider of onnxruntime that computes on a GPU.

    Attributes:
        name: name in the variable.
        title: name for people.
        make_options: returns onnxruntime's options for it.
        following: provider of the nodes that it does not take; None for the processor.
    """

    name: str
    title: str
    ort_name: str
    make_options: Callable[[], Mapping[str, Any]]
    following: "_GpuProvider | None" = None


def _make_cuda_options() -> Mapping[str, Any]:
    # TF32 rounds float32 to ten bits. The search for the best convolution runs for each new shape of inputs.
    return {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}


def _make_tensorrt_options() -> Mapping[str, Any]:
    cache = find_cache_folder() / "tensorrt-provider"
    return {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(cache), "trt_fp16_enable": "0"}


_CUDA: Final = _GpuProvider(
    name="cuda", title="CUDA", ort_name="CUDAExecutionProvider", make_options=_make_cuda_options
)
_TENSORRT: Final = _GpuProvider(
    name="tensorrt",
    title="TensorRT",
    ort_name="TensorrtExecutionProvider",
    make_options=_make_tensorrt_options,
    following=_CUDA,
)
_PROVIDERS: Final = {provider.name: provider for provider in (_CUDA, _TENSORRT)}
_AUTOMATIC: Final = _CUDA.name  # TensorRT builds an engine for minutes before a first answer


def choose_provider() -> str:
    """Return the provider for the models of packages: `cpu`, `cuda` or `tensorrt`.

    `$EDGEKIT_PROVIDER` selects it. The default is `cuda` on x86 if onnxruntime supports CUDA, else `cpu`. The
    result is also `cpu` if the provider is missing or cannot run a small model.

    Raises:
        BackendError: `$EDGEKIT_PROVIDER` has an unknown value.
    """
    stated = os.environ.get(VARIABLE) or "auto"
    if stated not in ("auto", PROCESSOR, *_PROVIDERS):
        expected = ", ".join(("auto", PROCESSOR, *_PROVIDERS))
        raise BackendError(f"${VARIABLE} is {stated!r}, expected one of {expected}")
    if stated == PROCESSOR or (stated == "auto" and platform.machine() not in X86):
        return PROCESSOR
    try:
        import onnxruntime
    except ImportError:  # opening the model says so, with what to install
        return PROCESSOR
    name = _AUTOMATIC if stated == "auto" else stated
    if _PROVIDERS[name].ort_name not in onnxruntime.get_available_providers():
        if stated != "auto":
            _warn(name, "this onnxruntime lacks it; install edgekit[gpu] in an environment of its own")
        return PROCESSOR

    def create(providers: ProviderList) -> "onnxruntime.InferenceSession":
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = LOG_FATAL_ONLY
        return onnxruntime.InferenceSession(PROBE, settings, providers=list(providers), enable_fallback=0)

    return PROCESSOR if open_on_gpu(name, create) is None else name


def open_on_gpu(
    name: str, create: Callable[[ProviderList], "onnxruntime.InferenceSession"]
) -> "onnxruntime.InferenceSession | None":
    """Return `create(providers)` if that session uses the GPU. Otherwise, log the reason and return None.

    Args:
        name: `cuda` or `tensorrt`.
        create: Creates a session with a list of providers, the preferred one first.
    """
    provider = _PROVIDERS[name]
    gpu_providers = [provider] if provider.following is None else [provider, provider.following]
    chain = [(member.ort_name, member.make_options()) for member in gpu_providers]
    try:
        _load_libraries()
        session = create([*chain, *ON_PROCESSOR])
    except Exception as cause:  # its exceptions have no other common base
        _warn(name, " ".join(str(cause).split()))
        return None
    if provider.ort_name in session.get_providers():
        return session
    _warn(name, "its libraries are missing or do not load")
    return None


def report_wrong_results(name: str, message: str) -> None:
    """Log that a session on a GPU failed the self-test of its package."""
    _warn(name, f"the self-test failed there: {message}")


def find_gpus() -> tuple[str, ...]:
    """Return the names of this machine's NVIDIA GPUs, such as `NVIDIA L4`, as the driver reports them."""
    names = []
    with contextlib.suppress(OSError):
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "Model":
                    names.append(value.strip())
    return tuple(names)


def describe_provider(name: str) -> str:
    """Return a short description of a provider, such as `NVIDIA L4 by CUDA`, or an empty string for `cpu`."""
    if name == PROCESSOR:
        return ""
    return f"{', '.join(find_gpus()) or 'GPU'} by {_PROVIDERS[name].title}"


def _load_libraries() -> None:
    """Load CUDA's libraries from pip's packages of NVIDIA, where the release of onnxruntime can."""
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it lacks; the session says so too
            onnxruntime.preload_dlls()


def _warn(name: str, reason: str) -> None:
    _logger.warning("onnxruntime cannot use %s: %s; using the processor", _PROVIDERS[name].title, reason)
