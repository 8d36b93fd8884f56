"""The process that builds engines: `python -m edgekit_runtime.sessions.tensorrt.child`.

It reads `request.json`, `model.onnx` and `timing-*.cache` in the working folder. It writes `PRECISION.plan`,
`timing.cache` and finally `answer.json` with `version`, `built`, `refused` and `seconds`. `refused` is a dict
from precision to error messages. The errors of the parser have the key `model`. A separate process is used
because TensorRT may crash, and because it frees the memory of a build only when the process ends.
"""

import importlib
import json
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.sessions.tensorrt.network import (
    ParseError,
    RefusedError,
    is_quantized,
    make_log,
    make_profile,
    parse,
    remove_quantization,
)
from edgekit_runtime.system.child_process import end_with_parent

# The builder walks the graph recursively: with the usual 8 MB a chain of 3000 nodes overflows the stack.
STACK_BYTES: Final = 512 * 2**20
_NICENESS: Final = 10  # a session is serving on the CPU meanwhile


def build_all(trt: Any, request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Build engines of `model.onnx` in `folder`, and return the fields of `answer.json` except `seconds`.

    Each engine is written to `PRECISION.plan`. `request` has the fields `precisions` (None for the default),
    `shapes`, `workspace_bytes` and `compute_capability`.
    """
    model = (folder / "model.onnx").read_bytes()
    built: list[str] = []
    refused: dict[str, list[str]] = {}
    try:
        precisions = request["precisions"] or _usual_precisions(trt, model)
        for precision in precisions:
            try:
                plan = _build(trt, request, folder, model, precision)
            except ParseError:
                raise
            except RefusedError as error:
                refused[precision] = list(error.args)
                continue
            (folder / f"{precision}.plan").write_bytes(plan)
            built.append(precision)
    except ParseError as error:
        refused["model"] = list(error.args)
    return {"version": trt.__version__, "built": built, "refused": refused}


def _has_flags(trt: Any) -> bool:
    """Whether precisions are the builder's choice; TensorRT-RTX takes every type from the model."""
    return hasattr(trt.BuilderFlag, "FP16")


def _usual_precisions(trt: Any, model: bytes) -> list[str]:
    log = make_log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parse(trt, log, network, model)
    plain = ["fp16"] if _has_flags(trt) else ["fp32"]
    if is_quantized(trt, network):
        return ["int8", *plain]
    return [*plain, "fp32"] if _has_flags(trt) else plain


def _build(trt: Any, request: Mapping[str, Any], folder: Path, model: bytes, precision: str) -> bytes:
    log = make_log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parse(trt, log, network, model)
    config = builder.create_builder_config()
    # TensorRT refers to these values while it builds.
    constants = [] if precision == "int8" else remove_quantization(trt, network)
    _set_precision(trt, config, precision)
    profile = make_profile(builder, network, request["shapes"])
    if profile is not None:
        config.add_optimization_profile(profile)
    if request["workspace_bytes"] is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request["workspace_bytes"])
    if request["compute_capability"] is not None:  # only TensorRT-RTX can build for an absent GPU
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, request["compute_capability"]), 0)
    timing = _add_timing(config, folder)
    plan = builder.build_serialized_network(network, config)
    del constants
    if plan is None:
        raise RefusedError(*(log.errors or ["the builder gave no engine and no reason"]))
    if timing is not None:
        (folder / "timing.cache").write_bytes(bytes(timing.serialize()))
    return bytes(plan)


def _set_precision(trt: Any, config: Any, precision: str) -> None:
    if not _has_flags(trt):
        if precision == "fp16":
            raise RefusedError("this TensorRT takes every type from the model: half needs a model in half")
        return
    if precision != "fp32":
        config.set_flag(trt.BuilderFlag.FP16)  # also for layers that int8 leaves in float
    if precision == "int8":
        config.set_flag(trt.BuilderFlag.INT8)


def _add_timing(config: Any, folder: Path) -> Any:
    """Add the stored timings to `config`; TensorRT itself refuses those of another version or GPU.

    `timing.cache` is from earlier engines in this process, `timing-*.cache` were given.
    """
    cache = config.create_timing_cache(b"")
    if cache is None or not config.set_timing_cache(cache, False):
        return None
    for path in sorted(folder.glob("timing*.cache")):
        other = config.create_timing_cache(path.read_bytes())
        if other is not None:
            cache.combine(other, False)
    return cache


def _main() -> None:
    end_with_parent()
    os.nice(_NICENESS)
    folder = Path.cwd()
    request: dict[str, Any] = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    trt = importlib.import_module(request["library"])
    threading.stack_size(STACK_BYTES)
    with ThreadPoolExecutor(max_workers=1) as thread:
        begin_s = time.perf_counter()
        answer = thread.submit(build_all, trt, request, folder).result()
        answer["seconds"] = time.perf_counter() - begin_s
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _main()
