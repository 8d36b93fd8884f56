"""ONNX's tests of operators, each in a process of its own: what imports, converts to TFLite and has costs.

    scripts/python benchmarks/function_operators.py [--only TEXT] [--json FILE]

Of many operators that ONNX defines by a function the set has a test and the same test written out
(`test_gelu_default_1`, `test_gelu_default_1_expanded`). A test that is refused although its written-out form
is not, is one that inlining would have rescued; those are counted. Then it lists why the tests that import
are refused for LiteRT, by operator and reason. Ends with 1 if a result is wrong or a process died.
"""

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.case.test_case import TestCase

from edgekit_runtime.sessions.litert.session import LiteRtSession
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.passes.parity import Tolerance, compare
from edgekit_toolkit.tflite.convert import convert
from processes import run_apart
from results import make_parser, write_json

_CLOSE = Tolerance(range_fraction=1e-3, ulps=64)  # the tests' own bound is 1e-3 of each value
_STEPS = ("import", "litert", "costs")


def steps_of(case: TestCase) -> dict[str, Callable[[], str]]:
    inputs, outputs = case.data_sets[0]
    feeds = dict(zip((value.name for value in case.model.graph.input), inputs, strict=True))
    expected = dict(zip((value.name for value in case.model.graph.output), outputs, strict=True))

    def imported() -> onnx.ModelProto:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "case.onnx"
            path.write_bytes(case.model.SerializeToString())
            return load_onnx(path).model.proto

    def verdict(results: dict[str, Any]) -> str:
        parity = compare(expected, {name: results[name] for name in expected}, _CLOSE)
        return "" if parity.ok else f"WRONG: {parity.reason}"

    def run_ort() -> str:
        return verdict(OrtSession(imported().SerializeToString(), OrtOptions(optimise=False)).run(feeds))

    def run_litert() -> str:
        return verdict(dict(LiteRtSession(convert(imported(), {})).run(feeds)))

    def count() -> str:
        return "" if OnnxModel(imported()).node_costs({}) is not None else "no costs"

    return dict(zip(_STEPS, (run_ort, run_litert, count), strict=True))


def is_plain(case: TestCase) -> bool:
    """Whether all inputs and outputs are tensors of fixed sizes, and there is an input."""
    values = (*case.model.graph.input, *case.model.graph.output)
    return bool(case.model.graph.input) and all(
        value.type.WhichOneof("value") == "tensor_type"
        and value.type.tensor_type.elem_type != onnx.TensorProto.STRING
        for value in values
    )


def rescued(results: dict[str, dict[str, str]], step: str) -> list[str]:
    """The refused tests whose written-out form is not refused."""
    works = [name for name, reasons in results.items() if not reasons[step]]
    written_out = {re.sub(r"_expanded(_ver\d+)?$", "", name) for name in works if "_expanded" in name}
    return [name for name, reasons in results.items() if reasons[step] and name in written_out]


def refusals(results: dict[str, dict[str, str]]) -> Counter[str]:
    """How often an operator is refused for LiteRT, by operator and reason, of the tests that import."""
    reasons = [steps["litert"] for steps in results.values() if steps["litert"] and not steps["import"]]
    counts = Counter[str]()
    for reason in reasons:
        node = re.search(r"operator ('\w+') at .*?: (.*)", reason)
        text = f"{node[1]}: {node[2]}" if node else reason.partition("\n")[0]
        counts[re.sub(r"(?<!^)'[^']*'|\d+", "_", text)] += 1
    return counts


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results = {
        case.name: {name: run_apart(step) for name, step in steps_of(case).items()}
        for case in collect_testcases(None)
        if options.only in case.name and case.model is not None and is_plain(case)
    }
    write_json(options.json, results)
    faults = 0
    for step in _STEPS:
        kinds = Counter(reasons[step].partition(":")[0] or "ok" for reasons in results.values())
        faults += kinds["WRONG"] + kinds["DIED"] + kinds["TRACEBACK"]
        names = rescued(results, step)
        print(f"{step}: {dict(kinds.most_common())}; refused although written out it works: {len(names)}")
        print("  " + ", ".join(names))
    imported = [steps for steps in results.values() if not steps["import"]]
    print(
        f"of {len(imported)} that import {sum(not steps['litert'] for steps in imported)} convert and match"
    )
    for reason, count in refusals(results).most_common():
        print(f"{count:4} {reason}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
