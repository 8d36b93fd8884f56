"""Packages a model without changes, for example in float32. No search and no samples are needed."""

import hashlib
from pathlib import Path

from edgekit_runtime.errors import ModelError
from edgekit_runtime.package.archive import Sign, write_package
from edgekit_toolkit.importers.model_file import errors_with_path
from edgekit_toolkit.importers.source import load_model
from edgekit_toolkit.onnx_graph.specs import batch_dims, free_dims
from edgekit_toolkit.packaging.assemble import (
    GOLDEN_SEED,
    assemble,
    check_provable,
    golden_reference,
)
from edgekit_toolkit.packaging.next_version import FIRST_VERSION
from edgekit_toolkit.packaging.recipe import Recipe, tool_versions
from edgekit_toolkit.quantize.forms import FLOAT32, Form


def write_plain_package(
    model: Path, *, name: str, target: str, folder: Path, sign: Sign, version: str = FIRST_VERSION
) -> Path:
    """Package an unoptimised model for the engine of its file format, and return the path of the package.

    Raises:
        ModelError: The model cannot be used, or has free dimensions other than the batch.
        BackendError: The model does not run on generated inputs.
        OutputError: The package cannot be written.
    """
    source = load_model(model)
    with errors_with_path(model):
        check_provable(source.model)
    batch = batch_dims(source.inputs)
    if others := [dim for dim in free_dims(source.inputs) if dim not in batch]:
        raise ModelError(f"{model}: dimension {others[0]!r} has no size; fix it by edgekit package --dim")
    dims = dict.fromkeys(batch, 1)
    content, golden = source.model.content, golden_reference(source.model, dims, {}, GOLDEN_SEED)
    recipe = Recipe(
        name=name,
        version=version,
        target=target,
        backend=source.model.engine,
        source_sha256=source.sha256,
        batch=None,
        dims=dims,
        steps=(),
        form=Form(FLOAT32),
        model_sha256=hashlib.sha256(content).hexdigest(),
        golden_seed=GOLDEN_SEED,
        golden_ranges={},
        golden_rows=tuple(golden.rows),
        budget={},
        figures={},
        labels=None,
        preprocessing=None,
        tools=tool_versions(source.model.engine),
    )
    package = assemble(recipe, golden, source.model)
    path = folder / package.manifest.file_name
    write_package(path, package.manifest, package.artifacts, sign)
    return path
