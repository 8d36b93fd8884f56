"""Where the time of `.tflite` files goes, operator by operator, by LiteRT's own profiler.

    python benchmarks/litert_profile.py FILE [FILE ...] [--runs 1000] [--all]

The Python interface has no profiler; this calls the C interface of the library in the ai-edge-litert wheel
(tried with 2.3.0; it is not stable). Times are whole microseconds, so small operators are counted too low,
and XNNPACK's dispatch between operators is not in any of them. The files take turns, run by run, each after a
run that is not counted; a figure is the mean of the fastest twentieth. One thread, generated inputs.
"""

import ctypes
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import ai_edge_litert
import numpy as np

from edgekit_toolkit.tflite.flatbuffer import DTYPES, SubGraph, Tensor, expected_bytes, parsed, shape_of
from results import machine, make_parser, print_head, print_row

Pointer = ctypes.c_void_p
_CPU: Final = 1
_WRITE: Final = 1
# `[Run Order]` rows: type, start, first, avg ms ...; the name behind them is the same for all of a delegate.
_ROW: Final = re.compile(r"^\s*(\S.*?)\s{2,}[\d.]+\s+[\d.]+\s+([\d.]+)\s+[\d.]+%")
_KINDS: Final = {
    "DWConv": "depthwise convolutions",
    "IGEMM": "convolutions",
    "GEMM": "1 x 1 convolutions, dense",
}


class Layout(ctypes.Structure):
    """LiteRtLayout: the first byte holds the rank, and whether there are strides."""

    _fields_ = (("rank", ctypes.c_uint), ("sizes", ctypes.c_int32 * 8), ("strides", ctypes.c_uint32 * 8))


class TensorType(ctypes.Structure):
    _fields_ = (("element", ctypes.c_int), ("layout", Layout))


# Numbers of TensorType in the schema -> LiteRtElementType.
_ELEMENTS: Final[Mapping[int, int]] = {0: 1, 2: 2, 3: 3, 9: 9}


class Engine:
    """The library, with an environment of its own."""

    def __init__(self) -> None:
        folder = Path(str(ai_edge_litert.__file__)).parent
        self._library = ctypes.CDLL(str(folder / "libLiteRt.so"))
        self.environment = Pointer()
        self.call("CreateEnvironment", 0, None, ctypes.byref(self.environment))

    def call(self, name: str, *arguments: Any) -> None:
        """Call `LiteRt` + `name`, which must succeed."""
        status = getattr(self._library, f"LiteRt{name}")(*arguments)
        if status:
            raise SystemExit(f"LiteRt{name} failed with status {status}")

    def profiling_options(self) -> Pointer:
        """Options of a model on the CPU whose runs are recorded."""
        options, opaque = Pointer(), Pointer()
        self.call("CreateOptions", ctypes.byref(options))
        self.call("SetOptionsHardwareAccelerators", options, _CPU)
        libc = ctypes.CDLL(None)
        libc.strdup.restype = Pointer  # the library frees it
        text = Pointer(libc.strdup(b"enable_profiling = true\n"))
        free = ctypes.cast(libc.free, Pointer)
        self.call("CreateOpaqueOptions", b"runtime_options_string", text, free, ctypes.byref(opaque))
        self.call("AddOpaqueOptions", options, opaque)
        return options


