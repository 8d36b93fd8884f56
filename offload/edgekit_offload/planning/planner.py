"""The planner: finds every way to run a model on two machines, and the few that the package should carry.

It reads profiles and samples, sweeps links and loads with the exact solver, and compares all ways by the
latency model that the device uses too. The caller measures the cuts again: see `PlanInputs.realise`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.partition.source_model import SourceModel
from edgekit_offload.partition.tensor_forms import find_forms
from edgekit_offload.planning.cascade import NAME, CascadeInputs, CascadeRefusal, plan_cascade, refuse_cascade
from edgekit_offload.planning.codings import AnswerChange, Feeds, measure_codings, open_model, run_seconds
from edgekit_offload.planning.costs import (
    INPUT,
    DeviceLimits,
    GraphCosts,
    PowerModel,
    add_energy,
    device_bytes,
    device_weights,
    kept_tensors,
)
from edgekit_offload.planning.cut_candidates import (
    CutCandidate,
    CutSearch,
    CutSearchResult,
    LeakageMeter,
    Progress,
    search_cuts,
)
from edgekit_offload.planning.envelope import SIMPLICITY, Grid, Score, find_winners, score_all, win_ranges
from edgekit_offload.planning.explain import explain_leakage, explain_plan, explain_way
from edgekit_offload.planning.leakage import Leakage
from edgekit_offload.planning.result import (
    NEVER,
    Certificate,
    Kind,
    Label,
    PlannedMachine,
    PlanningResult,
    Refusal,
    SentTensor,
    Way,
)
from edgekit_offload.planning.sweep import Goal
from edgekit_offload.planning.ways import UploadWay, WholeModel, find_uploads
from edgekit_offload.profiling.fused_graph import is_plain
from edgekit_offload.profiling.model_profile import ModelProfile, describe_cause
from edgekit_offload.profiling.planning_graph import PlanningGraph, check_model, join_profiles
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.cut_table import LOCAL, CutTable, Objective, OffloadPlan, PlanCosts
from edgekit_runtime.offload.latency_model import (
    Conditions,
    LinkState,
    energy_j,
    predict_s,
    reserved_server_s,
    slowest_stage_s,
)

MAX_LOSS: Final = 1e-3  # expected loss of accuracy by a coding that is allowed by default
MAX_SAMPLES: Final = 16  # samples on which the sizes of all tensors are measured
LOSSY_SAMPLES: Final = 100
"""Samples for an estimate of a coding's loss: most draws of 16 show none of a loss of 0.15 %."""
INT8_SAMPLES: Final = 16
"""The same for int8, which lost at most a fifth of `MAX_LOSS` on 53 cuts (docs/benchmarks/offload.md)."""
_EXACT: Final = frozenset({"raw", "uint8", "delta"})
MAX_DEVICES: Final = 100_000  # devices of a server; more are not counted
_UNITS: Final[dict[Objective, str]] = {
    "latency": "ms", "energy": "mJ", "throughput": "ms a request", "capacity": "server ms kept a request",
}  # fmt: skip
_LARGE_SPREAD: Final = 0.1  # a profile with a larger spread gets a warning


@dataclass(frozen=True, slots=True)
class Realised:
    """A way that was extracted, and run as it is.

    Attributes:
        plan: plan with measured costs, or with modelled ones if it was not measured.
        label: how its times were found.
        change: change of the answers to the samples; None if unknown: no known classes, or nothing ran.
    """

    plan: OffloadPlan
    label: Label
    change: AnswerChange | None = None


