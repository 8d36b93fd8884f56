"""Writes a trained network and its data as files: ONNX, npz, models.json, SHA256SUMS, README table.

The ONNX graph is what a user would ship: batch normalisation folded, dropout gone, opset 18, one
dynamic dimension `N`, and no trace of the machine that exported it.
"""

import copy
import hashlib
import io
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

OPSET = 18
BATCH_DIMENSION = "N"
OUTPUT_NAME = "logits"
TABLE_BEGIN = "<!-- models: written by train.py -->"
TABLE_END = "<!-- end of models -->"


def fold_batch_norm(network: nn.Module) -> nn.Module:
    """A copy in evaluation mode whose batch normalisations are folded into the convolutions before them.

    A normalisation is folded when it is the next child after a convolution in the same module.
    """
    folded = copy.deepcopy(network).eval()
    for module in folded.modules():
        children = list(module.named_children())
        for (conv_name, conv), (norm_name, norm) in itertools.pairwise(children):
            if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
                assert isinstance(conv, nn.Conv1d | nn.Conv2d)
                setattr(module, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(module, norm_name, nn.Identity())
    return folded


def to_onnx(network: nn.Module, input_name: str, sample_shape: tuple[int, ...]) -> bytes:
    """The network as ONNX: input float32 [N, *sample_shape], output `logits` [N, classes].

    Raises:
        onnx.checker.ValidationError: The exported graph is not valid ONNX.
    """
    # The exporter warns of every torchvision operator that it cannot register; none is used here.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    program = torch.onnx.export(
        fold_batch_norm(network),
        (torch.zeros(2, *sample_shape),),
        input_names=[input_name],
        output_names=[OUTPUT_NAME],
        opset_version=OPSET,
        dynamic_shapes=({0: torch.export.Dim(BATCH_DIMENSION)},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    model = program.model_proto
    _strip_traces(model)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def _strip_traces(model: onnx.ModelProto) -> None:
    """Remove what the exporter notes beside the graph: stack traces with paths of this machine, and shapes.

    The shapes of intermediate tensors follow from the graph, and the checker infers them again.
    """
    graph = model.graph
    graph.ClearField("value_info")
    graph.name = "main"
    for noted in (model, graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        noted.ClearField("metadata_props")
        noted.ClearField("doc_string")


def count_correct(model: bytes, input_name: str, x: NDArray[np.float32], y: NDArray[np.int64]) -> int:
    """How many of the samples onnxruntime's CPU engine classifies as labelled."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {input_name: x})
    return int((np.asarray(logits).argmax(axis=1) == y).sum())


def count_weights(model: bytes) -> int:
    """The number of float values in the graph's weights, after folding."""
    initializers = onnx.load_from_string(model).graph.initializer
    return sum(int(np.prod(w.dims)) for w in initializers if w.data_type == onnx.TensorProto.FLOAT and w.dims)


def npz_bytes(arrays: dict[str, NDArray[Any]]) -> bytes:
    """A compressed npz. Its bytes depend on the arrays and on zlib's version, not on the time."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def update_records(folder: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Merge the entries into models.json; rewrite SHA256SUMS and README's table from it."""
    path = folder / "models.json"
    records: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    records = dict(sorted((records | entries).items()))
    path.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    files = [file for record in records.values() for file in record["files"].values()]
    sums = sorted(f"{file['sha256']}  {file['path']}\n" for file in files)
    (folder / "SHA256SUMS").write_text("".join(sorted(sums, key=lambda line: line[66:])), encoding="utf-8")
    readme = folder / "README.md"
    before, begin, behind = readme.read_text(encoding="utf-8").partition(TABLE_BEGIN)
    _, end, after = behind.partition(TABLE_END)
    readme.write_text(before + begin + "\n" + "".join(_table(records)) + end + after, encoding="utf-8")


def _table(records: dict[str, Any]) -> Iterator[str]:
    """README's table of models, a line at a time."""
    yield "| model | architecture | parameters | bytes | input | accuracy (held out) | sha256 |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for name, record in records.items():
        model, score, spec = record["files"]["model"], record["eval"], record["input"]
        shape = ", ".join(map(str, spec["shape"]))
        yield (
            f"| `{name}` | {record['architecture']} | {record['parameters']:,} | {model['bytes']:,} "
            f"| `{spec['name']}` {spec['dtype']} [{shape}] "
            f"| {100 * score['correct'] / score['samples']:.2f} % ({score['correct']}/{score['samples']}) "
            f"| `{model['sha256']}` |\n"
        )
