"""Conversion to TFLite of real public models: which convert, how exact, and what is refused with which words.

    .venv/bin/python benchmarks/litert_conversion.py [--only NAME ...]

Each model is optimised and converted as `edgekit package` does it, run in LiteRT, and compared with what
onnxruntime makes of the file as it came. Inputs are real where `../shared/models` or Pillow provide them,
else generated. Prints a table in Markdown; ends with 1 if a conversion that succeeded computes something
else, or if a source file changed.
"""

import argparse
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_runtime.errors import EdgekitError, ModelError
from edgekit_runtime.sessions.litert import LiteRtSession
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.feeds import Feeds, bind_dims, generate_feeds
from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.parity import Parity, compare, worst
from edgekit_toolkit.passes.pipeline import optimise
from edgekit_toolkit.specs import tensor_specs
from edgekit_toolkit.tflite.check import EQUAL
from edgekit_toolkit.tflite.convert import convert
from edgekit_toolkit.tflite.refusal import ConversionError
from public_models import MODELS, MissingError, PublicModel
from works import WORKS
from works import MissingError as MissingWorkError

SAMPLES = 3
# Works of works.py that have real samples for a model.
REAL = {
    "resnet8_cifar10_fp32": "resnet8",
    "dscnn_kws_fp32": "dscnn",
    "mobilenetv1_025_vww_fp32": "vww",
    "mobilenet_v1_025_224_fp32": "mobilenet_v1_025",
    "efficientnet_lite0_fp32": "efficientnet_lite0",
    "ppocr_v4_det": "ppocr_det",
    "ppocr_v6_det": "ppocr_det",
}
HEADER = (
    "| model | origin | ONNX bytes | inputs | result | TFLite bytes | operators | transposes |"
    " error / range | seconds |\n|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    """What became of one model."""

    model: PublicModel
    source_bytes: int
    inputs: str
    result: str
    content: bytes | None
    parity: Parity | None
    seconds: float
    unchanged: bool

    @property
    def is_wrong(self) -> bool:
        """Whether a conversion that succeeded computes something else."""
        return self.parity is not None and not self.parity.ok

    def line(self) -> str:
        """The row in Markdown."""
        cells = [self.model.name, self.model.origin, f"{self.source_bytes:,}", self.inputs, self.result]
        if self.content is None or self.parity is None:
            cells += ["", "", "", ""]
        else:
            found = operators(self.content)
            error = f"{self.parity.relative_to_range:.1e}"
            cells += [f"{len(self.content):,}", str(found.total()), str(found["TRANSPOSE"]), error]
        return f"| {' | '.join([*cells, f'{self.seconds:.1f}'])} |"


def operators(content: bytes) -> Counter[str]:
    """How often each operator occurs in a TFLite file."""
    from ai_edge_litert import schema_py_generated as schema

    names = {code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)}
    model = schema.Model.GetRootAs(content, 0)
    graph = model.Subgraphs(0)
    codes = [names[model.OperatorCodes(place).BuiltinCode()] for place in range(model.OperatorCodesLength())]
    return Counter(codes[graph.Operators(place).OpcodeIndex()] for place in range(graph.OperatorsLength()))


def measure(public: PublicModel) -> Row:
    """Convert one model and compare it."""
    path = public.path()
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    try:
        source = load_onnx(path).model
    except ModelError as refused:
        reason = str(refused).removeprefix(f"{path}: ")
        return Row(public, size, "", f"refused on import: {reason}", None, None, 0, True)
    if not public.weights:
        source = with_random_weights(source)
    dims = bind_dims(source, public.dims, public.ranges)
    feeds, inputs = choose_feeds(public, source, dims)
    start = time.perf_counter()
    content = parity = None
    try:
        content = convert(optimise(source, batch=None, feeds=feeds[:1]).model, dims)
        seconds = time.perf_counter() - start
        parity = compared(source, content, feeds)
        result = "converted" if parity.ok else f"WRONG: {parity.reason}"
    except ConversionError as refused:
        seconds = time.perf_counter() - start
        result = "refused: " + reasons(refused)
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    return Row(public, size, inputs, result, content, parity, seconds, before == after)


def reasons(refused: ConversionError) -> str:
    """The first node that is refused, and how many more there are."""
    if not refused.refusals:
        return str(refused)
    more = len(refused.refusals) - 1
    return str(refused.refusals[0]) + (f" (and {more} more)" if more else "")


def choose_feeds(
    public: PublicModel, source: onnx.ModelProto, dims: Mapping[str, int]
) -> tuple[list[Feeds], str]:
    """Real samples where there are any, else generated ones; and which they are."""
    inputs, _ = tensor_specs(source)
    work = next((work for work in WORKS if work.name == REAL.get(public.name)), None)
    if work is not None:
        try:
            _, arrays = work.load()
        except MissingWorkError:
            work = None
        else:
            name = inputs[0].name
            values = arrays[name] if name in arrays else next(iter(arrays.values()))
            return [{name: values[place : place + 1]} for place in range(SAMPLES)], "real"
    return generate_feeds(inputs, SAMPLES, 1, dims, public.ranges), "generated"


def compared(source: onnx.ModelProto, content: bytes, feeds: list[Feeds]) -> Parity:
    """How the TFLite file's outputs differ from the source model's, in the worst case."""
    reference = OrtSession(source.SerializeToString(), OrtOptions())
    session = LiteRtSession(content)
    verdicts = []
    for feed in feeds:
        expected, got = reference.run(feed), session.run(feed)
        verdicts.append(compare(expected, {name: got[name] for name in expected}, EQUAL))
    return worst(verdicts)


def with_random_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose constant weights are seeded noise, without the softmax at its end."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    rng = np.random.default_rng(0)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.graph.initializer}
    kept = []
    for node in result.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
        else:
            value = random_weight(rng, tuple(int(size) for size in stored[node.input[0]]))
            result.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    if kept[-1].op_type == "Softmax":  # of such weights it is 0 or 1, which hides every difference
        result.graph.output[0].name = kept.pop().input[0]
    del result.graph.node[:]
    result.graph.node.extend(kept)
    return result


def random_weight(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Weights that keep the size of what they are multiplied with; scales, biases and variances around 1."""
    if len(shape) < 2:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    values: NDArray[Any] = rng.standard_normal(shape, np.float32)
    return values * np.float32(np.sqrt(2 / np.prod(shape[1:])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[model.name for model in MODELS])
    chosen = parser.parse_args().only
    rows = []
    print(HEADER)
    for public in MODELS:
        if chosen and public.name not in chosen:
            continue
        try:
            rows.append(measure(public))
        except MissingError as missing:
            print(f"{public.name}: skipped, {missing}", file=sys.stderr)
        except EdgekitError as error:
            print(f"{public.name}: cannot be compared, {error}", file=sys.stderr)
        else:
            print(rows[-1].line(), flush=True)
    converted = sum(row.content is not None for row in rows)
    wrong, changed = sum(row.is_wrong for row in rows), sum(not row.unchanged for row in rows)
    print(
        f"\n{converted} of {len(rows)} converted, {wrong} of them wrong; {changed} input files changed;"
        f" {sum(row.inputs == 'real' for row in rows)} compared on real inputs"
    )
    return 1 if wrong or changed else 0


if __name__ == "__main__":
    sys.exit(main())