class Realise(Protocol):
    """Extracts ways as real submodels and measures them, interleaved; refuses ways that do not work."""

    def __call__(
        self, uploads: Sequence[UploadWay], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, Realised | Refusal]:
        """Return the name of each way -> its result."""
        ...


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The inputs of a plan.

    Attributes:
        name: display name of the model.
        content: the ONNX model.
        device, server: profiles of the model on both machines.
        grid: bandwidths and round trips.
        feeds: samples, one request each.
        objective: the objective to minimise.
        power: power of the device, for energy; the table carries it for devices that prefer energy.
        latency_limit_s: for capacity, the limit of 99 % of requests; for energy, that of the predicted
            latency.
        requests_per_s: rate of one device, for capacity.
        memory_bytes: limit of weights and activations on the device.
        weights_bytes: limit of the weights alone.
        keep_on_device: names of tensors that stay on the device, or `input`.
        edge: profile of the machine between device and server, for three tiers: the device sends to this
            machine.
        edge_link: link from that machine to the server.
        realise: extracts and measures ways; None plans only from sums over kernels.
        leakage: attacks sent tensors; None attacks none.
        most_leakage_db: limit on the leakage.
        cascade: a small model for the device, and the required agreement.
        max_loss: share of the answers that a coding may be expected to make wrong, with one standard error.
            The loss is unknown if outputs are not known to be classes, nothing ran, or samples are too few or
            made up; then it may be all, and only 1 admits it.
        has_samples: whether `feeds` are the user's data. Golden and made-up inputs are no evidence of what a
            coding changes.
        is_server_modelled: whether the server's profile is another machine's, scaled.
        sample_rate_hz: sample rate of sound; None if it is not known.
        notes: warnings about profiles and samples for the user.
    """

    name: str
    content: bytes
    device: ModelProfile
    server: ModelProfile
    grid: Grid
    feeds: Sequence[Feeds]
    objective: Objective = "latency"
    power: PowerModel | None = None
    latency_limit_s: float | None = None
    requests_per_s: float = 1.0
    memory_bytes: float | None = None
    weights_bytes: float | None = None
    keep_on_device: tuple[str, ...] = ()
    edge: ModelProfile | None = None
    edge_link: LinkState | None = None
    realise: Realise | None = None
    leakage: Callable[[Sequence[SentTensor]], Leakage | None] | None = None
    most_leakage_db: float | None = None
    notes: tuple[str, ...] = ()
    is_server_modelled: bool = False
    cascade: CascadeInputs | None = None
    max_loss: float = MAX_LOSS
    has_samples: bool = True
    sample_rate_hz: float | None = None

    @property
    def limits(self) -> DeviceLimits:
        """Limits of the device's memory."""
        return DeviceLimits(self.weights_bytes, self.memory_bytes)

    @property
    def peer(self) -> ModelProfile:
        """The machine to which the device sends."""
        return self.edge or self.server


@dataclass(slots=True)
class _Draft:
    """A way before the ways are compared."""

    kind: Kind
    plan: OffloadPlan
    label: Label
    sent: tuple[SentTensor, ...] = ()
    certificate: Certificate | None = None
    kernels_on_device: int = 0
    device_bytes: float | None = None
    change: AnswerChange | None = None  # None if unknown
    samples_needed: int = 0  # for an estimate of the change; 0 if there are enough
    sends_input: bool = False
    known_inputs: int = 0  # that the attacker knows
    note: str = ""  # a sentence in addition to the explanation

    @property
    def least_samples(self) -> int:
        """The number of samples for an estimate of what the coding changes; 0 if it is exact."""
        inexact = {one.coding for one in self.sent if one.coding not in _EXACT or one.rounding}
        return 0 if not inexact else INT8_SAMPLES if inexact == {"int8"} else LOSSY_SAMPLES


