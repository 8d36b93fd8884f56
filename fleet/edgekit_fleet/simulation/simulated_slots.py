"""The simulated slots and service of a device: the versions of its models and their figures."""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgekit_fleet.simulation.behaviour import DeviceBehaviour, VersionBehaviour
from edgekit_runtime.agent.conditions import ModelView
from edgekit_runtime.agent.documents import DesiredModel, ModelFigures


@dataclass(slots=True, kw_only=True)
class _SimulatedModel:
    """A model in the simulated slots. If the service runs `version`, it does so since `served_at`."""

    version: str = ""
    manifest_sha256: str = ""
    health: str = "missing"
    previous: tuple[str, str] = ("", "")
    rejected: list[tuple[str, str]] = field(default_factory=list)
    served_at: float | None = None
    on_trial: str = ""
    remark: str = ""


class SimulatedSlots:
    """The models of one device.

    Attributes:
        downloaded: The SHA-256 of each package that is downloaded but not installed.
    """

    def __init__(self, device: str, versions: Mapping[str, VersionBehaviour], draw: random.Random) -> None:
        """Create slots without models.

        Args:
            device: The name of the device.
            versions: The behaviour of each version. The mapping may change later.
            draw: The random generator for noise on figures.
        """
        self._device, self._versions, self._draw = device, versions, draw
        self._models: dict[str, _SimulatedModel] = {}
        self.downloaded: set[str] = set()

    @property
    def versions(self) -> dict[str, str]:
        """The version that runs for each model."""
        return {name: model.version for name, model in self._models.items()}

    def list_unproven(self) -> list[tuple[str, str]]:
        """Return (model, manifest SHA-256) for each served version that is not confirmed yet."""
        return [
            (name, model.manifest_sha256)
            for name, model in self._models.items()
            if model.served_at is not None and model.health == "unproven"
        ]

    def reboot(self) -> None:
        """Simulate a reboot, which ends all trials."""
        for model in self._models.values():
            model.on_trial = ""

    def remove(self, name: str) -> None:
        self._models.pop(name, None)

    def unload(self, name: str) -> None:
        if name in self._models:
            self._models[name].served_at = None

    def install(self, target: DesiredModel) -> bool:
        """Install a downloaded package. If its self-test fails, keep the old version and return False."""
        model = self._models.setdefault(target.model, _SimulatedModel())
        self.downloaded.discard(target.sha256)
        if self._has(target.version, "install", self._of(target.version).install_failures):
            return False
        if model.version:
            model.previous = (model.version, model.manifest_sha256)
        model.version, model.manifest_sha256 = target.version, target.manifest_sha256
        model.health = "unproven"
        model.rejected = [rejection for rejection in model.rejected if rejection[0] != target.manifest_sha256]
        model.served_at, model.on_trial = None, ""
        return True

    def serve(self, target: DesiredModel) -> bool:
        """Serve the installed version, and return whether it is on trial next to the previous version."""
        model = self._models.setdefault(target.model, _SimulatedModel())
        model.served_at = time.monotonic()
        is_tried = target.trial != "none" and bool(model.previous[0])
        model.on_trial = target.version if is_tried else ""
        model.remark = f"{target.trial} with {model.previous[0]}" if is_tried else ""
        return is_tried

    def judge(self, name: str, manifest_sha256: str) -> bool:
        """End the trial of a version: confirm it, or roll back to the previous version.

        If the version is no longer served, change nothing and return False.
        """
        model = self._models.get(name)
        if model is None or model.manifest_sha256 != manifest_sha256 or model.served_at is None:
            return False
        behaviour = self._of(model.version)
        model.on_trial = model.remark = ""
        reason = ""
        if self._has(model.version, "crash", behaviour.crashes):
            reason = "crash loop: 3 restarts within 60 s"
        elif self._has(model.version, "nan", behaviour.not_finite):
            reason = "not finite: outputs hold NaN"
        if reason:
            model.rejected.append((manifest_sha256, reason))
            old = model.previous
            model.version, model.manifest_sha256, model.previous = *old, ("", "")
            model.health = "healthy" if old[0] else "missing"
            model.served_at = time.monotonic() if old[0] else None
        else:
            model.health = "healthy"
        return True

    def view(self) -> dict[str, ModelView]:
        """Return the models as the agent sees them."""
        return {
            name: ModelView(
                model=name,
                version=model.version,
                manifest_sha256=model.manifest_sha256,
                health=model.health,  # type: ignore[arg-type]
                previous=model.previous[0],
                rejected=tuple(model.rejected),
                served=() if model.served_at is None else (model.version,),
                on_trial=model.on_trial,
                remark=model.remark,
            )
            for name, model in self._models.items()
        }

    def count_figures(self, device: DeviceBehaviour, now_s: float) -> tuple[ModelFigures, ...]:
        """Return the figures of the served versions at the time `now_s` of the monotonic clock."""
        figures = []
        for name, model in self._models.items():
            if model.served_at is None or not model.version:
                continue
            behaviour = self._of(model.version)
            requests = int((now_s - model.served_at) * device.requests_per_s)
            latency_ms = device.latency_ms * behaviour.latency
            agreement = min(1.0, max(0.0, behaviour.agreement + self._draw.uniform(-0.02, 0.02)))
            failed = int(requests * behaviour.errors)
            is_compared = bool(model.previous[0]) and requests > 0
            figures.append(
                ModelFigures(
                    model=name,
                    version=model.version,
                    requests=requests,
                    failed=failed,
                    answer_s=(requests - failed) * latency_ms * 1e-3,
                    p50_ms=latency_ms if requests else None,
                    p99_ms=3 * latency_ms if requests else None,
                    agreement=agreement if is_compared else None,
                    compared=requests if is_compared else 0,
                )
            )
        return tuple(figures)

    def _of(self, version: str) -> VersionBehaviour:
        return self._versions.get(version) or VersionBehaviour()

    def _has(self, version: str, fault: str, share: float) -> bool:
        """Return whether this device is in the share of devices with a fault. The answer never changes."""
        return random.Random(f"{self._device}/{version}/{fault}").random() < share  # noqa: S311
