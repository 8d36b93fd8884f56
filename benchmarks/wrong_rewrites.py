"""Time in which packaging finds rewrites of onnxruntime that change a model, beside that of our own passes.

    scripts/python benchmarks/wrong_rewrites.py MODEL.onnx...

Prints one line a model, with the rewrites that were found. Inputs are generated.
"""

import time
from pathlib import Path

from edgekit_toolkit.importers.source import load_model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.passes.wrong_rewrites import find_wrong_rewrites
from edgekit_toolkit.samples.generated import bind_dims, generate_feeds
from results import make_parser


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    for path in parser.parse_args().models:
        source = load_model(path).model
        if not isinstance(source, OnnxModel):
            parser.error(f"{path} is no ONNX model")
        model = source.proto
        feeds = generate_feeds(tensor_specs(model)[0], 2, 0, bind_dims(model))
        begin = time.monotonic()
        optimised = optimise(model, batch=None, feeds=feeds).model
        middle = time.monotonic()
        found = find_wrong_rewrites(optimised, feeds)
        end = time.monotonic()
        names = "none" if found is None else ", ".join(found.names)
        print(f"{path.stem}: passes {middle - begin:.2f} s, rewrites {end - middle:.2f} s, wrong: {names}")


if __name__ == "__main__":
    main()
