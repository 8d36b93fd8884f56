"""Fake trees of `/sys`, as the boards have them."""

from pathlib import Path


class Tree:
    """A folder of attributes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, value: object) -> Path:
        """Write one attribute whole, with the line feed that the kernel ends it with."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        new = self.root / "new"
        new.write_text(f"{value}\n")
        return new.replace(file)

    def rail(
        self, channel: int, label: str, millivolts: int, milliamperes: int, hwmon: str = "hwmon3"
    ) -> None:
        """Write one rail of an INA3221 behind the kernel's driver."""
        folder = f"class/hwmon/{hwmon}"
        self.write(f"{folder}/name", "ina3221")
        self.write(f"{folder}/in{channel}_label", label)
        self.write(f"{folder}/in{channel}_enable", 1)
        self.write(f"{folder}/in{channel}_input", millivolts)
        self.write(f"{folder}/curr{channel}_input", milliamperes)

    def zone(self, number: int, label: str, millidegrees: int) -> None:
        """Write one thermal zone."""
        self.write(f"class/thermal/thermal_zone{number}/type", label)
        self.write(f"class/thermal/thermal_zone{number}/temp", millidegrees)

    def counter(self, zone: str, label: str, microjoules: int, range_uj: int = 262_143_328_850) -> None:
        """Write one RAPL domain."""
        self.write(f"class/powercap/{zone}/name", label)
        self.write(f"class/powercap/{zone}/energy_uj", microjoules)
        self.write(f"class/powercap/{zone}/max_energy_range_uj", range_uj)

    def battery(self, **attributes: object) -> None:
        """Write a battery."""
        for name, value in {"type": "Battery", "status": "Discharging", **attributes}.items():
            self.write(f"class/power_supply/BAT0/{name}", value)
