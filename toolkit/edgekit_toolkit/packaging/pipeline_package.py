"""Combines packages of single models into one package of a pipeline, and sums up their costs."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from edgekit_runtime.canonical_json import JsonValue, encode_json
from edgekit_runtime.errors import DataError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.figures import ANSWER_OUTPUT_FIGURE, RUN_MEMORY_FIGURE
from edgekit_runtime.package.golden import Golden, GoldenOutput, draw_bytes
from edgekit_runtime.package.manifest import (
    MEMBER_ROLE,
    PIPELINE,
    BackendChoice,
    FormatInfo,
    Manifest,
    TaskChoice,
)
from edgekit_runtime.package.pipeline import SOURCE, Pipeline, Stage, member_folder
from edgekit_runtime.package.variants import DEFAULT_VARIANT
from edgekit_runtime.pipelines.backend import open_stages
from edgekit_runtime.pipelines.member import MAX_BATCH
from edgekit_runtime.pipelines.session import PipelineSession
from edgekit_runtime.sessions.backends import list_backends
from edgekit_toolkit.packaging.assemble import PackageDraft, describe_artifacts
from edgekit_toolkit.packaging.golden_tensors import golden_input

_PREPROCESSING: Final = "preprocessing.json"
_SIDE: Final = 32  # pixels of the generated picture
_SAMPLES: Final = 4096
# The array, Pillow's copy with 4 bytes a pixel, its copy in RGB, and a crop of all of it.
_RUN_BYTES_PER_INPUT_BYTE: Final = 6.0

File: TypeAlias = tuple[str, bytes, str]
"""The path, content and role of an artifact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """The costs of a stage with a model.

    Attributes:
        task: The name of the task, or an empty string.
        count: The maximum number of images, such as crops, that the model runs on for one input image.
        size_bytes: The size of the artifacts.
        latency_ms: The latency of one image, or None if it is unknown.
        memory_bytes: The memory of the model with the largest batch of crops, or None if it is unknown.
        engine_bytes: The memory of the engine without a model, or None if it is unknown.
        origin: The method and the device of the latency, such as `modelled, rpi5`.
    """

    name: str
    task: str
    count: int
    size_bytes: int
    latency_ms: float | None
    memory_bytes: int | None
    engine_bytes: int | None
    origin: str


def add_costs(stages: Sequence[StageCosts], size_bytes: int) -> dict[str, float | None]:
    """Return the size in bytes, latency in ms and memory in bytes of a pipeline. Unknown figures are None.

    The latency is the sum over all stages, and each stage runs `count` times. The memory is the sum over all
    models, plus the memory of the largest engine.
    """

    def add(values: Sequence[float | None]) -> float | None:
        known_values = [value for value in values if value is not None]
        return sum(known_values) if len(known_values) == len(values) else None

    latency = add([s.latency_ms and s.latency_ms * s.count for s in stages])
    above = add([stage.memory_bytes for stage in stages])
    engines = [stage.engine_bytes for stage in stages if stage.engine_bytes is not None]
    has_engines = above is not None and len(engines) == len(stages)
    memory = (above or 0) + max(engines) if has_engines else None
    return {"size": float(size_bytes), "latency": latency, "memory": memory}


def count_costs(
    stages: Sequence[Stage],
    packages: Mapping[str, OpenedPackage],
    evidence: Mapping[str, Mapping[str, Any]],
) -> list[StageCosts]:
    """Return the costs of each stage that has a model, in the order of the stages.

    `evidence` is a dict from the name of a stage to the predicate in the evidence of its package. Stages
    without evidence are not in the dict.
    """
    counts = {SOURCE: 1}
    costs = []
    for stage in stages:
        counts[stage.name] = stage.max_crops if stage.crop else counts[stage.input]
        if stage.ensemble is not None:
            continue
        manifest, stated = packages[stage.name].manifest, evidence.get(stage.name, {})
        latency = stated.get("latency_held_against_limits") or {}
        above = _memory_above(manifest, min(counts[stage.name], MAX_BATCH))
        own = _memory_above(manifest, 1)
        peak = (stated.get("memory") or {}).get("value")
        costs.append(
            StageCosts(
                name=stage.name,
                task=manifest.task.name if manifest.task else "",
                count=counts[stage.name],
                size_bytes=sum(artifact.size_bytes for artifact in manifest.artifacts),
                latency_ms=latency.get("value"),
                memory_bytes=above,
                engine_bytes=None if peak is None or own is None else max(0, int(peak) - own),
                origin=", ".join(latency[key] for key in ("label", "on") if key in latency),
            )
        )
    return costs


