"""The package that carries a plan: whole model, submodels and cut table, signed again."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from edgekit_offload.packaging.submodels import attach_plans, fill_weights, write_tail_package
from edgekit_offload.partition.split import SplitModels
from edgekit_offload.planning.cascade import NAME, cascade_split
from edgekit_offload.planning.codings import Feeds, open_model
from edgekit_offload.planning.cut_candidates import CutCandidate
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.planner import PlanInputs, Realised
from edgekit_offload.planning.planner import plan as plan_ways
from edgekit_offload.planning.realise import MeasuredCuts
from edgekit_offload.planning.result import PlanningResult, Refusal
from edgekit_offload.planning.ways import UploadWay
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
    """The tail behind the first of two cuts: a model of the edge machine, with plans of its own.

    Attributes:
        content: the model.
        table: cut table with its plans.
        splits: name of a plan -> its submodels.
    """

    content: bytes
    table: CutTable
    splits: Mapping[str, SplitModels]


@dataclass(slots=True)
class TieredCuts:
    """Measures ways between device and edge machine, and plans some of their tails between edge and server.

    Only exact codings are used for that: the answer of the edge machine does not depend on where it computes.

    Attributes:
        measured: ways between device and edge machine; its server is the edge machine.
        server: the machine behind the edge machine.
        link: link from the edge machine to the server.
        tails: name of a way -> the plans of its tail, once it was called.
    """

    measured: MeasuredCuts
    server: Machine
    link: LinkState
    tails: dict[str, PlannedTail] = field(default_factory=dict)

    def __call__(
        self, uploads: Sequence[UploadWay], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, Realised | Refusal]:
        """Return the result of each way; the server's time is the whole time of the edge machine."""
        results = dict(self.measured(uploads, cuts))
        names = [one.plan.name for one in cuts if one.goes_on]
        plain = [one.plan for one in uploads if not one.plan.media]
        names += [one.name for one in sorted(plain, key=lambda one: one.costs.upload_bytes)[:1]]
        for name in names:
            found = results.get(name)
            if name not in self.measured.splits or not isinstance(found, Realised):
                continue
            tail = self._plan_tail(name, self.measured.splits[name])
            if any(one.tail for one in tail.table.plans):
                self.tails[name] = tail
                rest_s = min(predict_s(one, Conditions(self.link)) for one in tail.table.plans)
                costs = replace(found.plan.costs, server_s=min(found.plan.costs.server_s, rest_s))
                label = found.label if rest_s >= found.plan.costs.server_s else "modelled"
                results[name] = replace(found, plan=replace(found.plan, costs=costs), label=label)
        return results

    def _plan_tail(self, name: str, split: SplitModels) -> PlannedTail:
        first = self.measured
        content = fill_weights(split.tail.content, first.content)[0].SerializeToString(deterministic=True)
        feeds = [_sent(split, first.content, one) for one in first.feeds]
        graph = RunnableGraph(content, first.options, inputs=dict(feeds[0]))
        edge = profile_kernels(first.server, graph, name=name, seconds=first.seconds)
        server = profile_kernels(self.server, graph, name=name, seconds=first.seconds)
        mbit_s, rtt_ms = self.link.up_bits_per_s / 1e6, self.link.rtt_s * 1e3
        grid = Grid((mbit_s / 4, mbit_s, mbit_s * 4), (rtt_ms,))
        measured = MeasuredCuts(content, feeds, first.server, self.server, first.seconds, first.options)

        def realise(
            uploads: Sequence[UploadWay], cuts: Sequence[CutCandidate]
        ) -> Mapping[str, Realised | Refusal]:
            inexact = [one.plan.name for one in uploads if one.coding.kind != "raw" or one.plan.media]
            inexact += [one.plan.name for one in cuts if one.found.coding != "raw"]
            refused = {one: Refusal(one, "It is not exact.") for one in inexact}
            exact = [one for one in uploads if one.plan.name not in refused]
            found = measured(exact, [one for one in cuts if one.plan.name not in refused])
            return {**found, **refused}

        result = plan_ways(PlanInputs(name, content, edge, server, grid, feeds, realise=realise))
        return PlannedTail(content, result.table, measured.splits)


def _sent(split: SplitModels, weights: bytes, feeds: Feeds) -> Feeds:
    """Return the inputs that the tail gets for a sample."""
    made = dict(feeds)
    if split.head is not None:
        session = open_model(fill_weights(split.head.content, weights)[0].SerializeToString())
        names = [one.name for one in session.get_outputs()]
        taken = {one.name: feeds[one.name] for one in session.get_inputs()}
        made |= dict(zip(names, session.run(names, taken), strict=True))
    return {one.name: made[one.name] for one in split.sent}


def attach(
    path: Path, result: PlanningResult, splits: Mapping[str, SplitModels], folder: Path, key: str
) -> Path:
    """Write a package with the plans of the cut table that were extracted, and return its path.

    Args:
        path: the package that was planned.
        result: the plan.
        splits: name of a plan -> its submodels.
        folder: folder for the new package.
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


def attach_tails(
    planned: Path, result: PlanningResult, tails: Mapping[str, PlannedTail], folder: Path, key: str
) -> list[Path]:
    """Write a package for the edge machine for each tail with plans of its own, and return their paths.

    Args:
        planned: the package of the device.
        result: plan of that package.
        tails: name of a plan -> the plans of its tail.
        folder: folder for the packages.
        key: name of the signing key.
    """
    sign, trust, written = load_signer(key), TrustStore.from_folder(find_keys_folder()), []
    for one in result.table.plans:
        if one.tail is None or one.name not in tails:
            continue
        tail = tails[one.name]
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="edgekit-tail-") as scratch:
            with read_package(planned, trust) as package:
                shown = package.select_submodel(one.tail)
                plain = write_tail_package(shown, tail.content, folder=Path(scratch), sign=sign)
            with read_package(plain, trust) as package:
                used = {
                    plan.tail.removesuffix(".tail"): tail.splits[plan.name]
                    for plan in tail.table.plans
                    if plan.tail is not None
                }
                written.append(attach_plans(package, used, tail.table, folder=folder, sign=sign))
    return written


def add_cascade(result: PlanningResult, inputs: PlanInputs) -> dict[str, SplitModels]:
    """Return the measured splits, and that of a cascade that is the best under some conditions.

    Raises:
        CutError: the small model and the coding of the upload cannot be in one graph.
    """
    measured = inputs.realise.measured if isinstance(inputs.realise, TieredCuts) else inputs.realise
    splits = dict(measured.splits) if isinstance(measured, MeasuredCuts) else {}
    stems = {(plan.tail or "").removesuffix(".tail"): plan.name for plan in (way.plan for way in result.ways)}
    for plan in result.table.plans:
        upload = splits.get(stems.get(plan.name.removeprefix(f"{NAME}-"), ""))
        if plan.escalation is not None and inputs.cascade is not None and upload is not None:
            splits[plan.name] = cascade_split(inputs.cascade.small, plan.escalation.output, upload)
    return splits


def with_warning(result: PlanningResult, left_out: Sequence[str]) -> PlanningResult:
    """Return the plan with a warning that names the plans missing in the package."""
    if not left_out:
        return result
    text = f"The package does not carry {', '.join(left_out)}: of this model they cannot be extracted."
    return replace(result, warnings=(*result.warnings, text))
