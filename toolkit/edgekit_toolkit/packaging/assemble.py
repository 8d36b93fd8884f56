"""Assembles a package from a model, golden tensors, labels and preprocessing, and writes its manifest.

A package with several variants is combined from packages with one variant each.
"""

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from numpy.typing import NDArray

from edgekit_host.transport.package_encoder import coded_size
from edgekit_runtime.canonical_json import JsonValue, encode_json
from edgekit_runtime.errors import BackendError, ModelError
from edgekit_runtime.package.archive import Sign
from edgekit_runtime.package.canonical_zip import write_archive
from edgekit_runtime.package.golden import Golden, GoldenInput, resample
from edgekit_runtime.package.manifest import Artifact, BackendChoice, Manifest, Variant
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.package.row_sets import row_axes
from edgekit_runtime.package.states import RecurrentState
from edgekit_runtime.trust.dsse import PACKAGE_PREDICATE_TYPE, Statement
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.models.model import Model, Runner
from edgekit_toolkit.onnx_graph.specs import common_specs
from edgekit_toolkit.packaging.golden_branches import open_conditions
from edgekit_toolkit.packaging.golden_rows import (
    JITTERS,
    add_steps,
    choose_seeds,
    count_rows,
    golden_rows,
    off_by_codes,
)
from edgekit_toolkit.packaging.golden_tensors import check_outputs, golden_feeds, golden_outputs
from edgekit_toolkit.packaging.recipe import Recipe
from edgekit_toolkit.samples.generated import Feeds

GOLDEN_SEED: Final = 0
_ROW_PROBES: Final = 8
_THREADS: Final = 1  # splitting a sum among threads changes its last bits


