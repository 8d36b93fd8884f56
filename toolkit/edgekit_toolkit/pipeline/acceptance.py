"""Chooses a candidate that the engine of the target accepts.

`selection` chooses a candidate within the limits of the budget. Then the candidate is checked with TensorRT's
parser and builder, or with the engine release on the devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.engines.tensorrt_check import TensorRtCheck
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.packaging.assemble import PackageDraft
from edgekit_toolkit.packaging.device_engine import prove
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import CandidateFigures, Choice, choose
from edgekit_toolkit.selection.confirmation import Acceptance, AcceptedChoice

_NEEDED: Final = "another --backend that the target runs, or a model that the engine accepts"


def choose_accepted(
    budget: Budget, measured: Sequence[CandidateFigures], check: Callable[[str], Acceptance], *, on_gpu: bool
) -> AcceptedChoice:
    """Choose a candidate that the engine accepts. If it refuses one, choose again among the others.

    `measured` contains one or more candidates. `check` takes the id of a candidate.
    """
    remaining = list(measured)
    refused: list[str] = []
    while True:
        choice = choose(remaining, budget, on_gpu=on_gpu)
        if choice.chosen is None:
            return AcceptedChoice(_with_refusals(choice, refused), None, refused)
        acceptance = check(choice.chosen)
        if not acceptance.refuser:
            return AcceptedChoice(choice, acceptance, [*refused, *acceptance.notes])
        refused.append(f"{acceptance.refuser} refuses {choice.chosen}: {acceptance.refusal}")
        remaining = [candidate for candidate in remaining if candidate.id != choice.chosen]
        if not remaining:
            reason = "the target's engine refuses every candidate that keeps the limits"
            choice = Choice(None, (), choice.chosen, reason, _NEEDED)
            return AcceptedChoice(_with_refusals(choice, refused), None, refused)


def check_accepted(
    backend: str,
    model: Model,
    package: PackageDraft,
    feeds: Feeds,
    signer: StatementSigner,
    *,
    show: Callable[[str], None] = lambda _: None,
) -> Acceptance:
    parser_check: TensorRtCheck | None = None
    notes: tuple[str, ...] = ()
    support = find_support(backend)
    if support.check is not None:
        parser_check = support.check(model, feeds)
        if parser_check.version is None:  # not installed, crashed or out of time: no answer is not a refusal
            notes = (f"not checked with TensorRT's parser and builder: {parser_check.errors[0]}",)
            parser_check = None
        elif not parser_check.accepted:
            return Acceptance("TensorRT", parser_check.errors[0], tensorrt=parser_check)
    proof = prove(package, support.judged_on, signer, show)
    return Acceptance(proof.engine if proof.problem else "", proof.problem, notes, parser_check, proof)


def _with_refusals(choice: Choice, refused: Sequence[str]) -> Choice:
    """Return the refusal with the engine's earlier refusals, which explain it beside the limits."""
    return replace(choice, reason="; ".join([choice.reason, *refused])) if refused else choice
