"""Run one model on its engine, called as its documentation shows: outputs of samples, or batches on demand.

    python run_engine.py ENGINE MODEL SAMPLES.npz [--threads N] [--outputs FILE.npz]

The engine `package` is edgekit, which takes engine and threads of the package. With `--outputs`
it runs every sample and writes each output, stacked. Without, it prints "ready"; then each line that it reads
is a number of seconds, and it answers with the mean seconds of an inference of the first sample over so long.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Feed = Mapping[str, Any]
Call = Callable[[], list[Any]]


def open_onnxruntime(model: Path, threads: int) -> Callable[[Feed], Call]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return lambda feed: lambda: session.run(None, feed)


def open_litert(model: Path, threads: int) -> Callable[[Feed], Call]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(model), num_threads=threads)
    interpreter.allocate_tensors()
    (signature,) = interpreter.get_signature_list().values()
    runner = interpreter.get_signature_runner()
    positions = {name: runner.get_input_details()[name]["index"] for name in signature["inputs"]}
    indices = [runner.get_output_details()[name]["index"] for name in signature["outputs"]]

    def bind(feed: Feed) -> Call:
        # Converted models may call their inputs otherwise; each model here has one.
        pairs = list(zip(positions.values(), feed.values(), strict=True))

        def call() -> list[Any]:
            for index, array in pairs:
                interpreter.set_tensor(index, array)
            interpreter.invoke()
            return [interpreter.get_tensor(index) for index in indices]

        return call

    return bind


def open_openvino(model: Path, threads: int) -> Callable[[Feed], Call]:
    import openvino

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    request = openvino.compile_model(str(model), "CPU", settings).create_infer_request()

    def bind(feed: Feed) -> Call:
        arrays = list(feed.values())
        return lambda: list(request.infer(arrays, share_inputs=True).values())

    return bind


def open_ncnn(model: Path, threads: int) -> Callable[[Feed], Call]:
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads = threads
    if net.load_param(str(model)) or net.load_model(str(model.with_suffix(".bin"))):
        sys.exit("ncnn refused the model")
    names, outputs = net.input_names(), net.output_names()

    def bind(feed: Feed) -> Call:
        samples = [np.ascontiguousarray(array[0]) for array in feed.values()]

        def call() -> list[Any]:
            extractor = net.create_extractor()
            for name, sample in zip(names, samples, strict=True):
                extractor.input(name, ncnn.Mat(sample))
            return [np.array(extractor.extract(name)[1])[np.newaxis] for name in outputs]

        return call

    return bind


def open_package(package: Path, _: int) -> Callable[[Feed], Call]:
    from edgekit_runtime.sessions import open_session

    session = open_session(package)
    return lambda feed: lambda: list(session.run(feed).values())


OPENERS = {
    "onnxruntime": open_onnxruntime,
    "LiteRT": open_litert,
    "OpenVINO": open_openvino,
    "ncnn": open_ncnn,
    "package": open_package,
}


def answer_batches(call: Call) -> None:
    call()
    begin_s = time.perf_counter()
    call()
    typical_s = max(time.perf_counter() - begin_s, 1e-6)
    print("ready", flush=True)
    for line in sys.stdin:
        call()  # refills the caches that others have emptied
        count = max(1, round(float(line) / typical_s))
        begin_s = time.perf_counter()
        for _ in range(count):
            call()
        typical_s = (time.perf_counter() - begin_s) / count
        print(typical_s, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=OPENERS)
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--outputs", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("OPENVINO_TELEMETRY", "0")
    with np.load(arguments.samples) as data:
        inputs = {name: data[name] for name in data.files if name != "y"}
    bind = OPENERS[arguments.engine](arguments.model, arguments.threads)
    feeds = (
        {name: array[index : index + 1] for name, array in inputs.items()}
        for index in range(len(next(iter(inputs.values()))))
    )
    if arguments.outputs is None:
        answer_batches(bind(next(feeds)))
        return
    outputs = zip(*([np.array(array) for array in bind(feed)()] for feed in feeds), strict=True)
    stacked = {f"output{index}": np.concatenate(arrays) for index, arrays in enumerate(outputs)}
    np.savez(arguments.outputs, **stacked)  # type: ignore[arg-type]  # the stub takes names for its options


if __name__ == "__main__":
    main()
