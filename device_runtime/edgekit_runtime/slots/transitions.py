"""Pure functions that take the state of a model and return the next state.

They depend on the number of starts and not on the time, because a device may start without a clock.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final, TypeAlias

from edgekit_runtime.errors import SlotError
from edgekit_runtime.package.version_order import is_older
from edgekit_runtime.records import dataclass
from edgekit_runtime.slots.state import (
    HEALTHY,
    MAX_REASON_LENGTH,
    MAX_REJECTIONS,
    REJECTED,
    UNPROVEN,
    Installed,
    ModelState,
    Rejection,
)

MAX_BEGUN: Final = 3
"""The number of unconfirmed starts after which a version is rejected."""

_Change: TypeAlias = Callable[[Installed], Installed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """Permissions of an installation, which are all denied by default.

    Attributes:
        pin: Pin the model to the installed version, even if another version is pinned.
        downgrade: Install a version that is older than the current one.
        retry: Install a version that was rejected.
        plain: Install an unencrypted version although an installed version is encrypted.
    """

    pin: bool = False
    downgrade: bool = False
    retry: bool = False
    plain: bool = False


def find_previous(state: ModelState) -> Installed | None:
    """Return the package that becomes current if the current one is rejected, or None.

    The order of preference is a healthy spare package, the factory package, an unproven spare package.
    """
    if state.current is state.factory:
        return None  # there is nothing behind it
    spare = state.spare
    if spare is not None and spare.health == HEALTHY:
        return spare
    if state.factory is not None:
        return state.factory
    return spare if spare is not None and spare.health == UNPROVEN else None


def list_candidates(state: ModelState) -> tuple[Installed, ...]:
    """Return the installed packages in order of preference.

    Rejected packages are last. They are opened only if no other package is intact.
    """
    slots = [item for item in (state.active, state.spare) if item is not None]
    good = [
        *(item for item in slots if item is state.active and item.health != REJECTED),
        *(item for item in slots if item is state.spare and item.health == HEALTHY),
        *(() if state.factory is None else (state.factory,)),
        *(item for item in slots if item is state.spare and item.health == UNPROVEN),
    ]
    return *good, *(item for item in slots if item.health == REJECTED)


def give_up(state: ModelState, counted: Collection[str] = ()) -> ModelState:
    """Return the state after rejecting the unproven versions that were started `MAX_BEGUN` times.

    `counted` contains the manifest digests of versions that are not rejected, because their current start
    may still be confirmed.
    """
    for item in (state.active, state.spare):
        if item is None or item.health != UNPROVEN or item.sha256 in counted:
            continue
        if item.begun >= MAX_BEGUN:
            reason = f"was begun {item.begun} times and never confirmed"
            state = reject(state, item.version, reason)
    return state


def count_start(state: ModelState, version: str) -> ModelState:
    """Return the state with one more start of `version`. Only an unproven version is changed."""
    return _change(state, version, lambda item: replace(item, begun=item.begun + 1), only=(UNPROVEN,))


def undo_start(state: ModelState, version: str) -> ModelState:
    """Return the state with one fewer start of `version`. Only an unproven version is changed."""
    return _change(state, version, lambda item: replace(item, begun=max(0, item.begun - 1)), only=(UNPROVEN,))


def confirm(state: ModelState, version: str) -> ModelState:
    """Return the state in which `version` is healthy. It is unchanged if `version` is not installed.

    A rejected version becomes healthy only if it is current.
    """
    is_current = (
        state.current is state.active and state.active is not None and state.active.version == version
    )
    changed = _change(
        state,
        version,
        lambda item: replace(item, health=HEALTHY, begun=0),
        only=(UNPROVEN, REJECTED) if is_current else (UNPROVEN,),
    )
    if changed == state:
        return state
    proven = {item.sha256 for item in (changed.active, changed.spare) if item and item.health == HEALTHY}
    return replace(changed, rejected=tuple(item for item in state.rejected if item.sha256 not in proven))


def reject(state: ModelState, version: str, reason: str) -> ModelState:
    """Return the state in which `version` is rejected. It is unchanged if `version` is not installed.

    If `version` was active, the package from `find_previous` becomes current. If the model was pinned to
    `version`, it is unpinned.
    """
    failed = next((item for item in state.installed if item.version == version), None)
    if failed is None:
        return state
    others = tuple(item for item in state.rejected if item.sha256 != failed.sha256)
    # A path in a reason may hold what is no text, and a long reason would not fit into the state file.
    text = reason.encode(errors="replace").decode()[:MAX_REASON_LENGTH]
    rejection = Rejection(version=version, sha256=failed.sha256, reason=text)
    previous = find_previous(state)
    state = replace(
        _change(state, version, lambda item: replace(item, health=REJECTED, begun=0)),
        rejected=(*others, rejection)[-MAX_REJECTIONS:],
        pinned=None if state.pinned == version else state.pinned,
    )
    was_active = state.active is not None and state.active.version == version
    if was_active and previous is not None and previous is state.spare:
        return replace(state, active=state.spare, spare=state.active)
    return state


def pin(state: ModelState, pinned: bool) -> ModelState:
    """Return the state with the model pinned to its current version, or unpinned.

    Raises:
        SlotError: Nothing is installed.
    """
    if state.current is None:
        raise SlotError(f"{state.model}: nothing is installed that could be pinned; install a package first")
    return replace(state, pinned=state.current.version if pinned else None)


def add_factory(state: ModelState, new: Installed, allowed: Permissions) -> ModelState:
    """Return the state with `new` as the factory package.

    Raises:
        SlotError: Another factory package is installed, the version was rejected, or the same version has
            another digest. Also raised if an installed package is encrypted, `new` is not, and
            `allowed.plain` is False.
    """
    _check_content(state, new)
    _check_encrypted(state, new, allowed)
    if any(item.sha256 == new.sha256 for item in state.rejected):
        raise SlotError(
            f"{state.model} {new.version}: was rejected here, so it cannot be the factory package"
        )
    if state.factory is not None and state.factory.sha256 != new.sha256:
        raise SlotError(
            f"{state.model}: the factory package is {state.factory.version} and remains; install"
            f" {new.version} without --factory"
        )
    return replace(state, factory=state.factory or replace(new, health=HEALTHY))


def add(state: ModelState, new: Installed, allowed: Permissions) -> ModelState:
    """Return the state with `new` as the active version. It is unproven unless it was confirmed before.

    The other slot keeps a healthy version or, if there is none, an unproven version.

    Raises:
        SlotError: The same version has another digest, or `allowed` does not permit this change. See
            `Permissions`.
    """
    _check_content(state, new)
    _check_allowed(state, new, allowed)
    pinned = new.version if allowed.pin else state.pinned
    rejected = tuple(item for item in state.rejected if item.sha256 != new.sha256)
    if state.factory is not None and state.current is state.factory and state.factory.sha256 == new.sha256:
        return replace(state, pinned=pinned, rejected=rejected)  # it runs from there already
    candidate = next(
        (item for item in (state.active, state.spare) if item and item.sha256 == new.sha256), new
    )
    if candidate.health == REJECTED:
        candidate = replace(candidate, health=UNPROVEN, begun=0)
    candidate = replace(candidate, trial=new.trial, encrypted=new.encrypted)
    others = [item for item in (state.active, state.spare) if item and item.sha256 != new.sha256]
    spare = next((item for item in others if item.health == HEALTHY), None)
    if spare is None:
        spare = next((item for item in others if item.health == UNPROVEN), None)
    return replace(state, active=candidate, spare=spare, pinned=pinned, rejected=rejected)


def _check_content(state: ModelState, new: Installed) -> None:
    records: list[Installed | Rejection] = [*state.installed, *state.rejected]
    for item in records:
        if item.version == new.version and item.sha256 != new.sha256:
            raise SlotError(
                f"{state.model}: version {new.version} is known here with manifest sha256 {item.sha256}, this"
                f" one has {new.sha256}; give a changed package a version of its own"
            )


def _check_allowed(state: ModelState, new: Installed, allowed: Permissions) -> None:
    where = f"{state.model} {new.version}"
    if state.pinned not in (None, new.version) and not allowed.pin:
        raise SlotError(f"{where}: the model is pinned to {state.pinned}; move the pin with --pin, or unpin")
    for item in state.rejected:
        if item.sha256 == new.sha256 and not allowed.retry:
            raise SlotError(f"{where}: was rejected here: {item.reason}; --retry installs it again")
    _check_encrypted(state, new, allowed)
    current = state.current
    if current is not None and is_older(new.version, current.version) and not allowed.downgrade:
        raise SlotError(f"{where}: is older than {current.version}, which is active; see --allow-downgrade")


def _check_encrypted(state: ModelState, new: Installed, allowed: Permissions) -> None:
    if not (new.encrypted or allowed.plain) and any(item.encrypted for item in state.installed):
        raise SlotError(
            f"{state.model} {new.version}: is not encrypted, and an installed version is; see --allow-plain"
        )


def _change(
    state: ModelState, version: str, change: _Change, *, only: tuple[str, ...] = (UNPROVEN, HEALTHY, REJECTED)
) -> ModelState:
    """Return the state with `change` applied to the slots with `version` whose health is in `only`."""

    def changed(item: Installed | None) -> Installed | None:
        applies = item is not None and item.version == version and item.health in only
        return change(item) if item is not None and applies else item

    return replace(state, active=changed(state.active), spare=changed(state.spare))
