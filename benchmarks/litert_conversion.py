"""Conversion to TFLite of real public models: which convert, how exact, and what is refused with which words.

    scripts/python benchmarks/litert_conversion.py [--only NAME ...]

Each model is optimised and converted as `edgekit package` does it, run in LiteRT, and compared with what
onnxruntime makes of the file as it came. Inputs are real where `../shared/models` or Pillow provide them,
else generated. Prints a table in Markdown; ends with 1 if a conversion that succeeded computes something
else, or if a source file changed.
"""

import hashlib
import sys
import time
from collections import Counter
from dataclasses import dataclass

import onnx

from edgekit_runtime.errors import ModelError
from edgekit_runtime.sessions.litert.session import LiteRtSession
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.passes.parity import Parity, compare, worst
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.tflite.check import EQUAL
from edgekit_toolkit.tflite.convert import convert
from edgekit_toolkit.tflite.refusal import ConversionError
from public_models import PublicModel, make_public_parser, try_models
from public_samples import read_source, samples_of
from results import print_head

SAMPLES = 3
HEADS = (
    "model | origin | ONNX bytes | inputs | result | TFLite bytes | operators | transposes | error / range"
    " | seconds"
)


@dataclass(frozen=True)
class Row:
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
        cells = [self.model.name, self.model.origin, f"{self.source_bytes:,}", self.inputs, self.result]
        if self.content is None or self.parity is None:
            cells += ["", "", "", ""]
        else:
            found = operators(self.content)
            error = f"{self.parity.relative_to_range:.1e}"
            cells += [f"{len(self.content):,}", str(found.total()), str(found["TRANSPOSE"]), error]
        return f"| {' | '.join([*cells, f'{self.seconds:.1f}'])} |"


def operators(content: bytes) -> Counter[str]:
    from ai_edge_litert import schema_py_generated as schema

    names = {code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)}
    model = schema.Model.GetRootAs(content, 0)
    graph = model.Subgraphs(0)
    codes = [names[model.OperatorCodes(place).BuiltinCode()] for place in range(model.OperatorCodesLength())]
    return Counter(codes[graph.Operators(place).OpcodeIndex()] for place in range(graph.OperatorsLength()))


def measure(public: PublicModel) -> Row:
    path = public.path()
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    try:
        source, dims = read_source(public)
    except ModelError as refused:
        reason = str(refused).removeprefix(f"{path}: ")
        return Row(public, size, "", f"refused on import: {reason}", None, None, 0, True)
    inputs, *_, feeds = samples_of(public, source, dims)
    feeds = feeds[:SAMPLES]
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


def compared(source: onnx.ModelProto, content: bytes, feeds: list[Feeds]) -> Parity:
    """How the TFLite file's outputs differ from the source model's, in the worst case."""
    reference = OrtSession(source.SerializeToString(), OrtOptions())
    session = LiteRtSession(content)
    verdicts = []
    for feed in feeds:
        expected, got = reference.run(feed), session.run(feed)
        verdicts.append(compare(expected, {name: got[name] for name in expected}, EQUAL))
    return worst(verdicts)


def main() -> int:
    only = make_public_parser(__doc__).parse_args().only
    print_head(HEADS)
    rows = []
    for row in try_models(only, measure):
        rows.append(row)
        print(row.line(), flush=True)
    converted = sum(row.content is not None for row in rows)
    wrong, changed = sum(row.is_wrong for row in rows), sum(not row.unchanged for row in rows)
    print(
        f"\n{converted} of {len(rows)} converted, {wrong} of them wrong; {changed} input files changed;"
        f" {sum(row.inputs == 'real' for row in rows)} compared on real inputs"
    )
    return 1 if wrong or changed else 0


if __name__ == "__main__":
    sys.exit(main())
