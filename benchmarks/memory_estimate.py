"""Print estimated peak memory against that of `open_session` and of the service, for every model here.

    python benchmarks/memory_estimate.py

Each model becomes a signed package. One process opens it with `open_session(PATH)` and runs it three times;
another one is `edgekit-device serve`, and gets five calls. Both use the default options of a package. MB are
10^6 bytes.

Models: models/tiny, ../shared/models, their int8 forms (static QDQ, per channel, calibrated on generated
inputs: sizes are right, accuracy is not), PP-OCRv4 from a folder (--ocr) and the light_* graphs that the onnx
package carries. What is absent is skipped with a line.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.figures import INTEGER_DIVISION_FIGURE
from edgekit_runtime.package.golden import Golden
from edgekit_runtime.package.manifest import BackendChoice, Manifest
from edgekit_runtime.system.child_process import child_environment
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.costs.peak_memory import MemoryEstimate, estimate_peak_memory
from edgekit_toolkit.evaluation.host_memory import (
    estimate_service_bytes,
    measure_service_bytes,
    serve_once,
)
from edgekit_toolkit.measurement.peak_memory import PeakMemory, measure_engine_bytes, measure_peak_memory
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.models.tflite import TfliteModel
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.packaging.assemble import describe_artifacts
from edgekit_toolkit.packaging.golden_tensors import golden_feeds, golden_outputs
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.samples.generated import Feeds, generate_feeds
from peers.ort_static import quantize
from results import make_parser, print_head, print_row

ROOT = Path(__file__).resolve().parents[1]
MB = 10**6
NAME = "measured"
OPEN = """
import sys
from pathlib import Path
import numpy as np
from edgekit_runtime import open_session
from edgekit_toolkit.measurement.peak_memory_child import peak_bytes
session = open_session(Path(sys.argv[1]))
feeds = dict(np.load(sys.argv[2]))
for _ in range(3):
    session.run(feeds)
