"""Builds the forms that need special arithmetic, if the user requests them.

They are scored on an emulated processor, so their latency is not measured. The package contains them as
variants, and `edgekit-device tournament` measures their latency on the device.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from edgekit_runtime.errors import EdgekitError, TargetError
from edgekit_toolkit.engines.record import SUPPORTS, EngineSupport
from edgekit_toolkit.evaluation.drops import CONFIDENCE
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.pipeline.candidates import Candidate, CandidateSet
from edgekit_toolkit.pipeline.compressed_candidates import open_quantizer
from edgekit_toolkit.pipeline.judging import Judging
from edgekit_toolkit.pipeline.request import Phases, Progress
from edgekit_toolkit.pipeline.run import FurtherVariant, JudgedCandidate, Run
from edgekit_toolkit.quantize.forms import FLOAT32, Form
from edgekit_toolkit.selection.confirmation import HeldDrop
from edgekit_toolkit.targets.spec import Target


def find_untimed_support(kind: str, target: Target) -> EngineSupport:
    """Return the engine of a target that supports an untimed form. `kind` is one of `UNTIMED_KINDS`.

    Raises:
        TargetError: No engine of the target supports the form, or the target's CPU lacks the instructions.
        EngineMissingError: The processor cannot be emulated on this machine.
    """
    for name in target.backend.names:
        if (form := SUPPORTS[name].untimed.get(kind)) is None:
            continue
        if form.isa not in target.cpu.isa:
            raise TargetError(
                f"{target.name}: cores of {target.cpu.model} have no {form.isa} arithmetic, so a variant of"
                f" the form {kind} would run in float32; leave out --also {kind}"
            )
        form.check()
        return SUPPORTS[name]
    raise TargetError(f"{target.name}: no engine of {', '.join(target.backend.names)} makes {kind}")


def make_untimed(run: Run, signer: StatementSigner, progress: Progress) -> Iterator[FurtherVariant | str]:
    """Yield each untimed form of a request, or a text that says why it cannot be built.

    Raises:
        TargetError: No engine of the target supports the form, or the target's CPU lacks the instructions.
        EngineMissingError: The processor cannot be emulated on this machine.
    """
    for kind in run.request.also:
        support = find_untimed_support(kind, run.request.target)
        label = support.untimed[kind].label
        try:
            yield FurtherVariant("", *_judge(run, support, kind, signer, progress))
        except EdgekitError as error:
            yield f"{support.name} {label}: {' '.join(str(error).split())}"


def _judge(
    run: Run, support: EngineSupport, kind: str, signer: StatementSigner, progress: Progress
) -> tuple[Run, JudgedCandidate]:
    request = replace(run.request, backend=support.name)
    prepared, label = run.prepared, support.untimed[kind].label
    quantizer = open_quantizer(request, prepared, prepared.floats)
    candidates = [
        Candidate(name, Form(form), model, math.inf)
        for name, form in (("float32", FLOAT32), (label, kind))
        if (model := quantizer.build(Form(form))) is not None
    ]
    judging = Judging(
        request, prepared, CandidateSet(candidates), signer, Phases(progress), quantizer=quantizer
    )
    judging.judge_added()
    if len(judging.drafts) < len(candidates):
        raise EdgekitError("its outputs are NaN or infinite, or nothing like those of float32")
    draft = judging.drafts[-1]
    candidate = replace(
        draft,
        held=HeldDrop(draft.score.drop, CONFIDENCE, held_back=False) if prepared.has_data else None,
        measured=replace(draft.measured, id=kind),
    )
    return replace(run, request=request), candidate