@dataclass(frozen=True, slots=True)
class PackageDraft:
    manifest: Manifest
    artifacts: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Golden inputs and the outputs of the float model for them. All forms of a model share one reference.

    A golden row is one set of golden inputs.

    Attributes:
        inputs: The inputs of the first golden row, as in a manifest.
        artifacts: The contents of the files of `inputs`, by path.
        feeds, outputs: The inputs and outputs of the first golden row, by name.
        rows: A dict from the seed of each additional golden row to its outputs. These are in the order of
            `outputs`, without those in `axes`. The row that best detects a wrong model is first.
        macs: The number of multiply-accumulates of one inference, or infinity if it is unknown.
        axes: A dict from the name of each output with a data-dependent number of rows to the index of the
            axis of the rows.
    """

    inputs: tuple[GoldenInput, ...]
    artifacts: Mapping[str, bytes]
    feeds: Feeds
    outputs: Mapping[str, NDArray[Any]]
    rows: Mapping[int, Sequence[NDArray[Any]]]
    macs: float
    axes: Mapping[str, int] = field(default_factory=dict)


def golden_reference(
    floats: Model,
    dims: Mapping[str, int],
    ranges: Mapping[str, tuple[float, float]],
    seed: int,
    *,
    rows: Sequence[int] | None = None,
) -> Reference:
    """Generate the golden inputs of a model, and run the model on them.

    Args:
        floats: The float model.
        dims: The sizes of the free dimensions, by name.
        ranges: A dict from each input to the smallest and largest value to generate.
        seed: The seed of the first golden row.
        rows: The seeds of the further golden rows, or None to choose them.

    Raises:
        BackendError: The model does not run on the golden inputs.
        DataError: The outputs for the golden inputs cannot be compared.
    """
    inputs, outputs = floats.specs()
    golden, artifacts, feeds = golden_feeds(inputs, dims, ranges, seed)
    names = [spec.name for spec in outputs]
    run = floats.open(names, threads=_THREADS)
    first = dict(zip(names, run(feeds), strict=True))
    check_outputs(first)
    axes = {} if all(spec.size_bytes is not None for spec in outputs) else _row_axes(run, feeds, names)
    fixed, macs = _without(run, names, axes), _macs(floats, dims)
    if rows is None and len(axes) < len(names):
        rows = choose_seeds(fixed, feeds, macs=macs, conditions=open_conditions(floats))
    drawn = {row: fixed(resample(feeds, row)) for row in rows or ()}
    return Reference(
        inputs=golden, artifacts=artifacts, feeds=feeds, outputs=first, rows=drawn, macs=macs, axes=axes
    )


def _row_axes(run: Runner, first: Feeds, names: Sequence[str]) -> dict[str, int]:
    """Return the outputs whose number of rows depends on the data, by a few further rows."""
    feeds, runs = [first], [run(first)]
    for seed in range(_ROW_PROBES):
        with suppress(BackendError):  # values that the model does not take together
            runs.append(run(resample(first, seed)))
            feeds.append(first)
    return row_axes(feeds, [dict(zip(names, outputs, strict=True)) for outputs in runs])


def _without(run: Runner, names: Sequence[str], axes: Mapping[str, int]) -> Runner:
    """Return a runner that returns only outputs of fixed sizes, which further rows compare."""
    return lambda feeds: [value for name, value in zip(names, run(feeds), strict=True) if name not in axes]


def check_provable(model: Model) -> None:
    """Check that a model is deterministic, which the self-test requires.

    Raises:
        ModelError: The model has random operators.
    """
    if names := model.random_nodes():
        raise ModelError(
            f"{names[0]}, one of {len(names)} random operators, gives other values in each run, so no device"
            " could prove that it runs the model right; export the model for inference, without dropout or"
            " sampling, or make the noise an input"
        )


def _macs(model: Model, dims: Mapping[str, int]) -> float:
    """Return the multiply-adds of one inference; infinite if they cannot be counted."""
    try:
        return sum(cost.macs for cost in model.node_costs(dims))
    except ModelError:
        return math.inf


def assemble(recipe: Recipe, reference: Reference, model: Model) -> PackageDraft:
    """Run a model on the golden inputs, and return the package that the recipe describes.

    Raises:
        BackendError: The model does not run on the golden inputs.
        DataError: An output of the float model contains NaN, or all of its values are infinite.
    """
    inputs, outputs = model.specs(list(reference.outputs))
    path = model.file_name
    golden, more = _golden(recipe, reference, model, [spec.name for spec in outputs])
    contents = {path: model.content, **reference.artifacts, **more}
    roles = {path: "model", **dict.fromkeys([*reference.artifacts, *more], "golden")}
    if recipe.labels is not None:
        contents["labels.txt"], roles["labels.txt"] = recipe.labels.encode(), "labels"
    if recipe.preprocessing is not None:
        contents["preprocessing.json"] = encode_json(dict(recipe.preprocessing))
        roles["preprocessing.json"] = "preprocessing"
    manifest = Manifest(
        name=recipe.name,
        version=recipe.version,
        target=recipe.target,
        inputs=inputs,
        outputs=outputs,
        artifacts=describe_artifacts(contents, roles),
        backend=_backend(recipe, path, model),
        golden=golden,
        preprocessing="preprocessing.json" if recipe.preprocessing is not None else None,
        labels="labels.txt" if recipe.labels is not None else None,
        task=None if recipe.task is None else TaskChoice.from_json(recipe.task, "task"),
        budget=recipe.budget,
        figures=recipe.figures,
        provenance={
            "source_sha256": recipe.source_sha256,
            "recipe_sha256": recipe.sha256,
            "form": recipe.form.kind,
            "tools": dict(recipe.tools),
            **({"fixed_inputs": dict(recipe.fixed)} if recipe.fixed else {}),
        },
        states=tuple(RecurrentState(output, target) for output, target in sorted(recipe.states.items())),
    )
    return PackageDraft(manifest, {path: contents[path] for path in sorted(contents)})


def _golden(
    recipe: Recipe, reference: Reference, model: Model, names: Sequence[str]
) -> tuple[Golden, dict[str, bytes]]:
    """Return the golden tensors of a form, and the artifacts of its outputs.

    TensorRT gets the first row alone: its arithmetic (TF32, fused int8) is another than the one that the
    tolerances of the further rows were measured for.
    """
    run, integer = model.open(names, threads=_THREADS), model.computes_in_codes()
    feeds, floats = reference.feeds, {name: reference.outputs[name] for name in names}
    first = dict(zip(names, run(feeds), strict=True))
    axes = {**reference.axes, **row_axes([{}, {}], [first, floats])}
    jittered = []
    for turn in range(JITTERS if integer else 0):
        with suppress(BackendError):  # the model may refuse such values
            shifted = run(add_steps(feeds, off_by_codes(feeds, turn)))
            jittered.append(dict(zip(names, shifted, strict=True)))
    expected, artifacts = golden_outputs(first, floats, integer=integer, axes=axes, jittered=jittered)
    order = [name for name in reference.outputs if name not in reference.axes]
    fixed = [name for name in names if name not in axes]
    cheap_macs = find_support(recipe.backend).cheap_row_macs
    if cheap_macs is None or not fixed:
        return Golden(reference.inputs, expected), artifacts
    drawn = {
        seed: [reference.rows[seed][order.index(name)] for name in fixed]
        for seed in list(reference.rows)[: count_rows(reference.macs, cheap_macs)]
    }
    rows, more = golden_rows(_without(run, names, axes), feeds, drawn, fixed, integer=integer)
    return Golden(reference.inputs, expected, rows), {**artifacts, **more}


def with_threads(package: PackageDraft, recipe: Recipe, threads: int) -> tuple[PackageDraft, Recipe]:
    """Return copies of a package and its recipe that use `threads` engine threads."""
    recipe, backend = replace(recipe, threads=threads), package.manifest.backend
    manifest = replace(
        package.manifest,
        backend=replace(backend, options={**backend.options, "threads": threads}),
        provenance={**package.manifest.provenance, "recipe_sha256": recipe.sha256},
    )
    return PackageDraft(manifest, package.artifacts), recipe


def combine(first: PackageDraft, others: Mapping[str, PackageDraft], recipe: Recipe) -> PackageDraft:
    """Return the package `first` with the variants of the other packages added to it.

    All variants share the golden inputs. If one variant fixes the size of a dimension, it is fixed for all
    variants.

    Args:
        first: The package of the first variant.
        others: A dict from the names of the other variants to their packages. Each package has one variant,
            and was assembled from the same `Reference` as `first`.
        recipe: The recipe of the combined package.

    Raises:
        DataError: The variants differ in their inputs or outputs.
        ManifestError: A name is not allowed for a variant.
    """
    contents = dict(first.artifacts)
    roles = {artifact.path: artifact.role for artifact in first.manifest.artifacts}
    inputs, outputs = first.manifest.inputs, first.manifest.outputs
    variants = []
    for name, other in others.items():
        inputs = common_specs(inputs, other.manifest.inputs)
        outputs = common_specs(outputs, other.manifest.outputs)
        moved = _move(name, other.manifest)
        contents |= {new_path: other.artifacts[path] for path, new_path in moved.items()}
        roles |= {
            moved[artifact.path]: artifact.role
            for artifact in other.manifest.artifacts
            if artifact.path in moved
        }
        variants.append(_as_variant(name, other.manifest, moved))
    provenance: dict[str, JsonValue] = {"recipe_sha256": recipe.sha256, "tools": dict(recipe.tools)}
    whole = replace(
        first.manifest,
        inputs=inputs,
        outputs=outputs,
        artifacts=describe_artifacts(contents, roles),
        variants=tuple(variants),
        provenance={**first.manifest.provenance, **provenance},
    )
    return PackageDraft(whole, {path: contents[path] for path in sorted(contents)})


def _move(name: str, manifest: Manifest) -> dict[str, str]:
    """Return the new places of model and golden outputs when a package becomes a variant of another one."""
    paths = [choice.artifact for choice in manifest.backend.chain]
    paths += [output.path for output in manifest.golden.outputs]
    paths += [output.path for output in manifest.golden.rows.outputs] if manifest.golden.rows else []
    return {path: f"variants/{name}/{path.rpartition('/')[2]}" for path in paths}


def _as_variant(name: str, manifest: Manifest, moved: Mapping[str, str]) -> Variant:
    golden = manifest.golden
    outputs = tuple(replace(output, path=moved[output.path]) for output in golden.outputs)
    rows = golden.rows and replace(
        golden.rows,
        outputs=tuple(replace(output, path=moved[output.path]) for output in golden.rows.outputs),
    )
    backend: BackendChoice | None = None
    for choice in reversed(manifest.backend.chain):
        backend = replace(choice, artifact=moved[choice.artifact], fallback=backend)
    assert backend is not None  # noqa: S101  # for the type checker: a chain holds at least one
    return Variant(name, backend, Golden(golden.inputs, outputs, rows), manifest.figures)


def describe_artifacts(contents: Mapping[str, bytes], roles: Mapping[str, str]) -> tuple[Artifact, ...]:
    """Return the artifacts for the manifest, sorted by path. The keys of both arguments are paths."""
    return tuple(
        Artifact(path, len(contents[path]), hashlib.sha256(contents[path]).hexdigest(), roles[path])
        for path in sorted(contents)
    )


def _backend(recipe: Recipe, path: str, model: Model) -> BackendChoice:
    fallback = find_support(recipe.backend).fallback
    if not fallback:
        stated = {} if recipe.threads is None else {"threads": recipe.threads}
        return BackendChoice(recipe.backend, path, {**model.options, **stated})
    # No options: the model itself states what is int8, and a strongly typed build follows it.
    return BackendChoice(recipe.backend, path, {}, BackendChoice(fallback, path, model.options))


def package_file(assembled: PackageDraft, sign: Sign) -> bytes:
    """Sign a draft and return the content of the package file."""
    manifest = assembled.manifest.to_bytes()
    statement = Statement("manifest.json", hashlib.sha256(manifest).hexdigest(), PACKAGE_PREDICATE_TYPE, {})
    head = [("manifest.json", manifest), ("signature.dsse.json", sign(statement.to_bytes()))]
    file = io.BytesIO()
    write_archive(file, [*head, *assembled.artifacts.items()])
    return file.getvalue()


def transport_bytes(assembled: PackageDraft, sign: Sign) -> int:
    """Return the number of bytes to transfer the package to a device that has no earlier version of it."""
    return coded_size(package_file(assembled, sign))
