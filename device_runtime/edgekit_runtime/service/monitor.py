"""A timer that judges trials, updates metrics, measures energy and runs the governor.

It runs once a second by default. A separate thread reads the sensors (`power.sensors.sampling`). The timer
only uses the latest readings, so a sensor that hangs does not delay requests.
"""

import logging
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.power.sensors.readings import Readings
from edgekit_runtime.service.observability.metrics import ServiceMetrics
from edgekit_runtime.service.options.resources import Power
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.system.resource_errors import check_descriptors, is_lack

if TYPE_CHECKING:
    from edgekit_runtime.power.governor.governor import Governor
    from edgekit_runtime.power.sensors.discovery import Sensors
    from edgekit_runtime.power.sensors.energy_meter import EnergyMeter, Work
    from edgekit_runtime.power.sensors.sampling import Sampling
    from edgekit_runtime.service.governor.profile import GovernedModel
    from edgekit_runtime.service.models.catalogue import Catalogue

_NO_READINGS: Final = Readings(at_s=float("-inf"))

_logger = logging.getLogger(__name__)


class Monitor:
    """Regularly judges trials, updates metrics, measures the energy of each model and runs the governor."""

    def __init__(
        self,
        models: "Catalogue",
        metrics: ServiceMetrics,
        power: Power,
        loop: AbstractEventLoop,
        follow_fleet: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the timer.

        Args:
            models: The models whose trials, energy and settings are managed.
            metrics: The metrics to which power, energy and temperature are written.
            power: The options of sensors and limits.
            loop: The event loop on which the timer runs.
            follow_fleet: Starts and stops the streams that the fleet orders.
        """
        self._models, self._metrics, self._power, self._loop = models, metrics, power, loop
        self._follow_fleet = follow_fleet
        self._sensors: Sensors | None = None
        self._sampling: Sampling | None = None
        self._meter: EnergyMeter | None = None
        self._governor: Governor | None = None
        self._begun_s = time.monotonic()
        self._has_searched = False
        self._work: dict[str, Work] = {}
        self._timer = loop.call_later(power.period_s, self._tick)

    def limit_power(self, power: Power) -> None:
        """Replace the power limits. Running requests are not affected."""
        self._power = power
        if self._governor is not None:
            self._governor.limits = power.limits(self._begun_s)

    def stop(self) -> None:
        """Stop the timer and the reading of sensors. The object cannot be used afterwards."""
        self._timer.cancel()
        if self._sampling is not None:
            self._sampling.stop()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._power.period_s, self._tick)
        try:
            self._check()
        except OSError as cause:  # modules are imported when they are needed first, which takes a descriptor
            if not is_lack(cause):
                raise
            _logger.warning("limits and trials are not checked now: %s", cause)

    def _check(self) -> None:
        if not self._has_searched:
            # At the first tick, not at the start: the first answer does not need sensors.
            self._has_searched = True
            try:
                self._find_sensors()
            except (OSError, UnavailableError) as cause:
                if isinstance(cause, OSError) and not is_lack(cause):
                    raise
                self._has_searched = False  # limits and trials go on without sensors until then
                _logger.warning("no sensor is read now: %s", cause)
        self._models.judge_trials()
        self._follow_fleet()
        now_s = time.monotonic()
        readings = _NO_READINGS if self._sampling is None else self._sampling.latest
        served = self._models.served()
        if self._sensors is not None:
            self._update_metrics(self._sensors, readings)
        if self._meter is not None:
            self._share_out(self._meter, readings, served)
        governed = {_key(version): version.governed for version in served if version.governed is not None}
        if governed or self._governor is not None:
            self._govern(governed, readings, now_s)

    def _govern(self, governed: "Mapping[str, GovernedModel]", readings: Readings, now_s: float) -> None:
        """Pass the observations of the models to the governor, and apply its decisions."""
        if self._governor is None:
            from edgekit_runtime.power.governor.governor import Governor

            self._governor = Governor(self._power.limits(self._begun_s), self._power.idle_w)
        observations = {name: model.see(now_s) for name, model in governed.items()}
        for name, decision in self._governor.tick(now_s, readings, observations).items():
            governed[name].lane.follow(decision)

    def _find_sensors(self) -> None:
        if not self._power.sensors:
            _warn_of_limits(self._power, None)
            return
        check_descriptors("sensors cannot be looked for")  # else it would find none
        from edgekit_runtime.power.sensors.discovery import discover
        from edgekit_runtime.power.sensors.sysfs import SYSFS_ROOT, Sysfs

        is_own = self._power.sysfs == str(SYSFS_ROOT)
        sensors = discover() if is_own else discover(Sysfs(Path(self._power.sysfs)))
        _warn_of_limits(self._power, sensors)
        if not sensors.probes:
            _logger.info("no sensors of power, heat or battery here")
            return
        from edgekit_runtime.power.sensors.energy_meter import EnergyMeter
        from edgekit_runtime.power.sensors.sampling import Sampling

        self._sampling = Sampling(sensors, self._power.period_s)
        self._sampling.start()
        self._sensors = sensors
        if sensors.source is not None:
            self._meter = EnergyMeter()

    def _update_metrics(self, sensors: "Sensors", readings: Readings) -> None:
        """Set the metrics of the sensors to the latest readings. A sensor without a reading has no metric."""
        from edgekit_runtime.power.sensors.raspberry import NOW

        metrics = self._metrics
        metrics.power_w.clear()
        metrics.temperature_c.clear()
        for probe in sensors.probes:
            value = readings.values.get(probe.name)
            if value is None:
                continue
            if probe.quantity == "temperature_c":
                metrics.temperature_c[probe.name,] = value
            elif probe.quantity in ("power_w", "discharge_w"):
                metrics.power_w[probe.name,] = value
        if readings.power_w is not None:
            metrics.power_w["device",] = readings.power_w
        battery, bits = readings.battery, readings.throttle_bits
        document = {
            "edgekit_battery_charge_ratio": None if battery is None else battery.charge,
            "edgekit_throttled": None if bits is None else float(bits & NOW != 0),
            "edgekit_clock_cap_ratio": readings.clock_share,
        }
        metrics.device = {name: value for name, value in document.items() if value is not None}

    def _share_out(self, meter: "EnergyMeter", readings: Readings, served: list[Served]) -> None:
        """Distribute the energy since the last readings over the versions, in proportion to their work."""
        shares = meter.add(readings, self._count(served))
        for version in served:
            name, key = version.loaded.manifest.name, _key(version)
            if key in shares:
                self._metrics.energy_j[(name,)] += shares[key].joules
            request_j = meter.request_j(key)
            if request_j is not None:
                self._metrics.request_energy_j[name, version.version] = request_j
            trial = version.trial
            if trial is not None and version is trial.candidate and key in shares:
                current = shares.get(_key(trial.current))
                if current is not None:
                    trial.runner.add_energy(shares[key].per_request_j, current.per_request_j)

    def _count(self, served: list[Served]) -> "dict[str, Work]":
        """Return the work of each version since the last call, by its key."""
        from edgekit_runtime.power.sensors.energy_meter import Work

        before, self._work = self._work, {}
        for version in served:
            busy_s = sum(run.infer_s for run in version.metrics.runs.values())
            self._work[_key(version)] = Work(busy_s, version.metrics.succeeded + version.metrics.failed)
        work = {}
        for key, now in self._work.items():
            old = before.get(key)
            if old is None or now.requests < old.requests:  # loaded again
                old = Work(0.0, 0)
            work[key] = Work(max(0.0, now.busy_s - old.busy_s), now.requests - old.requests)
        return work


def _warn_of_limits(power: Power, sensors: "Sensors | None") -> None:
    """Warn about limits on quantities that no sensor of this device measures."""
    quantities = set() if sensors is None else {probe.quantity for probe in sensors.probes}
    if power.power_w is not None and (sensors is None or sensors.source is None):
        _logger.warning("no power sensor: power_w is kept by estimates alone")
    if power.temperature_c is not None and "temperature_c" not in quantities:
        _logger.warning("no temperature sensor: temperature_c has no effect")
    if power.battery_floor is not None and "charge" not in quantities:
        _logger.warning("no battery sensor: battery_floor has no effect")


def _key(served: Served) -> str:
    return f"{served.loaded.manifest.name}/{served.version}"
