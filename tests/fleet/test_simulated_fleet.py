"""Simulated devices over a real mosquitto and the real manager: they converge, and what is bad shows."""

import asyncio
import logging
import random
import socket
import ssl
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.waiting import wait_for

from edgekit_fleet.operations.releases import rotate_keys
from edgekit_fleet.operations.rollouts import StartRollout, find_rollout, start_rollout
from edgekit_fleet.rollouts.runner import RolloutRunner
from edgekit_fleet.simulation.behaviour import DeviceBehaviour, VersionBehaviour
from edgekit_fleet.simulation.enrolment import add_simulated_release, enrol_simulated, read_access
from edgekit_fleet.simulation.simulated_fleet import SimulatedFleet
from edgekit_fleet.simulation.simulated_link import DeviceCounts, SimulatedLink

ALL_NAMES = tuple(f"sim-{number:02}" for number in range(50))  # in the long run
NAMES = ALL_NAMES[:24]
FAST = DeviceBehaviour(install_s=0.05, confirm_s=0.1, figures_s=1.0, requests_per_s=100.0)
LIMIT_S = 120.0
OPTIONS = {"soak_s": 1.0, "patience_s": 5.0}


class Site:
    """A fleet with simulated devices."""

    def __init__(self, fleet, folder, names=NAMES):
        self.fleet = fleet
        fleet.decide = RolloutRunner().turn
        self.members = enrol_simulated(fleet.store, fleet.authority, names, folder)

    def simulate(self, **options):
        names = [member.device for member in self.members]
        behaviours = {**dict.fromkeys(names, FAST), **options.pop("behaviours", {})}
        access = read_access(self.fleet.folder, self.fleet.settings)
        return SimulatedFleet(self.members, access, behaviours=behaviours, connect_within_s=0.5, **options)

    def roll_out(self, version, **changes):
        add_simulated_release(self.fleet.store, version, model="digits", target="x86-64", size_bytes=100_000)
        request = StartRollout(release=version, selector="all", **OPTIONS, **changes)
        return start_rollout(self.fleet.store, request, "test")

    def state(self, rollout):
        return find_rollout(self.fleet.store, rollout).state


@pytest.fixture
def site(fleet, tmp_path):
    logging.getLogger("edgekit_fleet").setLevel(logging.ERROR)
    return Site(fleet, tmp_path / "simulated")


def runs(version):
    return lambda device: device.versions.get("digits", "") == version


def test_rollout_reaches_all_devices_over_mqtt_5_and_3_1_1_and_after_a_cut(site):
    old_protocol = {NAMES[0]: replace(FAST, is_mqtt5=False), NAMES[1]: replace(FAST, loss=0.1)}
    with site.simulate(behaviours=old_protocol) as devices:
        devices.wait_until(lambda device: device.is_online, LIMIT_S, devices=23)
        late = NAMES[6:12]
        devices.cut(late)
        site.roll_out("1.0.0", waves="50%,100%")
        devices.wait_until(runs("1.0.0"), LIMIT_S, devices=12)
        devices.restore(late, within_s=0.5)
        devices.reboot(NAMES[15:18])
        devices.wait_until(lambda device: runs("1.0.0")(device) and device.status == "converged", LIMIT_S)
        assert devices.count(lambda device: device.counts.refused) == 0


def test_devices_that_reboot_before_a_version_is_confirmed_confirm_it_later(site):
    slow = dict.fromkeys(NAMES, replace(FAST, confirm_s=1.0, boot_s=3.0))
    with site.simulate(behaviours=slow) as devices:
        devices.wait_until(lambda device: device.is_online, LIMIT_S)
        site.roll_out("1.0.0", waves="100%", minimum=24)
        devices.wait_until(
            lambda device: any(model.served for model in device.slots.view().values()), LIMIT_S
        )
        devices.reboot(NAMES[:10])
        devices.wait_until(lambda device: device.is_online and device.status == "converged", LIMIT_S)


def test_version_that_crashes_stops_early_and_all_are_back_on_the_old_one(site):
    versions = {"2.0.0": VersionBehaviour(crashes=1.0)}
    with site.simulate(versions=versions) as devices:
        first = site.roll_out("1.0.0", waves="100%", minimum=24)
        devices.wait_until(runs("1.0.0"), LIMIT_S)
        wait_for(lambda: site.state(first) == "succeeded", "the good release")
        second = site.roll_out("2.0.0")
        wait_for(lambda: site.state(second) == "aborted", "the stop")
        devices.wait_until(lambda device: runs("1.0.0")(device) and device.status == "converged", 10)
        members = find_rollout(site.fleet.store, second).members
        assert len(NAMES) - members["waiting"] <= 6  # the first wave has 3, the second ends at 12


@pytest.mark.long
def test_slow_version_stops_at_the_first_devices(fleet, tmp_path):
    site = Site(fleet, tmp_path / "simulated", ALL_NAMES)
    with site.simulate(versions={"2.0.0": VersionBehaviour(latency=2.0)}) as devices:
        first = site.roll_out("1.0.0", waves="100%", minimum=50)
        wait_for(lambda: site.state(first) == "succeeded", "the good release")
        second = site.roll_out("2.0.0", minimum=10)
        wait_for(lambda: site.state(second) == "aborted", "the stop")
        rollout = find_rollout(site.fleet.store, second)
        assert "latency" in rollout.because
        assert 50 - rollout.members["waiting"] <= 20
        devices.wait_until(runs("1.0.0"), 10)


def test_lying_clock_shows_as_stale_and_keeps_the_model(site):
    liar = replace(FAST, clock_s=10 * 365 * 86_400.0)
    with site.simulate(behaviours={NAMES[0]: liar}) as devices:
        site.roll_out("1.0.0", waves="100%", minimum=24)
        devices.wait_until(runs("1.0.0"), LIMIT_S, devices=23)
        assert devices.devices[NAMES[0]].status == "stale"


def test_devices_follow_the_exchange_of_the_managers_key(site):
    with site.simulate() as devices:
        devices.wait_until(lambda device: device.desired is not None, LIMIT_S)
        before = {name: device.desired.version for name, device in devices.devices.items()}
        rotate_keys(site.fleet.folder, site.fleet.store, ("manager",), actor="test")
        devices.wait_until(lambda device: device.desired.version > before[device.name], LIMIT_S)
        site.roll_out("1.0.0", waves="100%")
        devices.wait_until(runs("1.0.0"), LIMIT_S)
        assert sum(device.counts.refused for device in devices.devices.values()) == 0


def test_link_that_is_closed_while_it_opens_ends_its_connection():
    owner = SimpleNamespace(name="sim", behaviour=FAST, counts=DeviceCounts(), lose_report=lambda: None)

    async def close_while_it_opens(address):
        context, key = ssl.create_default_context(), Ed25519PrivateKey.generate()
        link = SimulatedLink(owner, (address,), context, key, random.Random(0))
        link.open(0.0)
        for _ in range(2):  # turns of the loop, in which it begins to connect
            await asyncio.sleep(0)
        link.close("off")
        await asyncio.wait_for(link.wait_ended(), LIMIT_S)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(close_while_it_opens(listener.getsockname()))
    assert owner.counts.connects == 0
