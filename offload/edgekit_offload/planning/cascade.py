"""Chooses the threshold of a cascade of a small model on the device and a large model on the server.

If the small model is not confident, the request is sent to the large model. The threshold for this decision
is chosen on one half of the samples. The other half is used to confirm that the cascade agrees with the large
model as often as required. If it does not, or is never the best plan, it is refused with a reason.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx
import onnx.compose
from numpy.typing import ArrayLike, NDArray

from edgekit_offload.partition.opened_model import Feeds, OpenedModel
from edgekit_offload.partition.split import Part, SplitModels
from edgekit_offload.planning.coding_costs import find_probabilities
from edgekit_offload.planning.envelope import Score, score_all
from edgekit_offload.planning.result import Refusal
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.latency_model import Conditions
from edgekit_runtime.offload.offload_plan import Escalation, OffloadPlan
from edgekit_runtime.tensors import TensorSpec

NAME: Final = "cascade"
_PREFIX: Final = "small/"

_BISECTIONS: Final = 60  # steps to find a probability: finer than the precision of a float
_SPARE_DEVIATIONS: Final = 2  # fewer errors in the choosing half, so that the other half usually confirms


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """A cascade that agrees with the large model as often as required.

    Attributes:
        escalation: The threshold, and the fraction of the confirmation samples that go to the server.
        agreement: The fraction of the confirmation samples with the same answer as the large model.
        least_agreement: A lower bound of the true agreement.
        confidence: The probability with which the bound holds, such as 0.95.
        samples: The number of confirmation samples.
    """

    escalation: Escalation
    agreement: float
    least_agreement: float
    confidence: float
    samples: int

    def describe(self) -> str:
        return (
            f"Of {self.samples} other samples {self.agreement:.1%} get the large model's answer, so at least"
            f" {self.least_agreement:.1%} of all do, with a confidence of {self.confidence:.0%}."
        )


def choose_threshold(
    small: ArrayLike,
    large: ArrayLike,
    output: str,
    *,
    least_agreement: float,
    confidence: float = 0.95,
    seed: int = 0,
) -> Cascade | Refusal:
    """Return the cascade with the fewest escalations that agrees with the large model often enough.

    Args:
        small: The scores of the model on the device, [samples, ..., classes]. Axes in between have size 1.
        large: The scores of the model on the server for the same samples and classes.
        output: The name of the output with the scores in the small model.
        least_agreement: The required fraction of requests with the answer of the large model, above 0 and
            below 1.
        confidence: The required probability that the true agreement is at least `least_agreement`.
        seed: The seed for splitting the samples into halves.

    Returns:
        A `Refusal` if no threshold is confirmed, because there are too few samples or the small model is not
            good enough.

    Raises:
        CutError: The scores differ in shape, have fewer than two classes, or contain NaN or infinity, or a
            given fraction is not above 0 and below 1.
    """
    if not (0 < least_agreement < 1 and 0 < confidence < 1):
        raise CutError(
            f"cascade: asked for an agreement of {least_agreement:g} with a confidence of {confidence:g}; "
            "expected both above 0 and below 1"
        )
    margins, is_wrong = _compare(small, large)
    order = np.random.default_rng(seed).permutation(len(margins))
    half = len(order) // 2
    largest_error = 1 - least_agreement
    allowed = _allowed(half, largest_error, confidence)
    if allowed < 0:
        return _ask_for_samples(len(order), least_agreement, confidence)
    spare = _SPARE_DEVIATIONS * math.sqrt(allowed)
    chosen = _threshold(margins[order[:half]], is_wrong[order[:half]], int(max(allowed - spare, 0)))
    if chosen is None:
        return _refuse(
            "The small model differs from the large one also where it is most sure, so no threshold gives an "
            f"agreement of {least_agreement:.1%}."
        )
    margins, is_wrong = margins[order[half:]], is_wrong[order[half:]]
    count, errors = len(margins), int((is_wrong & (margins >= chosen)).sum())
    if errors > _allowed(count, largest_error, confidence):
        return _refuse(
            f"The threshold did not stand its test on {count} other samples: the cascade agrees with the "
            f"large model on {1 - errors / count:.1%} of them, which does not confirm {least_agreement:.1%}."
        )
    if 2 * errors > (sure := int((margins >= chosen).sum())):
        return _refuse(
            f"The small model is too weak: of {count} samples it is sure of {sure}, and {errors} of these"
            " answers are not those of the large model."
        )
    return Cascade(
        escalation=Escalation(output, chosen, float((margins < chosen).mean())),
        agreement=1 - errors / count,
        least_agreement=1 - _largest_rate(errors, count, confidence),
        confidence=confidence,
        samples=count,
    )


def _refuse(reason: str) -> Refusal:
    return Refusal(NAME, reason)


def _ask_for_samples(count: int, least_agreement: float, confidence: float) -> Refusal:
    needed = 2 * math.ceil(math.log(1 - confidence) / math.log(least_agreement))
    return _refuse(
        f"{count} samples cannot confirm an agreement of {least_agreement:.1%} at a confidence of "
        f"{confidence:.0%}: at least {needed} are needed, and more where the models differ."
    )


def _compare(small: ArrayLike, large: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return for each sample how sure the small model is, and whether the large one disagrees."""
    scores, reference = _scores(small, "small"), _scores(large, "large")
    if scores.shape != reference.shape:
        raise CutError(
            f"cascade: the small model has scores {list(scores.shape)}, the large one "
            f"{list(reference.shape)}; pass the same samples and the same classes of both"
        )
    top = np.partition(scores, -2, axis=1)
    return top[:, -1] - top[:, -2], scores.argmax(axis=1) != reference.argmax(axis=1)


