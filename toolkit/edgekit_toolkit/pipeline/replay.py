"""Repeats a recipe, which builds the same package from the same model without a search."""

import hashlib
from dataclasses import replace
from pathlib import Path

import onnx

from edgekit_runtime.errors import DataError, ManifestError, PackageError, RecipeError
from edgekit_runtime.package.archive import DEFAULT_LIMITS
from edgekit_runtime.package.canonical_zip import read_members
from edgekit_runtime.system.engines import find_engine
from edgekit_toolkit.engines.record import find_support, list_supported
from edgekit_toolkit.importers.source import load_model
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.functions import inline_functions
from edgekit_toolkit.onnx_graph.ort_options import disable_optimizers
from edgekit_toolkit.packaging.assemble import PackageDraft, assemble, combine, golden_reference
from edgekit_toolkit.packaging.recipe import Recipe, read_recipe, tool_versions
from edgekit_toolkit.passes.chain import replay
from edgekit_toolkit.quantize.forms import EarlierModel


def read_earlier(path: Path) -> tuple[Recipe, EarlierModel]:
    """Return the recipe at `path`, and the model of the package in the same folder.

    Raises:
        RecipeError: The recipe or the package cannot be read, or the package belongs to another recipe.
    """
    recipe = read_recipe(path)
    package = path.with_name(f"{path.name.removesuffix('.recipe.json')}.edgepkg")
    try:
        content = memoryview(package.read_bytes())
        members = read_members(content, package.name, DEFAULT_LIMITS.max_members)
    except (OSError, PackageError) as error:
        raise RecipeError(f"{package}, the package beside the recipe, cannot be read: {error}") from error
    for member in members:
        model = bytes(content[member.payload_offset : member.payload_offset + member.size_bytes])
        if hashlib.sha256(model).hexdigest() == recipe.model_sha256:
            return recipe, EarlierModel(recipe.model_sha256, model)
    raise RecipeError(f"{package} does not hold the model of {path.name}: keep both as they were written")


def repeat(model_path: Path, recipe: Recipe, earlier: EarlierModel | None = None) -> PackageDraft:
    """Build the package that `recipe` describes from the model at `model_path`, without a search.

    `earlier` is needed if the recipe builds an update whose weights are close to those of an earlier model.

    Raises:
        RecipeError: The recipe is for another model, or the installed tools build a different package.
        ModelError: The model cannot be used.
    """
    source = load_model(model_path, recipe.fixed, recipe.states)
    if source.sha256 != recipe.source_sha256:
        raise RecipeError(
            f"the recipe is for a model with sha256 {recipe.source_sha256}, but {model_path} has"
            f" {source.sha256}; give the model that it was made of"
        )
    floats: Model = source.model
    if isinstance(floats, OnnxModel):
        runnable = inline_functions(floats.proto, recipe.written_out) or floats.proto
        passed = replay(runnable, batch=recipe.batch, applied=recipe.steps)
        inferred = onnx.shape_inference.infer_shapes(passed)
        floats = OnnxModel(disable_optimizers(inferred, recipe.disabled_optimizers))
    try:
        reference = golden_reference(
            floats, recipe.dims, recipe.golden_ranges, recipe.golden_seed, rows=recipe.golden_rows
        )
        first = assemble(recipe, reference, _rebuild(floats, recipe, earlier))
        if not recipe.variants:
            return first
        alone = {variant.name: recipe.of_variant(variant) for variant in recipe.variants}
        others = {
            name: assemble(variant_recipe, reference, _rebuild(floats, variant_recipe, earlier))
            for name, variant_recipe in alone.items()
        }
        return combine(first, others, recipe)
    except (DataError, ManifestError) as error:
        raise RecipeError(f"the recipe makes no package: {error}; make another one by its options") from error


def _rebuild(floats: Model, recipe: Recipe, earlier: EarlierModel | None) -> Model:
    """Return the model of a recipe.

    Raises:
        RecipeError: these tools make another model.
    """
    form = recipe.form
    if earlier is not None and form.earlier is not None and form.earlier.sha256 == earlier.sha256:
        form = replace(form, earlier=earlier)
    if not isinstance(floats, OnnxModel) and find_engine(recipe.backend).file_format == "onnx":
        raise RecipeError(
            f"the recipe is for {recipe.backend}, which does not run .tflite models; make another one by its"
            " options"
        )
    model = find_support(recipe.backend).maker.build(floats, form, recipe.dims)
    digest = None if model is None else hashlib.sha256(model.content).hexdigest()
    if model is None or digest != recipe.model_sha256:
        here = tool_versions(*list_supported())
        changed = [
            f"{name} {version} (here {here.get(name)})"
            for name, version in recipe.tools.items()
            if here.get(name) != version
        ]
        raise RecipeError(
            f"the recipe makes a model with sha256 {digest} here, it states {recipe.model_sha256}; "
            + (f"it was made with {', '.join(changed)}" if changed else "it was edited by hand or is damaged")
        )
    stated, size_bytes = recipe.figures.get("model_bytes"), len(model.content)
    if stated != size_bytes:
        raise RecipeError(
            f"the recipe states {stated} bytes for a model of {size_bytes};"
            " it was edited by hand or is damaged"
        )
    return model
