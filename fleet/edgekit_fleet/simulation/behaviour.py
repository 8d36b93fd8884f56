"""The behaviour of simulated devices and of the versions that they run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBehaviour:
    """The behaviour of a device. The default is a good device on a good link.

    Attributes:
        loss: The probability that a message is lost, 0 to 1. Each lost message also breaks the connection.
        reboot_s: The mean time between reboots, or None for no reboots. A reboot interrupts the current step.
        boot_s: The duration of a reboot.
        clock_s: The number of seconds by which the device's clock is fast, or negative if it is slow.
        bytes_per_s: The download speed.
        install_s: The duration of an installation with its self-test.
        confirm_s: The time until the service confirms a new version.
        trial_s: The duration of a canary or shadow trial of a new version.
        requests_per_s: The call rate of each model.
        latency_ms: The median latency of the device. It is multiplied by `VersionBehaviour.latency`.
        figures_s: The time between two reports of figures.
        free_bytes: The free space on the disk.
        is_mqtt5: Whether the device speaks MQTT 5 instead of 3.1.1.
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
    """The behaviour of a model version on the devices that install it. The default is a good version.

    Attributes:
        install_failures: The share of devices on which the self-test fails.
        crashes: The share of devices on which the version crashes in a loop. The service then rolls back.
        not_finite: The share of devices on which the service sees NaN and rolls back.
        latency: The factor by which `DeviceBehaviour.latency_ms` is multiplied.
        agreement: The mean agreement with the previous version on the same inputs, 0 to 1.
        errors: The share of calls that fail.
    """

    install_failures: float = 0.0
    crashes: float = 0.0
    not_finite: float = 0.0
    latency: float = 1.0
    agreement: float = 0.98
    errors: float = 0.0
