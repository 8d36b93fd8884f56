"""`edgekit inspect FILE.tflite`: shows the interface, operators and layers of a model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from edgekit_toolkit.importers.model_file import SourceModel
    from edgekit_toolkit.models.tflite import TfliteModel
    from edgekit_toolkit.tflite.summary import InterfaceTensor


def show_tflite(path: Path, *, as_json: bool) -> None:
    """Print the interface, operators and layers of a `.tflite` model, as JSON if `as_json`.

    Raises:
        ModelError: The file cannot be used, or LiteRT cannot run it.
        EngineMissingError: LiteRT is not installed.
    """
    from edgekit_toolkit.importers.tflite.importer import load_tflite

    source = load_tflite(path)
    if as_json:
        _print_json(source)
    else:
        _show(source)


def _print_json(source: SourceModel[TfliteModel]) -> None:
    import json
    from dataclasses import asdict

    summary = source.model.summary
    document = {
        "path": str(source.path),
        "sha256": source.sha256,
        "bytes": source.size_bytes,
        **asdict(summary),
        "layers": [{"name": name, **asdict(layer)} for name, layer in summary.layers.items()],
        "quantized": summary.quantized,
    }
    click.echo(json.dumps(document, indent=2))


def _show(source: SourceModel[TfliteModel]) -> None:
    from edgekit_host.terminal import open_console, print_line, print_section

    console, summary = open_console(), source.model.summary
    print_line(console, (f"{source.path.name}, a LiteRT model", "bold"))
    description = [("description", summary.description)] if summary.description else []
    size = ("size", f"{source.size_bytes:,} bytes, {summary.weight_bytes:,} of them constants")
    print_section(console, "File", [size, ("sha256", source.sha256), *description])
    for title, tensors in (("Inputs", summary.inputs), ("Outputs", summary.outputs)):
        print_section(console, title, [(tensor.name, _type(tensor)) for tensor in tensors])
    print_section(console, "Layers with weights", _layer_rows(source))
    counts = [(name, f"{count:,}") for name, count in summary.operators.items()]
    print_section(console, "Operators", counts)
    total = sum(summary.operators.values())
    rows = [
        ("in codes", f"{summary.integer_operators:,} of {total:,} operators compute with 8- or 16-bit codes")
    ]
    if summary.subgraphs > 1:
        rows.append(("sub-graphs", f"{summary.subgraphs:,}: control flow, or several signatures"))
    verdict = "packaged as it is" if summary.quantized else "quantized when it is packaged"
    rows.append(("edgekit package", f"{'quantized already' if summary.quantized else 'float'}: {verdict}"))
    print_section(console, "Arithmetic", rows)


def _type(tensor: InterfaceTensor) -> str:
    """Return the type and shape, and how the codes of a quantized tensor convert to real values."""
    text = f"{tensor.dtype} [{', '.join('free' if size < 0 else str(size) for size in tensor.shape)}]"
    if tensor.scale is None or tensor.zero_point is None:
        return text
    zero = f"- {tensor.zero_point}" if tensor.zero_point >= 0 else f"+ {-tensor.zero_point}"
    return f"{text}, {tensor.scale:g} * (code {zero})"


def _layer_rows(source: SourceModel[TfliteModel]) -> Iterator[tuple[str, str, str]]:
    """Return a row for each storage format of layers, most frequent first."""
    layers = source.model.summary.layers.values()
    for precision, count in Counter(layer.precision for layer in layers).most_common():
        weight_bytes = sum(layer.weight_bytes for layer in layers if layer.precision == precision)
        yield precision, f"{count:,} layer{'' if count == 1 else 's'}", f"{weight_bytes:,} bytes of weights"