class Profiled:
    """One file, loaded for profiling."""

    def __init__(self, engine: Engine, content: bytes) -> None:
        self._engine = engine
        self._content = ctypes.create_string_buffer(content, len(content))  # the model refers to it
        model, self._model, self._profiler = Pointer(), Pointer(), Pointer()
        size = ctypes.c_size_t(len(content))
        engine.call("CreateModelFromBuffer", engine.environment, self._content, size, ctypes.byref(model))
        options = engine.profiling_options()
        engine.call("CreateCompiledModel", engine.environment, model, options, ctypes.byref(self._model))
        engine.call("CompiledModelGetProfiler", self._model, ctypes.byref(self._profiler))
        graph = parsed(content).subgraphs[0]
        self._inputs = self._buffers(graph, graph.inputs, "GetCompiledModelInputBufferRequirements")
        self._outputs = self._buffers(graph, graph.outputs, "GetCompiledModelOutputBufferRequirements")
        for buffer, place in zip(self._inputs, graph.inputs, strict=True):
            self._fill(Pointer(buffer), graph.tensors[place])

    def _buffers(self, graph: SubGraph, places: Any, name: str) -> Any:
        made = (Pointer * len(places))()
        for position, place in enumerate(places):
            tensor, kind = graph.tensors[place], TensorType()
            kind.element, kind.layout.rank = _ELEMENTS[tensor.type], len(shape_of(tensor))
            kind.layout.sizes[: len(shape_of(tensor))] = shape_of(tensor)
            asked, buffer = Pointer(), Pointer()
            where = ctypes.c_size_t(0), ctypes.c_size_t(position)
            self._engine.call(name, self._model, *where, ctypes.byref(asked))
            self._engine.call(
                "CreateManagedTensorBufferFromRequirements",
                self._engine.environment, ctypes.byref(kind), asked, ctypes.byref(buffer),
            )  # fmt: skip
            made[position] = buffer
        return made

    def _fill(self, buffer: Pointer, tensor: Tensor) -> None:
        address, values = Pointer(), np.random.default_rng(0).random(shape_of(tensor), np.float32)
        dtype = DTYPES[tensor.type]
        codes = (values * 100).astype(dtype) if dtype.kind in "iu" else values
        self._engine.call("LockTensorBuffer", buffer, ctypes.byref(address), _WRITE)
        ctypes.memmove(address, codes.ctypes.data, expected_bytes(tensor) or 0)
        self._engine.call("UnlockTensorBuffer", buffer)

    def run(self) -> list[tuple[str, float]]:
        sides = [one for side in (self._inputs, self._outputs) for one in (ctypes.c_size_t(len(side)), side)]
        self._engine.call("RunCompiledModel", self._model, ctypes.c_size_t(0), *sides)
        for step in ("ResetProfiler", "StartProfiler"):
            self._engine.call(step, self._profiler)
        self._engine.call("RunCompiledModel", self._model, ctypes.c_size_t(0), *sides)
        self._engine.call("StopProfiler", self._profiler)
        text = ctypes.c_char_p()
        self._engine.call("GetProfileSummary", self._profiler, self._model, ctypes.byref(text))
        lines = (text.value or b"").decode().partition("Top by Computation Time")[0].splitlines()
        ctypes.CDLL(None).free(text)
        rows = (_ROW.match(line) for line in lines)
        return [(row[1].removeprefix("Delegate/"), 1e3 * float(row[2])) for row in rows if row]


def kind_of(operator: str) -> str:
    last = operator.split()[-1]
    return _KINDS.get(last, "conversion to codes and back" if operator.startswith("Convert") else "the rest")


def fastest(values: list[float]) -> float:
    """Mean of the fastest twentieth: other processes only ever add."""
    return float(np.mean(sorted(values)[: max(1, len(values) // 20)]))


def measure(files: Mapping[str, Callable[[], list[tuple[str, float]]]], runs: int) -> dict[str, list[Any]]:
    """Microseconds of each operator of each file, as (operator, microseconds)."""
    found: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in files}
    names: dict[str, list[str]] = {}
    for _ in range(runs):
        for file, run in files.items():
            rows = run()
            names[file] = [name for name, _ in rows]
            for place, (_, microseconds) in enumerate(rows):
                found[file][place].append(microseconds)
    return {
        file: [(name, fastest(found[file][place])) for place, name in enumerate(names[file])]
        for file in files
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--runs", type=int, default=1000, help="inferences of each file")
    parser.add_argument("--all", action="store_true", help="each operator, and not the kinds alone")
    options = parser.parse_args()
    engine = Engine()
    calls = {path.name: Profiled(engine, path.read_bytes()).run for path in options.files}
    found = measure(calls, options.runs)
    print(f"Taken on: {machine()}")
    kinds = [*_KINDS.values(), "conversion to codes and back", "the rest"]
    print()
    print_head("microseconds", *found)
    for kind in kinds:
        sums = [sum(time for name, time in rows if kind_of(name) == kind) for rows in found.values()]
        print_row(kind, *(f"{one:.0f}" for one in sums))
    totals = [sum(time for _, time in rows) for rows in found.values()]
    print_row("all operators", *(f"{one:.0f}" for one in totals))
    for file, rows in found.items() if options.all else ():
        print(f"\n{file}")
        for name, microseconds in rows:
            print(f"{microseconds:8.1f}  {name}")


if __name__ == "__main__":
    main()
