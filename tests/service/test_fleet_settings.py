"""The settings of the fleet in the service: what the owner states is not touched."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgekit_runtime.service.api.fleet import FleetHandler
from edgekit_runtime.service.options.config import LogOptions, ServiceConfig
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.options.resources import Power

LOGGER = logging.getLogger("edgekit_runtime")


class Follower:
    def __init__(self, folder: Path, config: ServiceConfig) -> None:
        self.path, self.limits = folder / "settings.json", [config.power]
        self.handler = FleetHandler(self.path, config, self.limits.append)

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.handler.look()


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    level = LOGGER.level
    yield
    LOGGER.setLevel(level)


@pytest.fixture
def governed() -> ServiceConfig:
    from edgekit_runtime.dataclass_json import from_plain

    models = {"m": from_plain(ModelOptions, {"governor": {}})}
    return ServiceConfig(models=models, power=Power(temperature_c=70.0))


def test_limits_follow_the_file_and_go_back_with_it(tmp_path: Path, governed: ServiceConfig) -> None:
    follower = Follower(tmp_path, governed)
    values = {"power-w": "12", "temperature-c": "60", "log-level": "error", "month-mb": "5", "power": "1"}
    follower.write(json.dumps({"settings": values}))
    assert (follower.limits[-1].power_w, follower.limits[-1].temperature_c) == (12.0, 70.0)
    assert LOGGER.level == logging.ERROR
    problems = follower.handler.problems
    assert (problems["power-w"], problems["log-level"]) == ("", "")
    assert "owner has fixed it" in problems["temperature-c"] and "no setting" in problems["power"]
    follower.path.unlink()
    follower.handler.look()
    assert follower.limits[-1] == governed.power and follower.handler.problems == {}


@pytest.mark.parametrize("text", ["{", '{"settings": {"power-w": 12}}', '{"settings": []}', "[" * 9000])
def test_damaged_file_leaves_the_limits(tmp_path: Path, governed: ServiceConfig, text: str) -> None:
    follower = Follower(tmp_path, governed)
    follower.write('{"settings": {"power-w": "12"}}')
    follower.write(text)
    assert follower.limits[-1].power_w == 12.0


def test_level_of_the_configuration_stays(tmp_path: Path) -> None:
    follower = Follower(tmp_path, ServiceConfig(log=LogOptions(level="info")))
    follower.write('{"settings": {"log-level": "debug", "power-w": "12"}}')
    assert "owner has fixed it" in follower.handler.problems["log-level"]
    assert "no model of this device has a governor" in follower.handler.problems["power-w"]
    assert follower.limits[-1].power_w is None