def plan(inputs: PlanInputs, progress: Progress = lambda _what, _done, _total: None) -> PlanningResult:
    """Return every way to run a model on two machines, and where each is the best.

    Raises:
        CutError: a profile is of another model, the link is down, or nothing keeps the limits.
    """
    _check(inputs)
    refusals: list[Refusal] = []
    progress("measuring what tensors take on the link", None, None)
    here_s = run_seconds(inputs.content, inputs.feeds[0])
    whole = _whole_model(inputs, here_s)
    graph, costs = _graph_costs(inputs, whole, refusals)
    local = _local(inputs, costs, refusals)
    uploads = _uploads(inputs, whole, costs, refusals)
    leakage = None
    if inputs.leakage is not None:
        leakage = LeakageMeter(inputs.leakage, inputs.most_leakage_db)
    found = CutSearchResult()
    if graph is not None and costs is not None:
        base = [one.plan for one in ([local] if local else [])] + [one.plan for one in uploads]
        base = [add_energy(one, inputs.power) for one in base]
        search = _cut_search(inputs, graph, costs, leakage)
        try:
            found = search_cuts(search, base, progress)
        except Exception as cause:  # the ways with the whole model stay
            refusals.append(_refuse_cuts(cause))
        refusals += found.refusals
    cuts = found.cuts
    realised: Mapping[str, Realised | Refusal] = {}
    if inputs.realise is not None:
        progress("extracting and measuring", None, None)
        realised = inputs.realise(uploads, cuts)
    drafts = [local] if local else []
    drafts += [_Draft("upload", one.plan, "modelled", one.sent) for one in uploads]
    drafts += [_cut_draft(one, costs) for one in cuts if costs is not None]
    drafts = _apply(inputs, drafts, realised, refusals)
    for draft in drafts:
        draft.plan = _add_request(draft.plan, inputs.device, inputs.peer)
    if inputs.cascade is not None:
        progress("choosing the threshold of the cascade", None, None)
        drafts += _cascade(inputs, inputs.cascade, drafts, whole.device_slowdown, refusals)
    forms = find_forms(inputs.content, inputs.feeds[0])
    for draft in drafts:
        draft.sends_input = any(one.name in forms for one in draft.sent)
    if leakage is not None:
        progress("attacking what is sent", None, None)
        _add_leakage(drafts, leakage)
    for draft in drafts:
        draft.plan = add_energy(draft.plan, inputs.power)
    if not drafts:
        raise CutError("no way is left that keeps the limits: " + " ".join(one.reason for one in refusals))
    return _compare(inputs, drafts, refusals, found, kernels=0 if costs is None else len(costs.seconds))


def _check(inputs: PlanInputs) -> None:
    if not inputs.feeds:
        raise CutError("planning needs samples: sizes of what is sent depend on the values")
    if min(inputs.grid.bandwidths_mbit_s, default=0.0) <= 0:
        raise CutError("the link is down (bandwidth 0): nothing can be sent, so there is nothing to plan")
    if inputs.objective == "energy" and inputs.power is None:
        raise CutError("the objective energy needs the power of the device: give --power")
    if inputs.objective == "capacity" and inputs.latency_limit_s is None:
        raise CutError("the objective capacity needs a limit on latency: give --latency-limit")
    expected = set(inputs.feeds[0])
    if inputs.device.inputs and expected != set(inputs.device.inputs):
        raise CutError(
            f"the samples have {', '.join(sorted(expected))}, the model takes"
            f" {', '.join(sorted(inputs.device.inputs))}"
        )


def _whole_model(inputs: PlanInputs, here_s: float) -> WholeModel:
    session = open_model(inputs.content)
    outputs = session.run(None, dict(inputs.feeds[0]))
    for spec, value in zip(session.get_outputs(), outputs, strict=True):
        if not is_plain(value):
            raise CutError(f"output '{spec.name}' is a {spec.type}, which no server can return; run it whole")
    return WholeModel(
        inputs.device.whole_s,
        inputs.peer.whole_s,
        float(sum(one.nbytes for one in outputs)),
        len(outputs),
        inputs.device.whole_s / here_s,
        inputs.peer.whole_s / here_s,
    )


def _graph_costs(
    inputs: PlanInputs, whole: WholeModel, refusals: list[Refusal]
) -> tuple[PlanningGraph, GraphCosts] | tuple[None, None]:
    """Return the graph of kernels with its costs, or a refusal of all cuts if anything goes wrong.

    Raises:
        CutError: a profile is of another model.
    """
    profiles = [inputs.device, *([inputs.edge] if inputs.edge else []), inputs.server]
    for profile in profiles:
        check_model(profile, inputs.content)
    try:
        graph = join_profiles(inputs.content, profiles)
        SourceModel(inputs.content).samples  # noqa: B018  # the checks of what is cut
        codings = measure_codings(
            inputs.content,
            graph.graph,
            inputs.feeds[:MAX_SAMPLES],
            device_slowdown=whole.device_slowdown,
            server_slowdown=whole.server_slowdown,
        )
    except Exception as cause:  # engine, codecs and numpy raise errors of their own
        refusals.append(_refuse_cuts(cause))
        return None, None
    raw = np.array([graph.tensor_bytes[tensor] for tensor in graph.graph.tensors], np.float64)
    weight_bytes = graph.weight_bytes.astype(np.float64)
    costs = GraphCosts(graph.graph, graph.seconds, raw, weight_bytes, graph.weight_readers, codings)
    return graph, costs


