"""Packages of every static form of models, opened and self-tested by several releases of an engine.

    scripts/python benchmarks/engine_releases.py MODEL.onnx... [--engine litert] --release 1.24.4=FOLDER...

FOLDER is where `pip install --no-deps --target FOLDER onnxruntime==1.24.4` (or `ai-edge-litert`) put it;
tflite-runtime also needs "numpy<2" there, and a file `ai_edge_litert.py` that hides the newer engine. Forms:
each scheme of the engine (onnxruntime: TensorRT's too) x scales a channel or a tensor x all layers or matrix
products only, calibrated on 8 generated samples. One process for each model and release opens all packages; a
form over which it aborts is named, and the next process goes on behind it.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.archive import read_package, read_unverified_manifest
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.trust.dsse import KnownDigest
from results import make_parser


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--engine", choices=("ort", "litert"), default="ort")
    parser.add_argument("--release", action="append", required=True, metavar="NAME=FOLDER")
    given = parser.parse_args()
    releases = dict(one.split("=", 1) for one in given.release)
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in releases}
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models:
            packages = list(write_forms(model, given.engine, Path(folder)))
            print(f"{model.stem}: {len(packages)} forms", flush=True)
            for name, place in releases.items():
                for form, outcome in open_all(packages, place):
                    outcomes[name][outcome.partition(":")[0]] += 1
                    if outcome != "ok":
                        print(f"  {name}: {form}: {outcome}", flush=True)
    print(f"{'without' if saturates() else 'with'} VNNI")
    for name, counts in outcomes.items():
        print(f"  {name}: {', '.join(f'{count} {outcome}' for outcome, count in sorted(counts.items()))}")


def write_forms(path: Path, engine: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the form, path and digest of each package that was written."""
    import onnx

    from edgekit_toolkit.importers.onnx import load_onnx
    from edgekit_toolkit.onnx_graph.specs import free_dims
    from edgekit_toolkit.packaging.plain_package import write_plain_package
    from edgekit_toolkit.packaging.signing_keys import load_signer
    from edgekit_toolkit.passes.chain import replay
    from edgekit_toolkit.quantize import forms
    from edgekit_toolkit.quantize.forms import Form
    from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
    from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
    from edgekit_toolkit.quantize.plan import Plan
    from edgekit_toolkit.quantize.quantizer import Quantizer
    from edgekit_toolkit.quantize.scheme import (
        ASYMMETRIC,
        ASYMMETRIC_7BIT,
        LITERT,
        LITERT_AVX512,
        SYMMETRIC,
    )
    from edgekit_toolkit.samples.generated import generate_feeds
    from edgekit_toolkit.tflite.convert import convert

    source = load_onnx(path)
    signer = load_signer(folder=folder / "keys")
    dims = dict.fromkeys(free_dims(source.inputs), 1)
    steps = [
        (name, 0) for name in ("state_zero_points", "convert_opset", "simplify", "ort_basic", "fold_affine")
    ]
    floats = onnx.shape_inference.infer_shapes(replay(source.model.proto, batch=None, applied=steps))
    feeds = generate_feeds(source.inputs, 8, 0, dims, {})
    quantizers: list[Quantizer] = (
        [OnnxQuantizer(floats, scheme, threads=2) for scheme in (ASYMMETRIC, ASYMMETRIC_7BIT, SYMMETRIC)]
        if engine == "ort"
        else [
            LiteRtQuantizer(convert(floats, dims), threads=2, scheme=scheme)
            for scheme in (LITERT, LITERT_AVX512)
        ]
    )
    for quantizer in quantizers:
        scheme = quantizer.scheme
        every, products = (quantizer.kernels(elementwise=flag) for flag in (True, False))
        found = quantizer.ranges(every, lambda: iter(feeds), lambda: None)
        ranges = {name: one.whole() for name, one in found.items()}
        for per_channel, kernels in itertools.product((True, False), (every, products)):
            title = f"{scheme.name} {'per-channel' if per_channel else 'per-tensor'} {len(kernels)} kernels"
            form = Form(forms.STATIC_INT8, Plan(scheme, frozenset(kernels), ranges, per_channel))
            model = quantizer.build(form)
            if model is None:
                continue
            file = folder / model.file_name
            file.write_bytes(model.content)
            name = f"{path.stem}-{title}".replace(" ", "-").replace("_", "-").lower()
            written = write_plain_package(file, name=name, target="x86-64", folder=folder, sign=signer)
            yield title, str(written), read_unverified_manifest(written).manifest.sha256


def open_all(packages: list[tuple[str, str, str]], place: str) -> Iterator[tuple[str, str]]:
    """Yield each form with `ok`, or with what went wrong, from the release in folder `place`."""
    left = packages
    while left:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([place, *filter(None, sys.path)])}
        ended = subprocess.run(
            [sys.executable, __file__, "--open"],
            input=json.dumps(left),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [json.loads(line) for line in ended.stdout.splitlines()]
        yield from zip((form for form, *_ in left), lines, strict=False)
        if len(lines) < len(left):
            yield left[len(lines)][0], f"ended with {ended.returncode}: {ended.stderr.strip()[-100:]}"
        left = left[len(lines) + 1 :]


def open_here() -> None:
    """Print for each package of the standard input, as JSON, `ok` or what went wrong."""
    packages: list[Any] = json.load(sys.stdin)
    for _, path, sha256 in packages:
        try:
            with read_package(Path(path), KnownDigest(sha256)) as package:
                checks = run_selftest(open_session(package, threads=1), package).checks
            outcome = "; ".join(f"wrong: {one.message}" for one in checks if not one.passed) or "ok"
        except EdgekitError as error:
            outcome = f"refused: {error}"
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--open"]:
        open_here()
    else:
        main()
