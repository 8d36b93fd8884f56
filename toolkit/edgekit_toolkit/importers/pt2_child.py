"""Exports a PyTorch program to ONNX. `pt2` runs this as a child process, which alone imports torch.

    python -m edgekit_toolkit.importers.pt2_child PROGRAM.pt2 MODEL.onnx

The last line of the standard error states the reason of a failure.
"""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Final

OPSET: Final = 18
MISSING_TORCH: Final = 3  # exit code where torch or its exporter cannot be imported


def main(program: str, result: str) -> int:
    """Export the `.pt2` file `program` to the ONNX file `result`.

    Returns:
        The exit code, which is 0 on success, 1 if torch fails, or `MISSING_TORCH`.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    # torch falls back to full unpickling, which runs code from the file, unless it is forced not to.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        import onnxscript  # noqa: F401  # the exporter imports it late, with a message of its own
        import torch  # noqa: TID251  # here it is
    except ImportError as error:
        print(error, file=sys.stderr)
        return MISSING_TORCH
    try:
        loaded = torch.export.load(program)
        names = _output_names(loaded)
        exported = torch.onnx.export(
            loaded,
            dynamo=True,
            opset_version=OPSET,
            external_data=False,
            verbose=False,
            optimize=True,
            output_names=names,
        )
        assert exported is not None  # noqa: S101  # for the type checker: only dynamo=False returns None
        model = exported.model_proto
    except Exception as error:  # whatever torch raises is reported to the parent
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    _forget_origin(model)
    Path(result).write_bytes(model.SerializeToString())
    return 0


def _output_names(program: Any) -> list[str] | None:
    """The keys of the flat dictionary of tensors that the program returns; None for any other result."""
    tree = program.call_spec.out_spec
    keys = tree.context if tree is not None and tree.type is dict else []
    flat = all(child.is_leaf() for child in tree.children()) if keys else False
    return [str(key) for key in keys] if flat else None


def _forget_origin(model: Any) -> None:
    """Drop stack traces and other notes of the exporter, which name files of the machine it ran on."""
    graph = model.graph
    for item in (
        model,
        graph,
        *graph.node,
        *graph.input,
        *graph.output,
        *graph.value_info,
        *graph.initializer,
    ):
        item.ClearField("doc_string")
        item.ClearField("metadata_props")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