def _refuse_cuts(cause: Exception) -> Refusal:
    return Refusal("cuts", f"The model cannot be split: {describe_cause(cause)}.")


def _local(inputs: PlanInputs, costs: GraphCosts | None, refusals: list[Refusal]) -> _Draft | None:
    """Return the way that runs all on the device, if its memory is large enough."""
    needed = None if costs is None else device_bytes(costs, (0,) * len(costs.seconds))
    file_bytes = float(len(inputs.content))
    weights_bytes = file_bytes if costs is None else device_weights(costs, (0,) * len(costs.seconds))
    if too_large := inputs.limits.describe_excess(weights_bytes, file_bytes if needed is None else needed):
        refusals.append(Refusal(LOCAL, f"The whole model {too_large}."))
        return None
    plan = OffloadPlan(LOCAL, PlanCosts(inputs.device.whole_s, is_measured=True))
    return _Draft("local", plan, inputs.device.label, device_bytes=needed)


def _uploads(
    inputs: PlanInputs, whole: WholeModel, costs: GraphCosts | None, refusals: list[Refusal]
) -> tuple[UploadWay, ...]:
    """Return the ways to upload the input; none if a tensor must stay here or leakage is limited."""
    unknown = set(inputs.keep_on_device) - {INPUT, *inputs.feeds[0]}
    if costs is None and unknown:
        raise CutError(f"--keep-on-device {min(unknown)}: the model cannot be split")
    if inputs.keep_on_device:
        kept = ", ".join(f"'{name}'" for name in inputs.keep_on_device)
        refusals.append(
            Refusal("upload", f"{kept} must stay on the device, so the server cannot run the whole model.")
        )
        return ()
    uploads, found = find_uploads(inputs.feeds, whole, inputs.sample_rate_hz)
    refusals += found
    if inputs.most_leakage_db is not None:
        reason = "It sends the input itself, and --max-leak sets a limit on what is revealed."
        refusals += [Refusal(one.plan.name, reason) for one in uploads]
        return ()
    return uploads


def _cut_search(
    inputs: PlanInputs, graph: PlanningGraph, costs: GraphCosts, leakage: LeakageMeter | None
) -> CutSearch:
    """Return the search for cuts; a limit on leakage keeps the inputs on the device from the start."""
    has_limit = inputs.most_leakage_db is not None
    kept = kept_tensors(costs.graph, inputs.keep_on_device)
    kept[: len(costs.graph.inputs)] |= has_limit
    tensors = costs.graph.tensors
    forms = find_forms(inputs.content, [tensors[row] for row in np.flatnonzero(kept)])
    kept = np.array([tensor in forms for tensor in tensors])
    two = replace(costs, seconds=costs.seconds[:, :2])
    goal = Goal(inputs.objective, inputs.power, inputs.limits.of(two), inputs.latency_limit_s)
    edge_link = None if inputs.edge is None else inputs.edge_link
    return CutSearch(
        graph, costs, goal, inputs.limits, inputs.grid, kept, _score(inputs), edge_link,
        leakage if has_limit else None,
    )  # fmt: skip


def _add_request(plan: OffloadPlan, device: ModelProfile, server: ModelProfile) -> OffloadPlan:
    """Return a plan with the time of its request on both machines beside kernels and coding.

    All plans that send something have this time in common, so it changes no cut, only whether to send. It is
    assumed that a server takes as long to receive a request and to answer as the same machine takes to send
    one.
    """
    if plan.tail is None:
        local_s = device.request.local_s
        return replace(
            plan, costs=replace(plan.costs, device_s=plan.costs.device_s + local_s, request_s=local_s)
        )
    size_bytes = plan.costs.upload_bytes
    request_s = device.request.seconds(size_bytes)
    server_request_s = server.request.seconds(size_bytes)
    costs = replace(
        plan.costs,
        device_s=plan.costs.device_s + request_s,
        request_s=request_s,
        server_s=plan.costs.server_s + server_request_s,
        server_request_s=server_request_s,
    )
    return replace(plan, costs=costs)


