"""Decides the next steps from the desired and the actual state, without input or output.

The agent calls `reconcile` a few times a second, writes the returned executions to its journal, and only then
carries out a step. After an interruption, the step is decided again from the actual state.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias

from edgekit_runtime.agent.conditions import DeviceConditions, ModelView, check_window, find_obstacle
from edgekit_runtime.agent.documents import Desired, DesiredModel, Execution, ReportedModel
from edgekit_runtime.agent.journal import Progress
from edgekit_runtime.agent.trusted_time import format_utc
from edgekit_runtime.errors import SignatureError
from edgekit_runtime.records import dataclass

Action: TypeAlias = Literal["download", "install", "load", "unload", "remove", "refresh", "upload"]
Status: TypeAlias = Literal["converged", "working", "diverged", "stale"]

MAX_LOADS: Final = 4
"""How often the service is asked to load a version that it neither serves nor rejects."""
WASTED: Final = 2.0
"""A download ends after this multiple of the package's size, because the link may be metered."""
_WASTED_BYTES: Final = 1 << 20  # additional, for small packages
_CODES: Final = (
    # The start of a reason, and its code. The service's trial names the missed gate.
    ("not_finite:", "not-finite"),
    ("crash:", "crash-loop"),
    ("was begun ", "crash-loop"),  # from the slots: begun several times, never confirmed
)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do for a model.

    Attributes:
        action: `download` fetches the package. `install` writes it into the spare slot and makes it active.
            `load` makes the service load it. `unload` makes the service unload the served version. `remove`
            removes the model. The agent itself adds `refresh`, which verifies the repository's metadata
            again, and `upload`, which sends samples.
        model: name of the model, or empty for `refresh` and `upload`.
        desired_model: the model's entry in the desired document, or None for `remove`, `refresh` and
            `upload`.
    """

    action: Action
    model: str
    desired_model: DesiredModel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NextSteps:
    """The steps to run next and the status to report.

    Attributes:
        executions: records to write to the journal before a step begins, one per model.
        superseded: executions that newer executions have replaced.
        steps: possible steps, the most urgent first. A model may have the step `unload` and a second step,
            which runs even if the service refuses to unload.
        status, because: status to report and the reason for it.
    """

    executions: tuple[Progress, ...]
    superseded: tuple[Execution, ...]
    steps: tuple[Step, ...]
    models: tuple[ReportedModel, ...]
    status: Status
    because: str


def accept_desired(desired: Desired, previous: Desired | None, device: str) -> bool:
    """Return whether a verified document replaces the previous one, False if both are equal.

    `previous` is the last accepted document, or None.

    Raises:
        SignatureError: the document is for another device, or differs from the previous one and is not newer.
    """
    if desired.device != device:
        raise SignatureError(f"desired: is for {desired.device!r}, this is {device!r}")
    if previous is None:
        return True
    if desired == previous:
        return False
    if desired.epoch < previous.epoch or desired.version <= previous.version:
        raise SignatureError(
            f"desired: version {desired.version} of epoch {desired.epoch} is not newer than"
            f" {previous.version} of {previous.epoch}, which is held"
        )
    return True


def reconcile(
    desired: Desired | None,
    executions: tuple[Progress, ...],
    views: Mapping[str, ModelView],
    conditions: DeviceConditions,
) -> NextSteps:
    """Return the next steps.

    Args:
        desired: the last accepted document, or None.
        executions: executions from the journal.
        views: a dict from model to its state on the device.
        conditions: current conditions of the device.
    """
    before = {progress.report.model: progress for progress in executions}
    if problem := _find_staleness(desired, conditions):
        models = tuple(_describe(view, None) for view in views.values())
        return NextSteps(
            executions=executions, superseded=(), steps=(), models=models, status="stale", because=problem
        )
    assert desired is not None  # noqa: S101  # without one, `_find_staleness` explains
    after, superseded, steps = dict(before), [], []
    for desired_model in sorted(desired.models, key=lambda model: -model.priority):
        view = views.get(desired_model.model) or ModelView(model=desired_model.model)
        progress = before.get(desired_model.model)
        if progress is None or progress.report.execution != desired_model.execution:
            if progress is not None and not progress.has_ended:
                superseded.append(progress.enter("superseded", code="superseded").report)
            progress = _begin(desired_model)
        after[desired_model.model], step = _advance(desired_model, progress, view, conditions)
        if (
            desired_model.order == "unloaded"
            and view.served
            and view.manifest_sha256 != desired_model.manifest_sha256
        ):
            steps.append(Step("unload", desired_model.model, desired_model))  # the served version is not safe
        if step is not None:
            steps.append(step)
    steps += [Step("remove", model) for model in desired.removed if views.get(model, _NOTHING).version]
    by_model = {desired_model.model: desired_model for desired_model in desired.models}
    views_of_models = [view if name in views else ModelView(model=name) for name, view in views.items()]
    views_of_models += [ModelView(model=name) for name in by_model if name not in views]
    models = tuple(
        _describe(view, by_model.get(view.model), after.get(view.model)) for view in views_of_models
    )
    status, because = _judge(models, [after[name] for name in by_model], steps)
    return NextSteps(
        executions=tuple(after.values()),
        superseded=tuple(superseded),
        steps=tuple(steps),
        models=models,
        status=status,
        because=because,
    )


_NOTHING: Final = ModelView(model="")


def _find_staleness(desired: Desired | None, conditions: DeviceConditions) -> str:
    if desired is None:
        return "no desired document was received yet"
    if conditions.now_s > desired.expires_at:
        day = format_utc(conditions.now_s)[:10]  # the time would be news all the time
        return f"desired document {desired.version} has expired, and no newer one has come: here it is {day}"
    return ""


def _begin(desired_model: DesiredModel) -> Progress:
    report = Execution(
        execution=desired_model.execution,
        model=desired_model.model,
        version=desired_model.version,
        state="waiting",
    )
    return Progress(report=report, manifest_sha256=desired_model.manifest_sha256)


def _advance(
    desired_model: DesiredModel, progress: Progress, view: ModelView, conditions: DeviceConditions
) -> tuple[Progress, Step | None]:
    if progress.has_ended:
        return progress, None
    state = progress.report.state
    if progress.age_s > desired_model.timeout_s:
        last = f"{state}: {progress.report.reason}" if progress.report.reason else state
        reason = f"did not end within {desired_model.timeout_s:g} s; was {last}"
        return progress.enter("timed_out", code="timeout", reason=reason), None
    if view.manifest_sha256 == desired_model.manifest_sha256 and view.health != "rejected":
        return _settle(desired_model, progress, view)
    rejection = view.find_rejection(desired_model.manifest_sha256)
    if rejection is not None and (
        state == "trying" or (state == "installing" and not desired_model.is_return)
    ):
        codes = (code for begin, code in _CODES if rejection.startswith(begin))
        return progress.enter("failed", code=next(codes, "rejected"), reason=rejection), None
    if state == "trying":  # it was active, and was not rejected
        reason = f"{view.version or 'nothing'} was made active meanwhile, not by the fleet"
        return progress.enter("failed", code="replaced", reason=reason), None
    return _fetch(desired_model, progress, view, conditions)


def _fetch(
    desired_model: DesiredModel, progress: Progress, view: ModelView, conditions: DeviceConditions
) -> tuple[Progress, Step | None]:
    """Lead an execution from its beginning to the installed package."""
    if progress.age_s < desired_model.not_before_s:
        return progress.enter(
            "waiting", code="jitter", reason=f"begins after {desired_model.not_before_s:g} s"
        ), None
    obstacle = find_obstacle(desired_model, view, conditions, progress.report.done_bytes)
    if obstacle is not None and not obstacle.may_pass:
        return progress.enter("refused", code=obstacle.code, reason=obstacle.reason), None
    if progress.report.sent_bytes > WASTED * desired_model.size_bytes + _WASTED_BYTES:
        reason = f"{progress.report.sent_bytes} bytes came for a package of {desired_model.size_bytes}"
        return progress.enter("failed", code="wasted", reason=reason), None
    is_here = desired_model.sha256 in conditions.downloaded
    if is_here and obstacle is None:
        obstacle = check_window(desired_model.window, conditions)
    if obstacle is not None:
        return progress.enter("waiting", code=obstacle.code, reason=obstacle.reason), None
    action: Action = "install" if is_here else "download"
    state: Literal["installing", "downloading"] = "installing" if is_here else "downloading"
    if progress.report.state != state:
        progress = progress.enter(state)
    if progress.age_s < progress.retry_age_s:
        return progress, None
    return progress, Step(action, desired_model.model, desired_model)


def _settle(desired_model: DesiredModel, progress: Progress, view: ModelView) -> tuple[Progress, Step | None]:
    """Continue an execution whose package is active in the slots until its verdict."""
    is_new = progress.report.state != "trying" or progress.report.code == "installed"
    if view.served is None and not is_new and view.health != "healthy":
        # The service ran and is gone, perhaps because of this version: the slots count that.
        return progress, None
    if view.served is None:  # no service runs it; it was tested at its installation
        return progress.enter("succeeded"), None
    if desired_model.version in view.served:
        if view.on_trial == desired_model.version:
            return progress.enter("trying", code="trial", reason=view.remark), None
        if view.health == "healthy":
            return progress.enter("succeeded"), None
        return progress.enter("trying", code="confirmation", reason="serves, to be confirmed soon"), None
    if is_new:
        progress = progress.enter("trying", code="load")
    if progress.failures >= MAX_LOADS:
        reason = f"the service does not serve it: {progress.report.reason or view.remark}"
        return progress.enter("failed", code="load", reason=reason), None
    if progress.age_s < progress.retry_age_s:
        return progress, None
    return progress, Step("load", desired_model.model, desired_model)


def _describe(
    view: ModelView, desired_model: DesiredModel | None, progress: Progress | None = None
) -> ReportedModel:
    because = "" if desired_model is None else _explain(view, desired_model, progress)
    is_faulty = view.not_finite > 0 and not because
    if is_faulty:
        because = f"{view.version} answered NaN or infinity {view.not_finite} times"
    return ReportedModel(
        model=view.model,
        version=view.version,
        manifest_sha256=view.manifest_sha256,
        health="faulty" if is_faulty else view.health,
        previous=view.previous,
        because=because,
        pinned=view.pinned or "",
    )


def _explain(view: ModelView, desired_model: DesiredModel, progress: Progress | None) -> str:
    """Return why the version in use is not the desired one, or an empty string if it is."""
    if view.manifest_sha256 == desired_model.manifest_sha256 and view.health != "rejected":
        return ""
    rejection = view.find_rejection(desired_model.manifest_sha256)
    if rejection is not None:
        return f"{desired_model.version} was rejected here: {rejection}"
    if view.pinned not in (None, desired_model.version):
        return f"pinned to {view.pinned} by hand"
    if progress is None or progress.report.state == "succeeded":
        return (
            f"{view.version or 'nothing'} was installed in place of {desired_model.version}, not by the fleet"
        )
    report = progress.report
    return f"{desired_model.version} {report.state}{': ' * bool(report.reason)}{report.reason}"


def _judge(
    models: tuple[ReportedModel, ...], executions: list[Progress], steps: list[Step]
) -> tuple[Status, str]:
    under_way = {progress.report.model for progress in executions if not progress.has_ended}
    for model in models:
        if model.because and model.health != "faulty" and model.model not in under_way:
            return "diverged", f"{model.model}: {model.because}"
    if under_way or steps:
        return "working", ""
    return "converged", ""


def choose_step(steps: Sequence[Step], put_off: Collection[tuple[Action, str]]) -> Step | None:
    """Return the most urgent step that is not postponed, or None.

    `put_off` contains the action and the model of each postponed step.
    """
    return next((step for step in steps if (step.action, step.model) not in put_off), None)


def count_time(executions: tuple[Progress, ...], elapsed_s: float) -> tuple[Progress, ...]:
    """Return the executions with `elapsed_s` added to the age of those that have not ended."""
    return tuple(
        progress if progress.has_ended else replace(progress, age_s=progress.age_s + elapsed_s)
        for progress in executions
    )