def _memory_above(manifest: Manifest, rows: int) -> int | None:
    """Return the memory above the engine with so many rows in a batch; None if it is not stated."""
    estimate: Any = manifest.figures.get("memory_estimate")
    if not isinstance(estimate, Mapping) or "bytes_above_engine" not in estimate:
        return None
    row_bytes = sum(tensor.decoded_bytes for tensor in manifest.golden.inputs)
    more = (rows - 1) * row_bytes * float(estimate.get(RUN_MEMORY_FIGURE) or 1.0)
    return int(estimate["bytes_above_engine"] + more)


def assemble_pipeline(
    identity: tuple[str, str, str],
    stages: Sequence[Stage],
    output: Sequence[str],
    packages: Mapping[str, OpenedPackage],
    *,
    budget: Mapping[str, float],
    costs: Sequence[StageCosts],
) -> PackageDraft:
    """Run a pipeline on a generated input, and return its package.

    `identity` is the name, version and target. `stages` have no engines yet. `output` contains the names of
    the stages whose answers are returned.

    Raises:
        DataError: A package in `packages` is a pipeline or has another target, or the packages of an
            ensemble have different labels.
        EdgekitError: A package does not fit the other stages or does not run. The message names the stage.
    """
    name, version, target = identity
    packages = {stage: package.select(DEFAULT_VARIANT) for stage, package in packages.items()}
    for stage, package in packages.items():
        _check_member(stage, package, target)
    _check_labels(stages, packages)
    engines = {stage: list_backends(package.manifest) for stage, package in packages.items()}
    opened = tuple(replace(stage, engines=engines.get(stage.name, ())) for stage in stages)
    pipeline = Pipeline(stages=opened, output=tuple(output))
    files = [
        file for stage, package in packages.items() for file in _list_files(package, member_folder(stage))
    ]
    with closing(open_stages(pipeline, packages, threads=1)) as session:
        golden, golden_files = _make_golden(session)
        files += [*golden_files, (_PREPROCESSING, encode_json(_input_rules(session)), "preprocessing")]
        inputs, outputs, figures = session.inputs, session.outputs, _figures(session, costs)
    contents = {path: content for path, content, _ in sorted(files)}
    members = {
        stage: f"{member.manifest.file_name} {member.signed_sha256}" for stage, member in packages.items()
    }
    manifest = Manifest(
        format=FormatInfo(critical=(PIPELINE,)),
        name=name,
        version=version,
        target=target,
        inputs=inputs,
        outputs=outputs,
        artifacts=describe_artifacts(contents, {path: role for path, _, role in files}),
        backend=BackendChoice(PIPELINE, pipeline.members[0].manifest_path),
        golden=golden,
        preprocessing=_PREPROCESSING,
        budget=budget,
        figures=figures,
        provenance={"members": members},
        task=TaskChoice(PIPELINE),
        pipeline=pipeline,
    )
    return PackageDraft(manifest, contents)


def _input_rules(session: PipelineSession) -> dict[str, JsonValue]:
    """Return the preprocessing of the whole pipeline: unscaled pixels or amplitudes."""
    if session.sample_rate is not None:
        return {"type": "audio", "sample_rate": session.sample_rate}
    return {"scale": 1, "layout": "NHWC", "colour": "RGB"}


