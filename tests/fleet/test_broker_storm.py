"""A broker that dies while simulated devices wait for a release."""

import logging
import os
import signal

from tests.fleet.test_simulated_fleet import LIMIT_S, Site, runs
from tests.waiting import wait_for


def test_broker_that_dies_under_its_devices_loses_no_desired_state(fleet, tmp_path, is_long):
    count = 300 if is_long else 40
    logging.getLogger("edgekit_fleet").setLevel(logging.CRITICAL)
    site = Site(fleet, tmp_path / "simulated", tuple(f"sim-{number:03}" for number in range(count)))
    with site.simulate() as devices:
        devices.wait_until(lambda device: device.is_online and device.desired is not None, LIMIT_S)
        rollout = site.roll_out("1.0.0", waves="100%", minimum=count)
        os.kill(fleet.fleet.broker.pid, signal.SIGKILL)
        devices.wait_until(lambda device: runs("1.0.0")(device) and device.is_online, LIMIT_S)
        wait_for(lambda: site.state(rollout) == "succeeded", "the rollout")
        assert devices.count(lambda device: device.counts.connects == 2) == count
