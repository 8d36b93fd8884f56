"""The package that carries a plan: whole model, submodels and cut table, signed again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edgekit_offload.partition.split import SplitModels
from edgekit_offload.planning.cascade import NAME, cascade_split
from edgekit_offload.planning.planner import PlanInputs
from edgekit_offload.planning.realise import MeasuredCuts
from edgekit_offload.planning.result import PlanningResult
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.packaging.submodels import attach_plans


def attach(
    path: Path, result: PlanningResult, splits: Mapping[str, SplitModels], folder: Path, key: str
) -> Path:
    """Write a package with the plans of the cut table that were extracted, and return its path.

    Args:
        path: the package that was planned.
        result: the plan.
        splits: name of a plan -> its submodels.
        folder: for the new package.
        key: name of the signing key.

    Raises:
        PackageError: the package cannot be trusted.
        CutError: a submodel does not run.
        OutputError: the package cannot be written.
    """
    plans = tuple(one for one in result.table.plans if one.tail is None or one.name in splits)
    table = replace(result.table, plans=plans)
    used, decode = {}, {}
    for one in plans:
        if one.tail is not None:
            stem = one.tail.removesuffix(".tail")  # a name fit for a file
            used[stem], decode[stem] = splits[one.name], one.media
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        return attach_plans(package, used, table, folder=folder, sign=load_signer(key), decode=decode)


def add_cascade(result: PlanningResult, inputs: PlanInputs) -> dict[str, SplitModels]:
    """Return the splits that were measured, and that of a cascade which is best somewhere.

    Raises:
        CutError: the small model and the coding of the upload cannot stand in one graph.
    """
    splits = dict(inputs.realise.splits) if isinstance(inputs.realise, MeasuredCuts) else {}
    stems = {(plan.tail or "").removesuffix(".tail"): plan.name for plan in (way.plan for way in result.ways)}
    for plan in result.table.plans:
        upload = splits.get(stems.get(plan.name.removeprefix(f"{NAME}-"), ""))
        if plan.escalation is not None and inputs.cascade is not None and upload is not None:
            splits[plan.name] = cascade_split(inputs.cascade.small, plan.escalation.output, upload)
    return splits


def with_warning(result: PlanningResult, left_out: Sequence[str]) -> PlanningResult:
    """Return the plan with a warning that names the plans that the package does not carry."""
    if not left_out:
        return result
    text = f"The package does not carry {', '.join(left_out)}: of this model they cannot be extracted."
    return replace(result, warnings=(*result.warnings, text))
