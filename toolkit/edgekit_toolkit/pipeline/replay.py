"""Repeat a recipe: the package that was decided once, made again of the same model without a search."""

import hashlib
from pathlib import Path

import onnx

from edgekit_runtime.errors import DataError, ManifestError, RecipeError
from edgekit_toolkit.importers.source import load_model
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.ort_options import disable_optimizers
from edgekit_toolkit.packaging.assemble import Assembled, assemble, combine, golden_reference
from edgekit_toolkit.packaging.recipe import Recipe, tool_versions
from edgekit_toolkit.passes.chain import replay
from edgekit_toolkit.quantize.forms import build


def repeat(model_path: Path, recipe: Recipe) -> Assembled:
    """Return the package that `recipe` makes of the model at `model_path`, without a search.

    Raises:
        RecipeError: the recipe is of another model, or these tools make another model of it.
        ModelError: the model cannot be used.
    """
    source = load_model(model_path)
    if source.sha256 != recipe.source_sha256:
        raise RecipeError(
            f"the recipe is for a model with sha256 {recipe.source_sha256}, but {model_path} has"
            f" {source.sha256}; give the model that it was made of"
        )
    floats: Model = source.model
    if isinstance(floats, OnnxModel):
        passed = replay(floats.proto, batch=recipe.batch, applied=recipe.steps)
        inferred = onnx.shape_inference.infer_shapes(passed)
        floats = OnnxModel(disable_optimizers(inferred, recipe.disabled_optimizers))
    try:
        reference = golden_reference(floats, recipe.dims, recipe.golden_ranges, recipe.golden_seed)
        first = assemble(recipe, reference, _rebuild(floats, recipe))
        if not recipe.variants:
            return first
        alone = {variant.name: recipe.of_variant(variant) for variant in recipe.variants}
        others = {name: assemble(one, reference, _rebuild(floats, one)) for name, one in alone.items()}
        return combine(first, others, recipe)
    except (DataError, ManifestError) as error:
        raise RecipeError(f"the recipe makes no package: {error}; make another one by its options") from error


def _rebuild(floats: Model, recipe: Recipe) -> Model:
    """Return the model that a recipe is of.

    Raises:
        RecipeError: these tools make another one.
    """
    model = _build(floats, recipe)
    made = None if model is None else hashlib.sha256(model.content).hexdigest()
    if model is None or made != recipe.model_sha256:
        here = tool_versions("litert")
        changed = [
            f"{name} {version} (here {here.get(name)})"
            for name, version in recipe.tools.items()
            if here.get(name) != version
        ]
        raise RecipeError(
            f"the recipe makes a model with sha256 {made} here, it states {recipe.model_sha256}; "
            + (f"it was made with {', '.join(changed)}" if changed else "it was edited by hand or is damaged")
        )
    stated, size_bytes = recipe.figures.get("model_bytes"), len(model.content)
    if stated != size_bytes:
        raise RecipeError(
            f"the recipe states {stated} bytes for a model of {size_bytes};"
            " it was edited by hand or is damaged"
        )
    return model


def _build(floats: Model, recipe: Recipe) -> Model | None:
    """The model of the recipe's form; a conversion is as it was checked when the recipe was made.

    Raises:
        RecipeError: the recipe is for an engine that does not run the model.
    """
    if recipe.backend != "litert":
        if not isinstance(floats, OnnxModel):
            raise RecipeError(
                f"the recipe is for {recipe.backend}, which does not run .tflite models; make another one by"
                " its options"
            )
        made = build(floats.proto, recipe.form)
        return None if made is None else OnnxModel(made)
    from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
    from edgekit_toolkit.tflite.convert import convert

    content = convert(floats.proto, recipe.dims) if isinstance(floats, OnnxModel) else floats.content
    return LiteRtQuantizer(content, threads=1).build(recipe.form)
