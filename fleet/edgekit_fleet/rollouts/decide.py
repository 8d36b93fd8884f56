"""Decides what a rollout does next, as a pure function of its progress and the time.

The rules are, in this order: an abort by a user, a stop by an outside judge, the gates, a pause, retries, the
quorum of the current step, the next step of the wave, evidence of outside judges that the rollout waits for,
and the next wave. Each decision is a sentence with the figures behind it.

A good release for 1,000 devices, in waves that end at 10, 100, 500 and 1,000, with 10 devices first:

    start 10, wave 1        "the first devices"
    wait                    "7 of 10 devices are judged and 9 are needed", since the quorum is 0.9
    start 10, wave 2        "wave 1 passed, 10 of 10 devices are judged", so 20 may have the release
    start 20, wave 2        20 devices are judged, so 40 may have the release
    start 40, wave 2        40 devices are judged, so 80 may have the release
    start 20, wave 2        80 devices are judged, and wave 2 ends at 100 devices
    start 100, wave 3       each further step also at most doubles the devices that have the release
    succeed                 all devices that answer are judged, and offline devices follow when they return

If the gates are against the release in any turn, the decision is `abort`, and every device that has the
release is rolled back.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from edgekit_fleet.rollouts.gates import Judgement, judge_samples
from edgekit_fleet.rollouts.progress import TRANSIENT_CODES, Decision, Member, Progress, RolloutSettings

EXPOSED_STATES: Final = ("started", "succeeded", "failed", "refused", "superseded")
"""States of devices that were told to run the release, even if they do not run it. An abort takes them back.

