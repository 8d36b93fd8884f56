"""Adds the submodels and the cut table of a plan to a model's package, and signs the package again."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from edgekit_offload.packaging.submodels import attach_plans, fill_weights, write_tail_package
from edgekit_offload.partition.opened_model import Feeds, OpenedModel, open_model, run_session
from edgekit_offload.partition.split import SplitModels
from edgekit_offload.planning.cascade import NAME, cascade_split
from edgekit_offload.planning.cut_candidates import CutCandidate
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.measurement import CutMeasurement
from edgekit_offload.planning.plan_inputs import ExtractedPlan, PlanInputs
from edgekit_offload.planning.planner import plan as plan_model
from edgekit_offload.planning.result import PlanningResult, Refusal
from edgekit_offload.planning.uploads import UploadCandidate
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.latency_model import Conditions, LinkState, predict_s
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.signing_keys import load_signer

EDGE_FOLDER: Final = "edge"  # for the packages of the edge machine


@dataclass(frozen=True, slots=True)
class PlannedTail:
    """A tail that the edge machine splits once more.

    Attributes:
        content: The tail as an ONNX model with its weights.
        table: The plans for splitting the tail between the edge machine and a server.
        splits: A dict from the name of a plan to its submodels.
    """

    content: bytes
    table: CutTable
    splits: Mapping[str, SplitModels]


@dataclass(slots=True)
class TieredMeasurement:
    """Measures candidates for three tiers: a device, an edge machine and a server.

    It also plans how to split tails between the edge machine and the server. These plans use only exact
    codings, so they do not change answers.

    Attributes:
        measured: Measures candidates on the device and the edge machine.
        server: The server behind the edge machine.
        link: The link from the edge machine to the server.
        tails: A dict from the name of a candidate to the plans of its tail. Each call adds entries.
    """

    measured: CutMeasurement
    server: Machine
    link: LinkState
    tails: dict[str, PlannedTail] = field(default_factory=dict)

    def __call__(
        self, uploads: Sequence[UploadCandidate], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, ExtractedPlan | Refusal]:
        """Return a dict from the name of each candidate to its result.

        In the result, `server_s` is the time until the edge machine answers.
        """
        results = dict(self.measured(uploads, cuts))
        names = [cut.plan.name for cut in cuts if cut.goes_on]
        plain = [upload.plan for upload in uploads if not upload.plan.media]
        names += [plan.name for plan in sorted(plain, key=lambda plan: plan.costs.upload_bytes)[:1]]
        for name in names:
            extracted = results.get(name)
            if name not in self.measured.splits or not isinstance(extracted, ExtractedPlan):
                continue
            tail = self._plan_tail(name, self.measured.splits[name])
            if any(plan.tail for plan in tail.table.plans):
                self.tails[name] = tail
                rest_s = min(predict_s(plan, Conditions(self.link)) for plan in tail.table.plans)
                costs = replace(extracted.plan.costs, server_s=min(extracted.plan.costs.server_s, rest_s))
                label = extracted.label if rest_s >= extracted.plan.costs.server_s else "modelled"
                results[name] = replace(extracted, plan=replace(extracted.plan, costs=costs), label=label)
        return results

    def _plan_tail(self, name: str, split: SplitModels) -> PlannedTail:
        first = self.measured
        content = fill_weights(split.tail.content, first.model.content)[0].SerializeToString(
            deterministic=True
        )
        feeds = [_sent(split, first.model.content, sample) for sample in first.feeds]
        graph = RunnableGraph(content, first.options, inputs=dict(feeds[0]))
        edge = profile_kernels(first.server, graph, name=name, seconds=first.seconds)
        server = profile_kernels(self.server, graph, name=name, seconds=first.seconds)
        mbit_s, rtt_ms = self.link.up_bits_per_s / 1e6, self.link.rtt_s * 1e3
        grid = Grid((mbit_s / 4, mbit_s, mbit_s * 4), (rtt_ms,))
        model = OpenedModel(content)
        measured = CutMeasurement(
            model=model,
            feeds=feeds,
            device=first.server,
            server=self.server,
            seconds=first.seconds,
            options=first.options,
        )

        def measure(
            uploads: Sequence[UploadCandidate], cuts: Sequence[CutCandidate]
        ) -> Mapping[str, ExtractedPlan | Refusal]:
            inexact = [
                upload.plan.name for upload in uploads if upload.coding.kind != "raw" or upload.plan.media
            ]
            inexact += [cut.plan.name for cut in cuts if cut.cut.coding != "raw"]
            refused = {name: Refusal(name, "It is not exact.") for name in inexact}
            exact = [upload for upload in uploads if upload.plan.name not in refused]
            results = measured(exact, [cut for cut in cuts if cut.plan.name not in refused])
            return {**results, **refused}

        result = plan_model(
            PlanInputs(
                name=name,
                model=model,
                device=edge,
                server=server,
                grid=grid,
                feeds=feeds,
                measure=measure,
            )
        )
        return PlannedTail(content, result.table, measured.splits)


def _sent(split: SplitModels, weights: bytes, feeds: Feeds) -> Feeds:
    tensors = dict(feeds)
    if split.head is not None:
        session = open_model(fill_weights(split.head.content, weights)[0].SerializeToString())
        tensors |= run_session(session, feeds)
    return {spec.name: tensors[spec.name] for spec in split.sent}


def attach(
    path: Path, result: PlanningResult, splits: Mapping[str, SplitModels], folder: Path, key: str
) -> Path:
    """Write a package with the plans of the cut table, and return its path.

    Plans with submodels that are not in `splits` are left out.

    Args:
        path: The package of the whole model. It is not changed.
        result: The result of planning.
        splits: A dict from the name of a plan to its submodels.
        folder: The folder for the new package.
        key: The name of the key for signing.

    Raises:
        PackageError: The package cannot be trusted.
        CutError: A submodel does not run.
        OutputError: The package cannot be written.
    """
    plans = tuple(plan for plan in result.table.plans if plan.tail is None or plan.name in splits)
    table = replace(result.table, plans=plans)
    used, decode = {}, {}
    for plan in plans:
        if plan.tail is not None:
            stem = plan.tail.removesuffix(".tail")  # a name fit for a file
            used[stem], decode[stem] = splits[plan.name], plan.media
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        return attach_plans(package, used, table, folder=folder, sign=load_signer(key), decode=decode)


def attach_tails(
    planned: Path, result: PlanningResult, tails: Mapping[str, PlannedTail], folder: Path, key: str
) -> list[Path]:
    """Write one package for each tail that the edge machine splits, and return the paths of the packages.

    Args:
        planned: The package with the tails as submodels.
        result: The result of planning, whose cut table names the tails.
        tails: A dict from the name of a plan to its tail. Plans without an entry are skipped.
        folder: The folder for the packages, which is created.
        key: The name of the key for signing.
    """
    sign, trust, written = load_signer(key), TrustStore.from_folder(find_keys_folder()), []
    for plan in result.table.plans:
        if plan.tail is None or plan.name not in tails:
            continue
        tail = tails[plan.name]
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="edgekit-tail-") as scratch:
            with read_package(planned, trust) as package:
                view = package.select_submodel(plan.tail)
                plain = write_tail_package(view, tail.content, folder=Path(scratch), sign=sign)
            with read_package(plain, trust) as package:
                used = {
                    plan.tail.removesuffix(".tail"): tail.splits[plan.name]
                    for plan in tail.table.plans
                    if plan.tail is not None
                }
                written.append(attach_plans(package, used, tail.table, folder=folder, sign=sign))
    return written


def add_cascade(result: PlanningResult, inputs: PlanInputs) -> dict[str, SplitModels]:
    """Return a dict from the name of each measured plan and each cascade to its submodels.

    Raises:
        CutError: The small model and the coding of the upload cannot be combined in one graph.
    """
    measured = inputs.measure.measured if isinstance(inputs.measure, TieredMeasurement) else inputs.measure
    splits = dict(measured.splits) if isinstance(measured, CutMeasurement) else {}
    stems = {
        (plan.tail or "").removesuffix(".tail"): plan.name
        for plan in (candidate.plan for candidate in result.candidates)
    }
    for plan in result.table.plans:
        upload = splits.get(stems.get(plan.name.removeprefix(f"{NAME}-"), ""))
        if plan.escalation is not None and inputs.cascade is not None and upload is not None:
            splits[plan.name] = cascade_split(inputs.cascade.small.content, plan.escalation.output, upload)
    return splits


def with_warning(result: PlanningResult, left_out: Sequence[str]) -> PlanningResult:
    """Return the result with a warning about `left_out`, the plans that are not in the package."""
    if not left_out:
        return result
    text = f"The package does not carry {', '.join(left_out)}: of this model they cannot be extracted."
    return replace(result, warnings=(*result.warnings, text))