print(peak_bytes())
"""
OCR = {
    "ch_PP-OCRv4_det_infer": (1, 3, 640, 640),
    "ch_PP-OCRv4_rec_infer": (1, 3, 48, 320),
    "ch_ppocr_mobile_v2.0_cls_infer": (1, 3, 48, 192),
}
LIGHT = (
    *("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet"),
    *("vgg19", "zfnet512"),
)


@dataclass(frozen=True)
class Case:
    name: str
    model: OnnxModel | TfliteModel
    dims: dict[str, int]


def skip(what: object, why: object) -> None:
    print(f"skipped {what}: {why}", file=sys.stderr)


def load(path: Path, shape: Sequence[int] = ()) -> Case:
    if path.suffix == ".tflite":
        return Case(path.name, TfliteModel(path.read_bytes()), {})
    model = onnx.load(path)
    for value in model.graph.input:
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == "?":  # some exporters write it for each free dimension
                size.ClearField("dim_param")
    dims = {}
    for spec in tensor_specs(model)[0]:
        dims.update(
            {name: size for name, size in zip(spec.shape, shape, strict=False) if isinstance(name, str)}
        )
    return Case(path.stem, OnnxModel(model), dims)


def int8(case: Case, folder: Path) -> Case | None:
    """The int8 form of a model, or None where it cannot be made."""
    assert isinstance(case.model, OnnxModel)
    model = case.model.proto
    source, target, calibration = folder / "source.onnx", folder / "int8.onnx", folder / "calibration.npz"
    onnx.save(model, source)
    first, second = generate_feeds(tensor_specs(model)[0], 2, 0, case.dims)
    try:
        np.savez(calibration, **{name: np.concatenate([first[name], second[name]]) for name in first})
        quantize(source, calibration, target, "MinMax")
    except Exception as error:  # whatever the quantizer cannot do
        skip(f"{case.name} int8", f"cannot be made: {str(error)[:100]}")
        return None
    return Case(f"{case.name} int8", OnnxModel(onnx.load(target)), case.dims)


def cases(shared: Path, ocr: Path | None) -> Iterator[Case]:
    floats = [load(path) for path in sorted((ROOT / "models/tiny").glob("*.onnx"))]
    floats += [load(path) for path in sorted(shared.glob("*.onnx"))]
    if not shared.is_dir():
        skip(shared, "no models there")
    for stem, shape in OCR.items():
        path = (ocr or Path()) / f"{stem}.onnx"
        if path.exists():
            floats.append(load(path, shape))
        else:
            skip(stem, "give its folder with --ocr")
    yield from floats
    with tempfile.TemporaryDirectory() as folder:
        for case in floats:
            quantized = int8(case, Path(folder))
            if quantized is not None:
                yield quantized
    yield from (load(path) for path in sorted(shared.glob("*.tflite")))
    for name in LIGHT:
        path = Path(onnx.__file__).parent / f"backend/test/data/light/light_{name}.onnx"
        if path.exists():
            yield load(path)
        else:
            skip(path.name, "not in this version of onnx")


def write(folder: Path, model: Model, feeds: Feeds) -> Path:
    """Write a package as `edgekit package` would, signed by a key in `folder / "keys"`."""
    inputs = tuple(TensorSpec(name, array.dtype.name, array.shape) for name, array in feeds.items())
    given, contents, decoded = golden_feeds(inputs, {}, {}, seed=0)
    outputs = model.open_session(threads=1).run(decoded)
    expected, more = golden_outputs(outputs, outputs, integer=False)
    roles = {**dict.fromkeys([*contents, *more], "golden"), model.file_name: "model"}
    contents = {model.file_name: model.content, **contents, **more}
    manifest = Manifest(
        name=NAME,
        version="1",
        target="x86-64",
        inputs=inputs,
        outputs=tuple(TensorSpec(name, array.dtype.name, array.shape) for name, array in outputs.items()),
        artifacts=describe_artifacts(contents, roles),
        backend=BackendChoice(model.engine, model.file_name, {}),
        golden=Golden(given, expected),
        # Without it, the service runs a model in a process of its own where its file names Div or Mod.
        figures={INTEGER_DIVISION_FIGURE: model.divides_by_inputs()},
    )
    path = folder / manifest.file_name
    write_package(path, manifest, contents, load_signer(folder=folder / "keys"))
    return path


def measure_opened(package: Path, feeds: Feeds) -> int:
    """Return the peak of a process that opens a package and runs it."""
    np.savez(package.parent / "feeds.npz", **feeds)  # type: ignore[arg-type]
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(package), str(package.parent / "feeds.npz")],
        env={**child_environment(), "EDGEKIT_HOME": str(package.parent)},
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


class Errors(NamedTuple):
    """How far estimates of a model are off, and the memory of its engine without a model."""

    model: str
    opened: float
    served: float
    engine_bytes: int


def measure(case: Case, threads: int) -> Errors:
    """Print the row of a model."""
    model, kind = case.model, case.model.engine
    feeds = generate_feeds(model.specs()[0], 1, 0, case.dims)[0]
    engine = measure_engine_bytes(kind)
    if isinstance(model, TfliteModel):  # `edgekit package` measures it in a process of its own
        figure: MemoryEstimate | PeakMemory = measure_peak_memory(
            model.content, feeds, engine=kind, threads=threads
        )
        peak_of = "measured"
    else:
        figure = estimate_peak_memory(model.proto, engine_bytes=engine, dims=case.dims, threads=threads)
        peak_of = "load" if figure.load_peak_bytes == figure.total_bytes else "run"
    service = estimate_service_bytes(kind, figure.model_bytes, feeds)
    with tempfile.TemporaryDirectory() as name:
        package = write(Path(name), model, feeds)
        opened = measure_opened(package, feeds)
        served = serve_once(package, Path(name) / "keys", NAME, feeds)
    errors = Errors(case.name, figure.total_bytes / opened - 1, service / served - 1, engine)
    sizes = [figure.total_bytes, opened, figure.model_bytes, opened - engine, service, served]
    cells = [f"{size / MB:.1f}" for size in sizes]
    cells.insert(2, f"{errors.opened:+.1%}")
    print_row(case.name, f"{len(model.content) / MB:.2f}", peak_of, *cells, f"{errors.served:+.1%}")
    return errors


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared/models/models", help="folder of models"
    )
    parser.add_argument("--ocr", type=Path, help="folder of the PP-OCRv4 models (rapidocr-onnxruntime)")
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    rows = []
    print_head(
        "model | file | peak | estimate | open_session | error | model part: estimate | measured"
        " | service: estimate | measured | error"
    )
    for case in cases(options.shared, options.ocr):
        if options.only not in case.name:
            continue
        try:
            rows.append(measure(case, options.threads))
        except EdgekitError as error:
            skip(case.name, error)
    if rows:
        print()
        for place, name in ((1, "error"), (2, "service_error")):
            worst = max(rows, key=lambda row: abs(row[place]))
            print(f"worst {name}: {worst[place]:+.1%}, {worst.model}")
        print(f"bare: {rows[0].engine_bytes / MB:.1f} MB, service {measure_service_bytes() / MB:.1f} MB")


if __name__ == "__main__":
    main()
