"""int8 on x86 without VNNI: agreement with float32, and latency, with and without the engine's exact kernels.

    scripts/python benchmarks/products_without_vnni.py MODEL.onnx SAMPLES.npz

SAMPLES.npz holds the model's input by name. The first half calibrates a static int8 form; the last `--count`
samples are judged: how often the largest output is where the float model has it. A processor with VNNI
emulates one without (qemu-user), and skips latency: an emulator's says nothing.
"""

import telemetry_off  # noqa: F401

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from edgekit_runtime.sessions.ort_products import EXACT_SETTING, saturates
from results import make_parser

ROOT: Final = Path(__file__).parents[1]
_ROUNDS: Final = 200


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("samples", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=64)
    given = parser.parse_args()
    if given.samples is None:  # the child of such a call: `model` is the folder that it wrote
        print(json.dumps(measure(given.model)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_forms(given.model, given.samples, given.count, folder)
        python = find_python(folder)
        ended = subprocess.run([python, __file__, folder], capture_output=True, text=True, check=True)
    found = json.loads(ended.stdout)
    emulated = python != sys.executable
    print(
        f"{given.model.stem}, {given.count} samples, {'emulated' if emulated else 'this'} x86-64 without VNNI"
    )
    for kind, agreement in found["agreement"].items():
        print(f"  {kind}: largest output as in float32 on {agreement:.1%}")
    if emulated:
        print("  latency skipped: this machine has VNNI, and an emulator's says nothing")
        return
    for kind, median_ms in found["median_ms"].items():
        print(f"  {kind}: {median_ms:.3f} ms (median, one thread, measured)")


def make_forms(model: Path, samples: Path, count: int, folder: Path) -> None:
    """Write the float model, its static int8 form and the judged samples [count, ...] to `folder`."""
    from edgekit_toolkit.importers.onnx import load_onnx
    from edgekit_toolkit.passes.optimiser import optimise
    from edgekit_toolkit.pipeline.candidates import find_candidates
    from edgekit_toolkit.quantize.forms import STATIC_INT8
    from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
    from edgekit_toolkit.quantize.scheme import SCHEMES

    source = load_onnx(model)
    (spec,) = source.inputs
    rows = np.load(samples)[spec.name]
    calibration = [{spec.name: row[None]} for row in rows[: len(rows) // 2]]
    floats = onnx.shape_inference.infer_shapes(
        optimise(source.model.proto, batch=None, feeds=calibration[:1]).model
    )
    found = find_candidates(
        OnnxQuantizer(floats, SCHEMES["asymmetric"], threads=1), lambda: iter(calibration),
        per_channel=True, kinds=frozenset({STATIC_INT8}), limit_s=0, dims={}, progress=lambda *_: None,
    )  # fmt: skip
    int8 = next(one.model for one in found.candidates if one.form.kind == STATIC_INT8)
    (folder / "float.onnx").write_bytes(floats.SerializeToString())
    (folder / "int8.onnx").write_bytes(int8.content)
    np.save(folder / "x.npy", rows[len(rows) // 2 :][-count:])


def find_python(folder: Path) -> str:
    """Return a Python on a processor without VNNI: this one, or an emulated one."""
    if saturates():
        return sys.executable
    ended = subprocess.run(
        [ROOT / "scripts" / "emulated-python", folder / "emulated"],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        sys.exit(f"skipped: {ended.stderr.strip()}")
    return str(folder / "emulated" / "bin" / "python")


def measure(folder: Path) -> dict[str, dict[str, float]]:
    """Return agreement (0..1) and median latency by the kind of kernels, on the processor of this process."""
    x = np.load(folder / "x.npy")
    sessions = {
        "float32": open_session(folder / "float.onnx", exact=False),
        "int8, default kernels": open_session(folder / "int8.onnx", exact=False),
        "int8, exact kernels": open_session(folder / "int8.onnx", exact=True),
    }
    classes = {kind: np.array([run(one, row[None]).argmax() for row in x]) for kind, one in sessions.items()}
    want = classes.pop("float32")
    taken_ms: dict[str, list[float]] = {kind: [] for kind in sessions}
    for number in range(_ROUNDS if saturates_here() else 0):
        for kind, session in sessions.items():
            begin = time.perf_counter()
            run(session, x[number % len(x)][None])
            taken_ms[kind].append((time.perf_counter() - begin) * 1e3)
    return {
        "agreement": {kind: float((got == want).mean()) for kind, got in classes.items()},
        "median_ms": {kind: float(np.median(taken)) for kind, taken in taken_ms.items() if taken},
    }


def saturates_here() -> bool:
    """Whether the times of this process mean something: no emulated processor, and none with VNNI."""
    return saturates() and "emulated by qemu" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def open_session(path: Path, *, exact: bool) -> onnxruntime.InferenceSession:
    """Return a session of one thread, with or without the engine's setting for exact products."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = 4
    settings.add_session_config_entry(EXACT_SETTING, "1" if exact else "0")
    return onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, x: NDArray[Any]) -> NDArray[Any]:
    output: NDArray[Any] = session.run(None, {session.get_inputs()[0].name: x})[0]
    return output


if __name__ == "__main__":
    main()