def _check_member(stage: str, package: OpenedPackage, target: str) -> None:
    manifest = package.manifest
    if manifest.target != target:
        raise DataError(
            f"stage '{stage}': {manifest.file_name} is for {manifest.target}, the pipeline for {target};"
            f" package the model with --target {target}"
        )
    kinds = {
        "a pipeline": manifest.pipeline is not None,
        "a package with a plan for offloading": bool(manifest.submodels),
        "a model with states, whose answers depend on earlier ones": bool(manifest.states),
    }
    if kind := next((kind for kind, is_kind in kinds.items() if is_kind), ""):
        raise DataError(f"stage '{stage}': {manifest.file_name} is {kind}, expected a package of one model")


def _check_labels(stages: Sequence[Stage], packages: Mapping[str, OpenedPackage]) -> None:
    for stage in stages:
        manifests = {part: packages[part].manifest for part in stage.stages if part in packages}
        labels = {
            manifest.labels and bytes(packages[part].read(manifest.labels)): part
            for part, manifest in manifests.items()
        }
        if len(labels) > 1:
            first, second = list(labels.values())[:2]
            raise DataError(
                f"stage '{stage.name}' combines '{first}' and '{second}', which have other labels"
            )


def _list_files(package: OpenedPackage, folder: str) -> list[File]:
    """Return the files of a package's only variant, with its manifest, in a folder of the pipeline."""
    manifest = package.manifest
    needed = {choice.artifact for choice in manifest.backend.chain}
    needed |= {path for _, path, _, _ in manifest.golden.artifact_sizes()}
    needed |= {path for path in (manifest.preprocessing, manifest.labels) if path is not None}
    artifacts = tuple(artifact for artifact in manifest.artifacts if artifact.path in needed)
    # Drift is watched by the inputs of whole packages.
    figures = {name: value for name, value in manifest.figures.items() if name != "reference"}
    own = replace(manifest, artifacts=artifacts, figures=figures)
    files = [(folder + file.path, bytes(package.read(file.path)), file.role) for file in artifacts]
    return [(f"{folder}manifest.json", own.to_bytes(), MEMBER_ROLE), *files]


def _make_golden(session: PipelineSession) -> tuple[Golden, list[File]]:
    """Return a generated picture or sound with the answer to it, and the files of both.

    Scores are rounded otherwise on other processors, so half of the answer's bytes may differ: the golden
    tensors of the members tell what is wrong. These tell that the stages are joined.
    """
    (spec,), (answer,) = session.inputs, session.outputs
    if session.sample_rate is None:
        value = draw_bytes(0, 0, _SIDE * _SIDE * 3).reshape(1, _SIDE, _SIDE, 3)
    else:
        value = (draw_bytes(0, 0, _SAMPLES)[None].astype(np.float32) - 128) / np.float32(128)
    described, content = golden_input(spec.name, value, "golden/input.bin")
    outputs = session.run({spec.name: described.decode(content)})
    expected = outputs[answer.name]
    half = len(expected) // 2
    golden = GoldenOutput(
        name=answer.name,
        dtype=answer.dtype,
        shape=expected.shape,
        path="golden/answer.bin",
        atol=0.0,
        rtol=0.0,
        axis=0,
        loose=half,
        count_atol=half,
    )
    files = [("golden/input.bin", content, "golden"), (golden.path, expected.tobytes(), "golden")]
    return Golden((described,), (golden,)), files


def _figures(session: PipelineSession, costs: Sequence[StageCosts]) -> dict[str, JsonValue]:
    above = [stage.memory_bytes for stage in costs]
    known_sizes = [size for size in above if size is not None]
    memory: dict[str, JsonValue] = {
        "bytes_above_engine": sum(known_sizes),
        RUN_MEMORY_FIGURE: _RUN_BYTES_PER_INPUT_BYTE,
        "label": "estimated",
    }
    return {
        ANSWER_OUTPUT_FIGURE: session.outputs[0].name,
        **({"memory_estimate": memory} if len(known_sizes) == len(above) else {}),
    }