def _cascade(
    inputs: PlanInputs,
    cascade: CascadeInputs,
    drafts: Sequence[_Draft],
    slowdown: float,
    refusals: list[Refusal],
) -> list[_Draft]:
    """Return the cascade on top of the best upload, if it pays somewhere."""
    conditions = inputs.grid.conditions()
    small_bytes = float(len(cascade.small))
    if too_large := inputs.limits.describe_excess(small_bytes, small_bytes):
        refusals.append(Refusal(NAME, f"The small model {too_large}."))
        return []
    uploads = [one for one in drafts if one.kind == "upload" and not _is_over_loss(inputs, one)]
    if not uploads:
        refusals.append(Refusal(NAME, "Nothing may be uploaded, so the large model cannot be asked."))
        return []
    upload = min(uploads, key=lambda one: sum(predict_s(one.plan, each) for each in conditions))
    found = plan_cascade(inputs.content, cascade, upload.plan, slowdown)
    if isinstance(found, CascadeRefusal):
        refusals.append(Refusal(NAME, found.reason))
        return []
    planned, confirmed = found
    offered = [draft.plan for draft in drafts if not _is_over_loss(inputs, draft)]
    own, *others = (add_energy(one, inputs.power) for one in (planned, *offered))
    refusal = refuse_cascade(own, others, conditions, _score(inputs))
    if refusal is not None:
        refusals.append(Refusal(NAME, refusal.reason))
        return []
    # It sends what the upload sends, so it also loses what that loses, in the requests that go on.
    return [replace(upload, kind="cascade", plan=planned, label="modelled", note=confirmed.describe())]


def _cut_draft(one: CutCandidate, costs: GraphCosts) -> _Draft:
    return _Draft(
        "cut",
        one.plan,
        "modelled",
        one.sent,
        None if one.goes_on else one.found.certificate,  # that proof is for three tiers
        sum(1 for tier in one.found.tiers if tier == 0),
        device_bytes(costs, one.found.tiers),
    )


def _apply(
    inputs: PlanInputs,
    drafts: list[_Draft],
    realised: Mapping[str, Realised | Refusal],
    refusals: list[Refusal],
) -> list[_Draft]:
    """Replace modelled costs by measured ones, and drop ways that do not work."""
    kept, samples = [], len(inputs.feeds) if inputs.has_samples else 0
    for draft in drafts:
        came = realised.get(draft.plan.name)
        if isinstance(came, Refusal):
            refusals.append(came)
            continue
        if came is not None:
            draft.plan, draft.label, draft.change = came.plan, came.label, came.change
            if came.change is not None and samples < draft.least_samples:
                draft.samples_needed = draft.least_samples
            if not inputs.has_samples:
                draft.plan, draft.change = replace(came.plan, answers_changed=None), None
        kept.append(draft)
    return kept


def _is_over_loss(inputs: PlanInputs, draft: _Draft) -> bool:
    """Whether a way may make more answers wrong than allowed; an unknown loss may be all answers."""
    if draft.change is None or draft.samples_needed:
        return draft.least_samples > 0 and inputs.max_loss < 1
    return draft.change.loss + draft.change.loss_error > inputs.max_loss


def _add_leakage(drafts: Sequence[_Draft], leakage: LeakageMeter) -> None:
    """Add the measured leakage to each way that sends something other than the input."""
    for draft in drafts:
        if draft.kind == "local" or draft.sends_input:
            continue
        found = leakage.measure(draft.sent)
        if found is not None:
            draft.plan = replace(draft.plan, leakage_db=found.lower_bound_db)
            draft.known_inputs = found.known_samples


def _score(inputs: PlanInputs) -> Score:
    """Return the score of the objective, in the unit of `_UNITS`; infinity above the limit on latency."""
    radio_w = 0.0 if inputs.power is None else inputs.power.radio_w
    limit_s = np.inf if inputs.latency_limit_s is None else inputs.latency_limit_s

    def energy(plan: OffloadPlan, conditions: Conditions) -> float:
        return energy_j(plan, conditions, radio_w) if predict_s(plan, conditions) <= limit_s else np.inf

    seconds: dict[Objective, Score] = {
        "latency": predict_s,
        "energy": energy,
        "throughput": slowest_stage_s,
        "capacity": lambda plan, conditions: reserved_server_s(plan, conditions, limit_s),
    }
    score = seconds[inputs.objective]
    return lambda plan, conditions: score(plan, conditions) * 1e3


