"""The behaviour of simulated devices and of the versions that they run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBehaviour:
    """The behaviour of a device; the default is a good device on a good link.

    Attributes:
        loss: share of messages that break the connection instead of being sent.
        reboot_s: mean time between reboots, or None. A reboot ends the step that is under way.
        boot_s: duration of a reboot.
        clock_s: seconds by which its clock is ahead of the true time; negative if behind.
        bytes_per_s: speed of downloads.
        install_s, confirm_s, trial_s: duration of an installation with its self-test, of the time until the
            service confirms a version, and of a trial beside the old version.
        requests_per_s: calls of each model.
        latency_ms: median latency of a version whose `latency` is 1.
        figures_s: time between two reports of figures.
        free_bytes: free space on its disk.
        is_mqtt5: whether it speaks MQTT 5, else 3.1.1.
    """

    loss: float = 0.0
    reboot_s: float | None = None
    boot_s: float = 2.0
    clock_s: float = 0.0
    bytes_per_s: float = 10e6
    install_s: float = 0.3
    confirm_s: float = 0.5
    trial_s: float = 2.0
    requests_per_s: float = 20.0
    latency_ms: float = 10.0
    figures_s: float = 10.0
    free_bytes: int = 8 << 30
    is_mqtt5: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionBehaviour:
    """How a version of a model behaves on a device that installs it; the default is a good version.

    Attributes:
        install_failures: share of the devices on which the self-test fails.
        crashes: share of the devices on which it crashes in a loop, so that the service returns to the old
            version.
        not_finite: share of the devices on which the service sees NaN, and returns to the old version.
        latency: factor of the device's `latency_ms`.
        agreement: mean agreement with the old version on the same inputs, 0..1.
        errors: share of the calls that fail.
    """

    install_failures: float = 0.0
    crashes: float = 0.0
    not_finite: float = 0.0
    latency: float = 1.0
    agreement: float = 0.98
    errors: float = 0.0
