"""The process in which `tensorrt_check` runs TensorRT: `python -m edgekit_toolkit.tensorrt_child`.

It reads `model.onnx` and `dims.json` in the working folder and writes `answer.json` there: a JSON object with
`missing` (why the library cannot be imported, or null), `version`, `parsed`, `errors`, `engine_bytes` and
`seconds`. It needs no GPU, and does not use one that is there.
"""

import importlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Compute capability 8.6 is the Ampere GPU next to the 8.7 of Jetson Orin, which TensorRT-RTX does not offer.
_COMPUTE_CAPABILITY = "SM86"
# The builder walks the graph recursively: with the usual 8 MB a chain of 3000 nodes overflows the stack.
_STACK_BYTES = 512 * 2**20
_BATCH_RANGE = (1, 1, 8)  # smallest, usual, largest
_MISSING_GPU = "CUDA driver version is insufficient"  # said in passing wherever there is no GPU

Ranges = Mapping[str, Sequence[Sequence[int]]]


class _RefusedError(Exception):
    """The model or its shapes were refused; the arguments are the messages."""


def _make_log(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # the binding requires this very call
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            is_error = severity in {trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR}
            if is_error and _MISSING_GPU not in message:
                self.errors.append(_one_line(message))

    return Log()


def _one_line(message: str) -> str:
    return " ".join(line.strip() for line in message.splitlines() if _MISSING_GPU not in line)


def _parse(trt: Any, log: Any, network: Any, model: bytes) -> None:
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model):
        raise _RefusedError(*(_parser_error(parser.get_error(index)) for index in range(parser.num_errors)))


def _parser_error(error: Any) -> str:
    # For an operator that it does not know the parser's whole description is "false".
    code = str(error.code()).rpartition(".")[2]
    message = f"{code}: {_one_line(error.desc())}".removesuffix(": false")
    return f"{error.node_operator()} '{error.node_name()}': {message}" if error.node_operator() else message


def _profile(builder: Any, network: Any, ranges: Ranges) -> Any:
    """The optimization profile for the inputs with dimensions of any size, or None where there are none."""
    inputs = {tensor.name: tensor for tensor in map(network.get_input, range(network.num_inputs))}
    unknown = sorted(ranges.keys() - inputs.keys())
    if unknown:
        raise _RefusedError(f"dims names {', '.join(unknown)}, but the inputs are {', '.join(inputs)}")
    profile = None
    for name, tensor in inputs.items():
        shape = tuple(tensor.shape)
        if -1 in shape:
            profile = profile or builder.create_optimization_profile()
            profile.set_shape(name, *(ranges[name] if name in ranges else _batches(name, shape)))
    return profile


def _batches(name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    free = [axis for axis, size in enumerate(shape) if size == -1]
    if free != [0]:
        raise _RefusedError(f"input '{name}' has free dimensions {free}: give its shapes in dims")
    return [(size, *shape[1:]) for size in _BATCH_RANGE]


def _build(trt: Any, log: Any, builder: Any, network: Any, ranges: Ranges) -> int:
    """Size of the engine in bytes."""
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, _COMPUTE_CAPABILITY), 0)
    profile = _profile(builder, network, ranges)
    if profile is not None:
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise _RefusedError(*(log.errors or ["the builder gave no engine and no reason"]))
    return int(engine.nbytes)


def _check(trt: Any, model: bytes, ranges: Ranges) -> dict[str, Any]:
    started = time.perf_counter()
    log = _make_log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parsed, engine_bytes, errors = False, None, []
    try:
        _parse(trt, log, network, model)
        parsed = True
        engine_bytes = _build(trt, log, builder, network, ranges)
    except _RefusedError as error:
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
        threading.stack_size(_STACK_BYTES)
        with ThreadPoolExecutor(max_workers=1) as thread:
            answer = thread.submit(_check, trt, Path("model.onnx").read_bytes(), ranges).result()
    Path("answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _main()