def _compare(
    inputs: PlanInputs,
    drafts: Sequence[_Draft],
    refusals: list[Refusal],
    found: CutSearchResult,
    *,
    kernels: int,
) -> PlanningResult:
    """Return the result: scores on the grid, winners, and the table of the ways that win somewhere."""
    grid, plans = inputs.grid, [draft.plan for draft in drafts]
    scores = score_all(plans, grid.conditions(), _score(inputs))
    ranks = [SIMPLICITY[draft.kind] for draft in drafts]
    is_over = np.array([_is_over_loss(inputs, draft) for draft in drafts])
    offered = np.where(is_over[:, np.newaxis], np.inf, scores)
    winners = find_winners(offered, ranks)
    if (winners < 0).all():
        raise CutError(
            "no way keeps the limits at any setting of the link: raise --latency-limit or --max-loss"
        )
    in_table = {int(number) for number in winners if number >= 0}
    in_table |= {number for number, draft in enumerate(drafts) if draft.kind == "local"}
    reserve = _find_reserve(inputs, drafts, winners, in_table, offered)
    in_table |= reserve
    unloaded = [Conditions(link) for link in grid.links()]
    latencies = score_all(plans, unloaded, lambda plan, one: predict_s(plan, one) * 1e3)
    ways = []
    for number, draft in enumerate(drafts):
        way = Way(
            draft.kind, draft.plan, draft.label, draft.sent, _rows(latencies[number], grid),
            _rows(scores[number][: len(unloaded)], grid), win_ranges(winners, number, grid),
            number in in_table,
            draft.kernels_on_device, draft.device_bytes, _capacity(inputs, draft), draft.certificate,
            expected_loss=None if draft.change is None else draft.change.loss,
            loss_error=0.0 if draft.change is None else draft.change.loss_error,
            samples_needed=draft.samples_needed, is_over_loss=bool(is_over[number]),
            sends_input=draft.sends_input, known_inputs=draft.known_inputs,
        )  # fmt: skip
        text = f"{explain_way(way, kernels, is_reserve=number in reserve)} {draft.note}"
        ways.append(replace(way, explanation=text.rstrip()))
    table = CutTable(
        tuple(draft.plan for number, draft in enumerate(drafts) if number in in_table),
        inputs.objective,
        inputs.device.description,
        inputs.peer.description,
        inputs.latency_limit_s if inputs.objective in ("capacity", "energy") else None,
        None if inputs.power is None else inputs.power.radio_w,
    )
    unit = _UNITS[inputs.objective]
    return PlanningResult(
        inputs.name, inputs.device.model_sha256, inputs.objective, unit,
        PlannedMachine(
            inputs.device.description, inputs.device.label, inputs.memory_bytes, inputs.weights_bytes
        ),
        PlannedMachine(
            inputs.peer.description, "modelled" if inputs.is_server_modelled else inputs.peer.label
        ),
        grid.bandwidths_mbit_s, grid.rtts_ms, tuple(ways), table, tuple(refusals),
        tuple(_warn(inputs, drafts)),
        (
            *explain_plan(ways, grid.bandwidths_mbit_s, grid.rtts_ms, unit),
            *_explain_search(inputs, found),
        ),
        kernels, len(inputs.feeds), found.tiers, inputs.max_loss,
    )  # fmt: skip


def _explain_search(inputs: PlanInputs, found: CutSearchResult) -> tuple[str, ...]:
    if inputs.most_leakage_db is None:
        return ()
    known = [one for one in found.over if one is not None]
    least = min(known, key=lambda one: one.lower_bound_db, default=None)
    return (
        explain_leakage(
            inputs.most_leakage_db, found.attacked, len(found.over), least, is_ended=found.is_ended
        ),
    )