A device with several models can run some of them although one was refused.
"""
_MOST_RETURNS: Final = 3
"""How often a device is told to return to its old version if that fails."""
_RETURN_PAUSE_S: Final = 60.0
_RETURN_PATIENCE_S: Final = 3600.0
"""A device that does not answer for this time counts as offline. It returns when it is online again."""
_QUORUM: Final = 0.9
"""The share of the started devices that must be judged before more are started. Silent devices do not
count."""
_LEANING: Final = 0.1
"""If the evidence reaches this share of what a stop needs, it leans against the release."""
_MOST_SUSPECTED: Final = 30
"""The most devices that get a release while the evidence leans against it, unless the rollout's minimum is
larger."""
_SMALL_FLEET: Final = 10
"""In a rollout to at most this many devices, no wave passes while the evidence leans against the release."""


def decide(progress: Progress, now: float) -> Decision | None:
    """Return the next decision, or None if there is nothing to decide.

    After an abort, the only possible action is `return`. It tells devices that failed to roll back to try
    again. `now` is in seconds since 1970.
    """
    if progress.state == "aborted":
        return _return_again(progress, now)
    if progress.wants_abort is not None:  # also after a rollout that has ended well
        return _abort(progress, f"{progress.wants_abort} aborted the rollout", {})
    if progress.state == "succeeded":
        return None
    for finding in progress.outside.values():
        if finding.outcome == "stop":
            return _abort(progress, finding.sentence, _count_exposed(progress, finding.figures))
    models = sorted(progress.settings.models)
    judgement = judge_samples(progress.samples(now), progress.settings.limits, models)
    if (verdict := judgement.verdict) is not None:
        return _abort(progress, verdict.sentence, _count_exposed(progress, verdict.figures))
    if progress.state == "paused":
        sentence = progress.pause.sentence if progress.pause else "paused by order; resume it"
        return Decision(action="wait", wave=progress.wave, sentence=sentence)
    return _retry(progress) or _go_on(progress, judgement, now)


def is_judged(member: Member, settings: RolloutSettings, now: float) -> bool:
    """Return True if no more evidence is expected of a device.

    This is the case if the device has failed or was refused, if each of its models has answered enough calls,
    or if it has had the release for `soak_s` seconds. `now` is in seconds since 1970.
    """
    if member.state in ("pending", "started"):
        return False
    if member.state != "succeeded" or (member.sample is not None and member.sample.fault):
        return True
    if member.sample is not None and member.sample.measures:
        models = [
            name
            for name, settings_of_model in settings.models.items()
            if member.device_class in settings_of_model.classes
        ]
        if all((model, 0) in member.sample.measures for model in models):
            return True
    return now - member.answered_at >= settings.soak_s


def is_returning(progress: Progress, now: float) -> bool:
    """Return True if devices are rolling back, or will be ordered again to roll back.

    `now` is in seconds since 1970.
    """
    return any(
        _will_return_again(member)
        or (member.state == "returning" and now - member.started_at < _RETURN_PATIENCE_S)
        for member in progress.members.values()
    )


def describe_return(stop: Decision, members: Iterable[Member]) -> str:
    """Return a sentence with the reason for an abort, and the number of devices that have not rolled back."""
    recalled = [member for member in members if member.returns]
    silent = sum(member.state == "returning" for member in recalled)
    codes = Counter(member.code for member in recalled if member.state not in ("returning", "returned"))
    sentence = stop.sentence
    if silent:
        sentence += f"; {_count(silent, 'has', 'have')} not answered to that yet"
    if codes:
        by_code = ", ".join(f"{code or 'no reason'}: {count}" for code, count in sorted(codes.items()))
        sentence += f"; {_count(codes.total(), 'has', 'have')} not gone back ({by_code})"
    return sentence


def _will_return_again(member: Member) -> bool:
    return member.state in ("failed", "refused") and 0 < member.returns < _MOST_RETURNS


def _return_again(progress: Progress, now: float) -> Decision | None:
    devices = tuple(
        device
        for device, member in progress.members.items()
        if _will_return_again(member) and now - member.answered_at >= _RETURN_PAUSE_S
    )
    if not devices:
        return None
    sentence = f"{_count(len(devices), 'is', 'are')} told again to go back"
    figures = {"devices": len(devices)}
    return Decision(action="return", wave=progress.wave, devices=devices, sentence=sentence, figures=figures)


def _abort(progress: Progress, reason: str, figures: Mapping[str, float]) -> Decision:
    """Take back all devices that have the release or may still get it."""
    devices = tuple(device for device, member in progress.members.items() if member.state in EXPOSED_STATES)
    return Decision(
        action="abort",
        wave=progress.wave,
        devices=devices,
        sentence=f"stopped, and {_count(len(devices), 'goes', 'go')} back: {reason}",
        figures=figures,
    )


def _count_exposed(progress: Progress, figures: Mapping[str, float]) -> dict[str, float]:
    return {**figures, "exposed": progress.started, "devices": len(progress.members)}


def _retry(progress: Progress) -> Decision | None:
    failed = {
        device: member.code
        for device, member in progress.members.items()
        if member.state == "failed"
        and member.code in TRANSIENT_CODES
        and member.attempts <= progress.settings.retries
    }
    if not failed:
        return None
    codes = ", ".join(sorted(set(failed.values())))
    return Decision(
        action="retry",
        wave=progress.wave,
        devices=tuple(failed),
        sentence=f"{_count(len(failed), 'tries', 'try')} again after a failure that may pass ({codes})",
        figures={"devices": len(failed)},
    )


def _go_on(progress: Progress, judgement: Judgement, now: float) -> Decision:
    settings, started = progress.settings, progress.started
    if started == 0:
        return _start(progress, 0, settings.minimum, "the first devices")
    judged = silent = untried = 0
    for member in progress.members.values():
        untried += member.is_untried
        judged += is_judged(member, settings, now)
        silent += member.state == "started" and now - member.started_at >= settings.patience_s
    is_all = started == len(progress.members)
    # A person who resumes a doubtful rollout accepts the doubt for twice as many devices.
    is_leaning = judgement.leaning >= _LEANING and started >= 2 * progress.resumed_with
    quorum = 1.0 if is_all or is_leaning else _QUORUM
    needed = max(math.ceil(quorum * (started - silent)), 1)
    figures: dict[str, float] = {"judged": judged, "started": started, "needed": needed, "silent": silent}
    state = f"{judged} of {started} devices are judged"
    # Silent devices of the first step are replaced, at most once each: they may all come back together.
    replaced_at_most = settings.minimum + min(silent, settings.minimum)
    if started < min(replaced_at_most, progress.wave_end) and not is_leaning:
        return _start(progress, progress.wave, replaced_at_most, f"{state}, and {silent} do not answer")
    if judged < needed:
        return _wait(progress, now, f"{state} and {needed} are needed", figures)
    running = _count_running(progress)
    if judged == started and is_leaning and running == 0:
        reason = f"{state}, and none runs the release well: {judgement.suspicion}"
        return _abort(progress, reason, figures)
    tried = judged - untried
    most = 2 * tried + silent if tried >= settings.minimum else max(2 * tried, replaced_at_most)
    most += untried
    is_small = len(progress.members) <= _SMALL_FLEET
    if is_leaning and (not is_all or (is_small and running < judged)):
        if started >= (progress.wave_end if is_small else max(settings.minimum, _MOST_SUSPECTED)):
            doubt = f"paused: {judgement.suspicion}: too few to stop it; look at them, then resume or abort"
            return Decision(
                action="pause", wave=progress.wave, sentence=doubt, figures=figures, is_doubt=True
            )
        most = min(most, judged + silent + max(settings.minimum // 5, 1))
    if started >= progress.wave_end and (awaited := progress.list_awaited(now)):
        sentence = f"{state}, and evidence of outside judges is awaited: {', '.join(awaited)}"
        return Decision(action="wait", wave=progress.wave, sentence=sentence, figures=figures)
    if progress.wave < len(settings.waves) - 1 and started >= progress.wave_end:
        figures["wave"] = progress.wave
        if most > started:
            return _start(progress, progress.wave + 1, most, f"wave {progress.wave + 1} passed, {state}")
    elif started >= progress.wave_end:
        return _finish(progress, judged, state, {**figures, "running": running})
    elif most > started:
        return _start(progress, progress.wave, most, f"{state} and nothing is shown against the release")
    return _wait(progress, now, f"{state}, and more must be before the next are started", figures)


def _wait(progress: Progress, now: float, state: str, figures: Mapping[str, float]) -> Decision:
    """Wait for answers, or pause if they have not come for too long."""
    settings = progress.settings
    if now - progress.step_at < settings.step_timeout_s:
        return Decision(action="wait", wave=progress.wave, sentence=state, figures=figures)
    hours = settings.step_timeout_s / 3600
    sentence = f"paused: after {hours:.0f} h {state}; look at the others, then resume"
    return Decision(action="pause", wave=progress.wave, sentence=sentence, figures=figures)


def _start(progress: Progress, wave: int, most: int, reason: str) -> Decision:
    """Start the next devices of a wave, so that at most `most` are started in all."""
    settings = progress.settings
    needs_approval = settings.approval == "each" or (settings.approval == "first" and wave == 0)
    if needs_approval and progress.approved <= wave:
        return Decision(
            action="ask",
            # The number of the wave to approve, so that an approval opens it.
            wave=wave,
            sentence=f"wave {wave + 1} of {len(settings.waves)} waits for an approval",
        )
    waves = settings.waves
    end = len(progress.members) if wave >= len(waves) - 1 else min(waves[wave], len(progress.members))
    pending = [device for device, member in progress.members.items() if member.state == "pending"]
    devices = tuple(pending[: max(min(most, end) - progress.started, 0)])
    total = progress.started + len(devices)
    return Decision(
        action="start",
        wave=wave,
        devices=devices,
        sentence=f"wave {wave + 1} of {len(waves)}: {len(devices)} more devices, {total} of"
        f" {len(progress.members)} in all: {reason}",
        figures={"started": total, "devices": len(progress.members)},
    )


def _finish(progress: Progress, judged: int, state: str, figures: Mapping[str, float]) -> Decision:
    """End the rollout, with success if at least one device runs the release."""
    running = int(figures["running"])
    codes = Counter(member.code for member in progress.members.values() if member.is_untried)
    untried = ""
    if codes:
        by_code = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
        untried = f"{_count(codes.total(), 'has', 'have')} not tried it ({by_code})"
    bad = judged - running - codes.total()
    if running == 0:
        reason = "and none runs the release well" if bad else "which says nothing about the release"
        return _abort(progress, ", ".join(filter(None, (state, untried, reason))), figures)
    conclusion = "nothing is shown against the release"
    if bad > 0:
        conclusion = f"{_count(bad, 'does', 'do')} not run the release well, too few to stop it"
    conclusion = "; ".join(filter(None, (conclusion, untried)))
    followers = f"; {progress.started - judged} others follow when they answer" * (judged < progress.started)
    return Decision(
        action="succeed",
        wave=progress.wave,
        sentence=f"done: {state} and {conclusion}{followers}",
        figures=figures,
    )


def _count_running(progress: Progress) -> int:
    """Return how many devices have the release, and have shown no fault with it."""
    return sum(
        member.state == "succeeded" and not (member.sample and member.sample.fault)
        for member in progress.members.values()
    )


def _count(devices: int, singular: str, many: str) -> str:
    return f"1 device {singular}" if devices == 1 else f"{devices} devices {many}"
