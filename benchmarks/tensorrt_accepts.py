"""Does TensorRT's parser and builder accept every candidate that `edgekit package --target jetson` makes?

Usage: python benchmarks/tensorrt_accepts.py MODEL.onnx ... (default: models/tiny, and ../shared/models)
Needs the wheels of requirements/tensorrt.txt; no GPU. Prints a line a model; exits 1 on a refusal.
"""

import sys
import tempfile
from pathlib import Path

from edgekit_toolkit.engines.tensorrt_check import check_tensorrt
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.pipeline.search import search
from edgekit_toolkit.selection.budget import parse_budget
from edgekit_toolkit.targets.loader import load_target

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    folders = (ROOT / "models" / "tiny", ROOT.parent / "shared" / "models" / "models")
    paths = [Path(name) for name in sys.argv[1:]] or [
        path for folder in folders for path in sorted(folder.glob("*.onnx"))
    ]
    target, refused = load_target("jetson"), 0
    with tempfile.TemporaryDirectory() as folder:
        generate_key("benchmark", Path(folder))
        signer = load_signer("benchmark", Path(folder))
        for path in paths:
            request = Request(
                model=path,
                target=target,
                budget=parse_budget("size=100MB,drop=100%"),
                name="x",
                version="1",
                search_s=5,
            )
            run = search(request, signer, lambda *_: None)
            verdicts = []
            for candidate in run.candidates:
                shapes = {
                    spec.name: (tuple(run.prepared.dims.get(str(size), size) for size in spec.shape),) * 3
                    for spec in run.prepared.source.inputs
                    if any(isinstance(size, str) for size in spec.shape[1:])
                }
                check = check_tensorrt(candidate.model.content, shapes=shapes)
                verdicts.append(check.accepted)
                if not check.accepted:
                    print(f"  refused: {path.name}: {candidate.label}: {check.errors[:1]}")
            refused += verdicts.count(False)
            print(f"{path.name}: {verdicts.count(True)} of {len(verdicts)} candidates accepted", flush=True)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