def _threshold(margins: NDArray[np.float64], is_wrong: NDArray[np.bool_], allowed: int) -> float | None:
    """Return the least margin from which on at most `allowed` answers are wrong; None if there is none."""
    order = np.argsort(-margins, kind="stable")
    errors, sorted_margins = np.cumsum(is_wrong[order]), margins[order]
    is_last = np.append(sorted_margins[1:] != sorted_margins[:-1], True)  # equal margins are taken together
    possible = sorted_margins[is_last & (errors <= allowed)]
    return float(possible[-1]) if len(possible) else None


def _allowed(count: int, largest_rate: float, confidence: float) -> int:
    """Return how many errors among `count` samples still confirm a rate; -1 if not even zero errors do."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        if _at_most(middle, count, largest_rate) <= 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def _largest_rate(errors: int, count: int, confidence: float) -> float:
    """Return the upper bound of the true rate of errors, of which `errors` were found in `count` samples.

    Source: Clopper, Pearson, "The use of confidence or fiducial limits", Biometrika 26, 1934; one-sided.
    """
    if errors >= count:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(errors, count, middle) > 1 - confidence else (low, middle)
    return high


def _at_most(errors: int, count: int, rate: float) -> float:
    """Return the probability of at most `errors` errors in `count` samples at a true rate."""
    if rate == 1.0:
        return float(errors >= count)
    logs = (
        math.lgamma(count + 1)
        - math.lgamma(k + 1)
        - math.lgamma(count - k + 1)
        + k * math.log(rate)
        + (count - k) * math.log1p(-rate)
        for k in range(errors + 1)
    )
    return math.fsum(math.exp(log) for log in logs)


def _scores(array: ArrayLike, which: str) -> NDArray[np.float64]:
    values = np.asarray(array)
    shape = values.shape
    if (
        len(shape) < 2
        or shape[-1] < 2
        or values.size != shape[0] * shape[-1]
        or values.dtype.kind not in "iuf"
    ):
        raise CutError(
            f"cascade: the scores of the {which} model are {values.dtype} {list(shape)}; expected numbers "
            "[samples, classes] with at least 2 classes; a cascade needs a classifier"
        )
    rows = values.reshape(shape[0], shape[-1]).astype(np.float64)
    if not np.isfinite(rows).all():
        raise CutError(f"cascade: the scores of the {which} model hold NaN or infinity; pass finite scores")
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeInputs:
    """The inputs for planning a cascade.

    Attributes:
        small: The ONNX model for the device. It has the same inputs and single output as the large model.
        agreement: The required fraction of requests with the same answer as the large model.
        feeds: The samples for choosing and confirming the threshold, one request each.
        classes: The outputs of the large model that are class scores. Outputs with class probabilities are
            detected and need not be listed.
    """

    small: OpenedModel
    agreement: float
    feeds: Sequence[Feeds]
    classes: Collection[str] = ()


def plan_cascade(
    large: OpenedModel, inputs: CascadeInputs, upload: OffloadPlan, slowdown: float
) -> tuple[OffloadPlan, Cascade] | Refusal:
    """Return the plan of a cascade and its threshold, or a refusal with the reason.

    For each request, the device runs a graph with the small model and the coding of the input. If the small
    model is not confident, the request is escalated, which means that it is sent by `upload`. Only escalated
    requests need time for encoding a file such as JPEG, for compression and for the server.

    `slowdown` is the ratio of the device's time to this machine's time.
    """
    try:
        cascade = _confirm(large, inputs)
    except CutError as cause:
        return _refuse(f"{cause}.")
    if not isinstance(cascade, Cascade):
        return cascade
    small_s = inputs.small.run_seconds(inputs.feeds[0]) * slowdown
    sent, share = upload.costs, cascade.escalation.share
    head_s = 0.0 if upload.head is None else sent.device_s - sent.compress_s - sent.request_s
    costs = replace(
        sent,
        device_s=small_s + head_s + share * (sent.device_s - head_s),
        compress_s=share * sent.compress_s,
        request_s=share * sent.request_s,
        is_measured=False,
    )
    stem = f"{NAME}-{(upload.tail or '').removesuffix('.tail')}"
    planned = replace(
        upload,
        name=stem,
        costs=costs,
        head=f"{stem}.head",
        tail=f"{stem}.tail",
        escalation=cascade.escalation,
        answers_changed=1 - cascade.agreement,
    )
    return planned, cascade


def _confirm(large: OpenedModel, inputs: CascadeInputs) -> Cascade | Refusal:
    sessions = [inputs.small.session, large.session]
    outputs = [[output.name for output in session.get_outputs()] for session in sessions]
    if any(len(names) != 1 for names in outputs):
        raise CutError(f"both models need one output, they have {outputs[0]} and {outputs[1]}")
    input_names = [{value.name for value in session.get_inputs()} for session in sessions]
    if input_names[0] != input_names[1]:
        raise CutError(
            f"the small model takes {sorted(input_names[0])}, the large one {sorted(input_names[1])}"
        )
    try:
        rows = [[session.run(None, dict(sample))[0] for sample in inputs.feeds] for session in sessions]
        small, scores = map(np.concatenate, rows)
    except Exception as cause:  # onnxruntime's errors have no common base class of their own
        reason = str(cause).strip().splitlines()[0]
        raise CutError(
            f"A sample does not run in both models, which need the same inputs: {reason}"
        ) from cause
    name = outputs[1][0]
    if name not in {*inputs.classes, *find_probabilities([{name: scores} for scores in rows[1]])}:
        raise CutError(
            f"a cascade agrees with the large model by the class alone, and output '{name}' is not known to"
            f" hold scores of classes; --classes {name} states it"
        )
    return choose_threshold(small, scores, name, least_agreement=inputs.agreement)


def refuse_cascade(
    plan: OffloadPlan, others: Sequence[OffloadPlan], conditions: Sequence[Conditions], score: Score
) -> Refusal | None:
    """Return a refusal if the cascade is never the best plan under `conditions`, else None.

    Raises:
        CutError: `plan` is not a cascade.
    """
    if plan.escalation is None:
        raise CutError(f"plan '{plan.name}' is no cascade")
    rows = score_all([plan, *others], conditions, score)
    own, best = rows[0], rows[1:].min(axis=0)
    if (own < best).any():
        return None
    ratio = np.full(len(own), np.inf)
    np.divide(own, np.maximum(best, 1e-12), out=ratio, where=np.isfinite(own))
    column = int(ratio.argmin())
    if not np.isfinite(ratio[column]):
        return _refuse("The cascade keeps the limit on latency at no setting.")
    rival = others[int(rows[1:, column].argmin())].name
    return _refuse(
        f"The cascade sends {plan.escalation.share:.0%} of the requests to the server and costs at least"
        f" {ratio[column]:.3g} times as much as '{rival}'."
    )


def cascade_split(small: bytes, output: str, upload: SplitModels) -> SplitModels:
    """Return the submodels of a cascade. Its head has the small model and the head of an upload.

    Args:
        small: The ONNX model for the device.
        output: The name that the output of the small model gets in the head.
        upload: The split that sends the input. Its tail is also the tail of the cascade.

    Raises:
        CutError: The small model and the coding cannot be combined in a graph.
    """
    model = onnx.load_from_string(small)
    inputs_of_small, output_of_small = [value.name for value in model.graph.input], model.graph.output[0].name
    model = onnx.compose.add_prefix(model, _PREFIX)
    renamed = {f"{_PREFIX}{name}": name for name in inputs_of_small} | {f"{_PREFIX}{output_of_small}": output}
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for value in (*model.graph.input, *model.graph.output):
        value.name = renamed.get(value.name, value.name)
    outputs: tuple[TensorSpec, ...] = (next(spec for spec in upload.tail.outputs if spec.name == output),)
    inputs = upload.head.inputs if upload.head is not None else upload.tail.inputs
    if upload.head is not None:
        coding = onnx.load_from_string(upload.head.content)
        versions = [
            {opset.domain: opset.version for opset in proto.opset_import} for proto in (model, coding)
        ]
        if versions[0].get("") != versions[1].get(""):
            raise CutError(
                f"cascade: the models have the opsets {versions[0]} and {versions[1]}; convert one"
            )
        model.graph.node.extend(coding.graph.node)
        model.graph.initializer.extend(coding.graph.initializer)
        model.graph.output.extend(coding.graph.output)
        outputs += upload.head.outputs
    head = Part(model.SerializeToString(), inputs, outputs, reads_weights=False)
    return SplitModels(head=head, tail=upload.tail, sent=upload.sent, coded=upload.coded, codes=upload.codes)