def _find_reserve(
    inputs: PlanInputs,
    drafts: Sequence[_Draft],
    winners: NDArray[np.intp],
    in_table: set[int],
    scores: NDArray[np.float64],
) -> frozenset[int]:
    """Return the ways for inputs that the winner cannot send: the best of those that can send all inputs.

    Codes of uploads work for values like those of the samples. A way that is in the table anyway, such as
    the device alone, takes the others if it is as good.
    """
    fit = [number for number, draft in enumerate(drafts) if _carries_all(inputs, draft)]
    is_open = (winners >= 0) & ~np.isin(winners, fit)
    if not fit or not is_open.any():
        return frozenset()
    ranks = [-1 if number in in_table else SIMPLICITY[drafts[number].kind] for number in fit]
    best = find_winners(scores[fit][:, is_open], ranks)
    return frozenset(fit[one] for one in best if one >= 0) - in_table


def _carries_all(inputs: PlanInputs, draft: _Draft) -> bool:
    """Return whether a way carries inputs of any values; integers are their own codes."""
    fits_all = {"raw", "int8", "int4"}  # the last two take their range from what is sent
    return all(
        one.coding in fits_all
        or (one.name in inputs.feeds[0] and inputs.feeds[0][one.name].dtype.kind != "f")
        for one in draft.sent
    )


def _rows(values: NDArray[np.float64], grid: Grid) -> tuple[tuple[float, ...], ...]:
    """Return values [RTTs * bandwidths] as rows; infinity becomes `NEVER`, because JSON has no infinity."""
    finite = np.where(np.isfinite(values), values, NEVER)
    return tuple(tuple(float(one) for one in row) for row in finite.reshape(len(grid.rtts_ms), -1))


def _capacity(inputs: PlanInputs, draft: _Draft) -> int | None:
    """Return how many devices a server carries at the middle of the bandwidths."""
    if inputs.objective != "capacity" or inputs.latency_limit_s is None or draft.kind == "local":
        return None  # a device that computes all itself does not load the server
    links = inputs.grid.links()
    middle = Conditions(links[len(inputs.grid.bandwidths_mbit_s) // 2])
    kept_s = reserved_server_s(draft.plan, middle, inputs.latency_limit_s) * inputs.requests_per_s
    return int(min(MAX_DEVICES, 1 / max(kept_s, 1e-12)))


def _warn(inputs: PlanInputs, drafts: Sequence[_Draft]) -> list[str]:
    warnings = list(inputs.notes)
    warnings += [
        f"The times of {profile.measured_on} vary by {profile.whole_spread:.0%} between the quartiles:"
        " measure again at rest."
        for profile in (inputs.device, inputs.server)
        if profile.whole_spread > _LARGE_SPREAD and profile.label == "measured"  # a quota makes runs uneven
    ]
    if len(inputs.feeds) < MAX_SAMPLES:
        warnings.append(f"Sizes were measured on {len(inputs.feeds)} samples only.")
    warnings += _warn_of_unknown_change(inputs, drafts)
    if inputs.objective == "energy":
        warnings.append("Energy is modelled from the power of the device, not measured.")
    if any(draft.label == "modelled" for draft in drafts if draft.kind == "cut"):
        warnings.append("Times of cuts are sums over kernels (modelled): the cuts were not run as they are.")
    return list(dict.fromkeys(warnings))  # one machine may appear twice


def _warn_of_unknown_change(inputs: PlanInputs, drafts: Sequence[_Draft]) -> list[str]:
    """Return a warning for each reason why the effect of codings on the answers is unknown."""
    limit = "they are not offered" if inputs.max_loss < 1 else "no limit applies"
    found = f"there are {len(inputs.feeds)}"
    if not inputs.has_samples:
        found = "golden and made-up inputs are no evidence"
    reasons = {
        number: f"an estimate needs at least {number} samples, {found}"
        for number in (INT8_SAMPLES, LOSSY_SAMPLES)
    }
    reasons[0] = "nothing was run" if inputs.realise is None else "outputs are not known to hold classes"
    warnings = []
    for number, reason in reasons.items():
        names = [
            one.plan.name
            for one in drafts
            if one.least_samples and one.samples_needed == number and (number or one.change is None)
        ]
        if names:
            what = f"What {', '.join(names)} may change in the answers is unknown"
            warnings.append(f"{what} ({reason}): {limit}.")
    return warnings
