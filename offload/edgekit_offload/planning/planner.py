"""Plans how to run a model on two machines: collects candidates and compares them.

For example, a classifier takes 50 ms on the device and 5 ms on the server. Its images have 600 kB.

1. `local` needs 50 ms on the device if the model fits its memory. `raw` and `jpeg:90` upload the input.
2. Each tensor between two kernels is measured in each coding (`coding_costs`). Then the cheapest placement of
   kernels is computed for each link and load (`cut_candidates`). The best cuts send the output of kernel 12,
   which has 40 kB, or 9 kB as int8. They become the candidates `cut1-raw` and `cut2-int8`.
3. `PlanInputs.measure` extracts these candidates and measures complete runs. For example, `cut2-int8` takes
   21 ms on the device and 2 ms on the server. If `measure` is None, the times are sums over kernels
   (`modelled`).
4. Optionally, a cascade is added (`cascade`), and attacks on the sent tensors are measured (`leakage`).
5. `comparison` computes all scores for the grid of links and loads. Candidates that are the best for some of
   these go into the cut table.

Each step returns its candidates, or a `Refusal` with the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from edgekit_offload.partition.tensor_forms import find_forms
from edgekit_offload.planning.cascade import NAME, CascadeInputs, plan_cascade, refuse_cascade
from edgekit_offload.planning.coding_costs import measure_codings
from edgekit_offload.planning.comparison import MAX_SAMPLES, compare, exceeds_loss, min_samples
from edgekit_offload.planning.costs import (
    INPUT,
    GraphCosts,
    add_energy,
    device_bytes,
    device_weights,
    pinned_tensors,
)
from edgekit_offload.planning.cut_candidates import (
    CutCandidate,
    CutSearch,
    CutSearchResult,
    LeakageMeter,
    Progress,
    search_cuts,
)
from edgekit_offload.planning.plan_inputs import ExtractedPlan, PlanInputs
from edgekit_offload.planning.result import Candidate, PlanningResult, Refusal
from edgekit_offload.planning.uploads import UploadCandidate, WholeModel, find_uploads
from edgekit_offload.profiling.fused_graph import is_plain
from edgekit_offload.profiling.model_profile import ModelProfile, describe_cause
from edgekit_offload.profiling.planning_graph import check_model, join_profiles
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.latency_model import predict_s
from edgekit_runtime.offload.offload_plan import LOCAL, OffloadPlan, PlanCosts


def plan(inputs: PlanInputs, progress: Progress = lambda _step, _done, _total: None) -> PlanningResult:
    """Return all ways to run a model on two machines, and the conditions under which each is the best.

    Raises:
        CutError: A profile belongs to another model, the link is down, or no candidate keeps the limits.
    """
    inputs.check()
    progress("measuring what tensors take on the link", None, None)
    whole = _measure_whole(inputs)
    costs = _measure_graph(inputs, whole)
    graph = costs if isinstance(costs, GraphCosts) else None
    outcomes: list[Candidate | Refusal] = [costs] if isinstance(costs, Refusal) else []
    outcomes.append(_plan_local(inputs, graph))
    uploads, refusals = _find_uploads(inputs, whole, has_graph=graph is not None)
    outcomes += [*refusals, *map(_make_upload, uploads)]
    meter = None if inputs.leakage is None else LeakageMeter(inputs.leakage, inputs.most_leakage_db)
    search = CutSearchResult()
    if graph is not None:
        search = _search_cuts(inputs, graph, _candidates_of(outcomes), meter, progress)
        outcomes += [*search.refusals, *(_make_cut(cut, graph) for cut in search.cuts)]
    if inputs.measure is not None:
        progress("extracting and measuring", None, None)
        measured = inputs.measure(uploads, search.cuts)
        outcomes = [_use_measurement(inputs, outcome, measured) for outcome in outcomes]
    outcomes = [_add_request(outcome, inputs.device, inputs.peer) for outcome in outcomes]
    if inputs.cascade is not None:
        progress("choosing the threshold of the cascade", None, None)
        candidates = _candidates_of(outcomes)
        outcomes.append(_plan_cascade(inputs, inputs.cascade, candidates, whole.device_slowdown))
    if meter is not None:
        progress("attacking what is sent", None, None)
    forms = find_forms(inputs.model.proto.graph, inputs.feeds[0])
    candidates = [_finish(inputs, candidate, forms, meter) for candidate in _candidates_of(outcomes)]
    refusals = tuple(outcome for outcome in outcomes if isinstance(outcome, Refusal))
    if not candidates:
        raise CutError("no candidate keeps the limits: " + " ".join(refusal.reason for refusal in refusals))
    kernels = 0 if graph is None else len(graph.seconds)
    return compare(inputs, candidates, refusals, search, kernels=kernels)


def _candidates_of(outcomes: Sequence[Candidate | Refusal]) -> list[Candidate]:
    return [outcome for outcome in outcomes if isinstance(outcome, Candidate)]


def _measure_whole(inputs: PlanInputs) -> WholeModel:
    here_s = inputs.model.run_seconds(inputs.feeds[0])
    (outputs,) = inputs.model.answers(inputs.feeds[:1])
    for spec in inputs.model.session.get_outputs():
        if not is_plain(outputs[spec.name]):
            raise CutError(f"output '{spec.name}' is a {spec.type}, which no server can return; run it whole")
    return WholeModel(
        server_s=inputs.peer.whole_s,
        output_bytes=float(sum(output.nbytes for output in outputs.values())),
        outputs=len(outputs),
        device_slowdown=inputs.device.whole_s / here_s,
        server_slowdown=inputs.peer.whole_s / here_s,
    )


def _measure_graph(inputs: PlanInputs, whole: WholeModel) -> GraphCosts | Refusal:
    """Return the graph of kernels with its costs, or a refusal of all cuts if anything goes wrong.

    Raises:
        CutError: a profile is of another model.
    """
    model = inputs.model
    profiles = [inputs.device, *([inputs.edge] if inputs.edge else []), inputs.server]
    for profile in profiles:
        check_model(profile, model.content)
    try:
        joined = join_profiles(model.content, profiles, model.proto)
        model.source.samples  # noqa: B018  # the checks of what is cut
        codings = measure_codings(
            model,
            joined.graph,
            inputs.feeds[:MAX_SAMPLES],
            device_slowdown=whole.device_slowdown,
            server_slowdown=whole.server_slowdown,
        )
    except Exception as cause:  # engine, codecs and numpy raise errors of their own
        return _refuse_cuts(cause)
    return GraphCosts(
        graph=joined.graph,
        seconds=joined.seconds,
        raw_bytes=np.array([joined.tensor_bytes[tensor] for tensor in joined.graph.tensors], np.float64),
        weight_bytes=joined.weight_bytes.astype(np.float64),
        weight_readers=joined.weight_readers,
        codings=codings,
        nodes=joined.nodes,
    )


def _refuse_cuts(cause: Exception) -> Refusal:
    return Refusal("cuts", f"The model cannot be split: {describe_cause(cause)}.")


def _plan_local(inputs: PlanInputs, costs: GraphCosts | None) -> Candidate | Refusal:
    """Return the candidate that runs all on the device, if its memory is large enough."""
    needed = None if costs is None else device_bytes(costs, (0,) * len(costs.seconds))
    file_bytes = float(len(inputs.model.content))
    weights_bytes = file_bytes if costs is None else device_weights(costs, (0,) * len(costs.seconds))
    if too_large := inputs.limits.describe_excess(weights_bytes, file_bytes if needed is None else needed):
        return Refusal(LOCAL, f"The whole model {too_large}.")
    local = OffloadPlan(LOCAL, PlanCosts(inputs.device.whole_s, is_measured=True))
    return Candidate(kind="local", plan=local, label=inputs.device.label, device_bytes=needed)


def _find_uploads(
    inputs: PlanInputs, whole: WholeModel, *, has_graph: bool
) -> tuple[tuple[UploadCandidate, ...], tuple[Refusal, ...]]:
    """Return the uploads, none if a tensor must stay here or leakage is limited; and why others are none."""
    unknown = set(inputs.keep_on_device) - {INPUT, *inputs.feeds[0]}
    if not has_graph and unknown:
        raise CutError(f"--keep-on-device {min(unknown)}: the model cannot be split")
    if inputs.keep_on_device:
        names = ", ".join(f"'{name}'" for name in inputs.keep_on_device)
        reason = f"{names} must stay on the device, so the server cannot run the whole model."
        return (), (Refusal("upload", reason),)
    uploads, refusals = find_uploads(inputs.feeds, whole, inputs.sample_rate_hz)
    if inputs.most_leakage_db is None:
        return uploads, refusals
    reason = "It sends the input itself, and --max-leak sets a limit on what is revealed."
    return (), (*refusals, *(Refusal(upload.plan.name, reason) for upload in uploads))


def _make_upload(upload: UploadCandidate) -> Candidate:
    return Candidate(kind="upload", plan=upload.plan, label="modelled", sent=upload.sent)


def _make_cut(candidate: CutCandidate, costs: GraphCosts) -> Candidate:
    cut = candidate.cut
    return Candidate(
        kind="cut",
        plan=candidate.plan,
        label="modelled",
        sent=candidate.sent,
        certificate=None if candidate.goes_on else cut.certificate,  # that proof is for three tiers
        kernels_on_device=cut.tiers.count(0),
        device_bytes=device_bytes(costs, cut.tiers),
    )


def _search_cuts(
    inputs: PlanInputs,
    costs: GraphCosts,
    rivals: Sequence[Candidate],
    meter: LeakageMeter | None,
    progress: Progress,
) -> CutSearchResult:
    """Return the cuts worth measuring; a limit on leakage keeps the inputs on the device from the start."""
    has_limit = inputs.most_leakage_db is not None
    pinned = pinned_tensors(costs.graph, inputs.keep_on_device)
    pinned[: len(costs.graph.inputs)] |= has_limit
    tensors = costs.graph.tensors
    forms = find_forms(inputs.model.proto.graph, [tensors[row] for row in np.flatnonzero(pinned)])
    search = CutSearch(
        costs=costs,
        goal=replace(inputs.goal, limits=inputs.limits.of(replace(costs, seconds=costs.seconds[:, :2]))),
        limits=inputs.limits,
        grid=inputs.grid,
        pinned=np.array([tensor in forms for tensor in tensors]),
        edge_link=None if inputs.edge is None else inputs.edge_link,
        leakage=meter if has_limit else None,
    )
    try:
        return search_cuts(
            search, [add_energy(candidate.plan, inputs.power) for candidate in rivals], progress
        )
    except Exception as cause:  # the candidates with the whole model stay
        return CutSearchResult(refusals=[_refuse_cuts(cause)])


def _use_measurement(
    inputs: PlanInputs, outcome: Candidate | Refusal, measured: Mapping[str, ExtractedPlan | Refusal]
) -> Candidate | Refusal:
    """Return a candidate with measured costs instead of modelled ones, or why it does not work."""
    result = measured.get(outcome.plan.name) if isinstance(outcome, Candidate) else None
    if isinstance(outcome, Refusal) or result is None:
        return outcome
    if isinstance(result, Refusal):
        return result
    needed = min_samples(outcome)
    measured_candidate = replace(outcome, plan=result.plan, label=result.label)
    if result.change is None:
        return measured_candidate
    if not inputs.has_samples:
        plain = replace(result.plan, answers_changed=None)
        return replace(measured_candidate, plan=plain, samples_needed=needed)
    return replace(
        measured_candidate,
        expected_loss=result.change.loss,
        loss_error=result.change.loss_error,
        samples_needed=needed if len(inputs.feeds) < needed else 0,
    )


def _add_request(
    outcome: Candidate | Refusal, device: ModelProfile, server: ModelProfile
) -> Candidate | Refusal:
    """Return a candidate with the time of its request on both machines beside kernels and coding.

    All plans that send something have this time in common, so it changes no cut, only whether to send. It is
    assumed that a server takes as long to receive a request and to answer as the same machine takes to send
    one.
    """
    if isinstance(outcome, Refusal):
        return outcome
    costs = outcome.plan.costs
    if outcome.plan.tail is None:
        request_s, server_request_s = device.request.local_s, 0.0
    else:
        request_s = device.request.seconds(costs.upload_bytes)
        server_request_s = server.request.seconds(costs.upload_bytes)
    costs = replace(
        costs,
        device_s=costs.device_s + request_s,
        request_s=request_s,
        server_s=costs.server_s + server_request_s,
        server_request_s=server_request_s,
    )
    return replace(outcome, plan=replace(outcome.plan, costs=costs))


def _plan_cascade(
    inputs: PlanInputs, cascade: CascadeInputs, candidates: Sequence[Candidate], slowdown: float
) -> Candidate | Refusal:
    """Return the cascade on top of the best upload, if it pays somewhere."""
    conditions = inputs.grid.conditions()
    small_bytes = float(len(cascade.small.content))
    if too_large := inputs.limits.describe_excess(small_bytes, small_bytes):
        return Refusal(NAME, f"The small model {too_large}.")
    offered = [candidate for candidate in candidates if not exceeds_loss(candidate, inputs.max_loss)]
    uploads = [candidate for candidate in offered if candidate.kind == "upload"]
    if not uploads:
        return Refusal(NAME, "Nothing may be uploaded, so the large model cannot be asked.")
    upload = min(
        uploads, key=lambda candidate: sum(predict_s(candidate.plan, condition) for condition in conditions)
    )
    planned = plan_cascade(inputs.model, cascade, upload.plan, slowdown)
    if isinstance(planned, Refusal):
        return planned
    cascade_plan, confirmed = planned
    plans = (cascade_plan, *(candidate.plan for candidate in offered))
    own, *others = (add_energy(rival, inputs.power) for rival in plans)
    refusal = refuse_cascade(own, others, conditions, inputs.goal.score)
    if refusal is not None:
        return refusal
    # It sends what the upload sends, so it also loses what that loses, in the requests that go on.
    return replace(
        upload, kind="cascade", plan=cascade_plan, label="modelled", explanation=confirmed.describe()
    )


def _finish(
    inputs: PlanInputs, candidate: Candidate, input_forms: frozenset[str], meter: LeakageMeter | None
) -> Candidate:
    """Return a candidate with its energy, and with the leakage of its sent tensors other than the input."""
    sends_input = any(tensor.name in input_forms for tensor in candidate.sent)
    candidate = replace(candidate, plan=add_energy(candidate.plan, inputs.power), sends_input=sends_input)
    leakage = None
    if meter is not None and candidate.kind != "local" and not sends_input:
        leakage = meter.measure(candidate.sent)
    if leakage is None:
        return candidate
    plan_with_leakage = replace(candidate.plan, leakage_db=leakage.lower_bound_db)
    return replace(candidate, plan=plan_with_leakage, known_inputs=leakage.known_samples)
