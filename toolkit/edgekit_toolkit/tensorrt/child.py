"""The process in which `tensorrt_check` runs TensorRT: `python -m edgekit_toolkit.tensorrt.child`.

It reads `model.onnx` and `dims.json` in the working folder and writes `answer.json` there: a JSON object with
`missing` (why the library cannot be imported, or null), `version`, `parsed`, `errors`, `engine_bytes` and
`seconds`. It needs no GPU, and does not use one that is there.
"""

import importlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from edgekit_runtime.sessions.tensorrt.child import STACK_BYTES
from edgekit_runtime.sessions.tensorrt.network import Ranges, RefusedError, make_log, make_profile, parse

# Compute capability 8.6 is the Ampere GPU next to the 8.7 of Jetson Orin, which TensorRT-RTX does not offer.
_COMPUTE_CAPABILITY = "SM86"


def _build(trt: Any, log: Any, builder: Any, network: Any, ranges: Ranges) -> int:
    """Size of the engine in bytes."""
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, _COMPUTE_CAPABILITY), 0)
    profile = make_profile(builder, network, ranges)
    if profile is not None:
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise RefusedError(*(log.errors or ["the builder gave no engine and no reason"]))
    return int(engine.nbytes)


def _check(trt: Any, model: bytes, ranges: Ranges) -> dict[str, Any]:
    started = time.perf_counter()
    log = make_log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parsed, engine_bytes, errors = False, None, []
    try:
        parse(trt, log, network, model)
        parsed = True
        engine_bytes = _build(trt, log, builder, network, ranges)
    except RefusedError as error:
        errors = list(error.args)
    return {
        "missing": None,
        "version": trt.__version__,
        "parsed": parsed,
        "errors": errors,
        "engine_bytes": engine_bytes,
        "seconds": time.perf_counter() - started,
    }


def _main() -> None:
    try:
        trt = importlib.import_module("tensorrt_rtx_bindings")
    except ImportError as error:
        answer: dict[str, Any] = {"missing": str(error)}
    else:
        ranges: Ranges = json.loads(Path("dims.json").read_text(encoding="utf-8"))
        threading.stack_size(STACK_BYTES)
        with ThreadPoolExecutor(max_workers=1) as thread:
            answer = thread.submit(_check, trt, Path("model.onnx").read_bytes(), ranges).result()
    Path("answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _main()
