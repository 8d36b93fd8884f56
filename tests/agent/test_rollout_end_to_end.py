"""Rollouts by a real manager, over a real broker, to agents that are processes."""

import dataclasses

import numpy as np
import pytest
from tests.agent.site import Site
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_fleet.operations import releases, rollouts
from edgekit_fleet.operations.rollouts import StartRollout
from edgekit_fleet.rollouts.runner import RolloutRunner
from edgekit_fleet.store.tables import WantedModelRow

pytest.importorskip("onnxruntime")

DEVICES = 2


@pytest.fixture
def sites(fleet, maker, tmp_path):  # noqa: F811
    fleet.decide = RolloutRunner().turn
    sites = [Site(fleet, maker, tmp_path / f"d{number}", f"d{number}") for number in range(DEVICES)]
    try:
        for site in sites:
            site.enrol()
            site.start("agent")
        wait_for(lambda: all(site.reported() for site in sites), "the first reports")
        yield sites
    finally:
        for site in sites:
            site.end()


def release(fleet, maker, path, version):  # noqa: F811
    """Make a release of a package, and roll it out; returns the name of the rollout."""
    package = path / f"linear-{version}-x86-64.edgepkg"
    maker.write(package, version=version)
    releases.make_release(fleet.folder, fleet.store, maker.trust, [package], actor="test", name=f"v{version}")
    limits = rollouts.RolloutLimits(max_failed_share=0.01)
    request = StartRollout(
        release=f"v{version}", selector="all", waves="1,100%", minimum=1, soak_s=0.0, limits=limits
    )
    return rollouts.start_rollout(fleet.store, request, "test")


def wait_ended(fleet, name):  # noqa: F811
    found = wait_for(
        lambda: (one := rollouts.find_rollout(fleet.store, name)).ended_at is not None and one, name, 240
    )
    assert rollouts.replay_rollout(fleet.store, name) == []
    return found


def versions(sites):
    return [[model.version for model in site.reported().models] for site in sites]


def test_good_release_reaches_all_and_bad_one_stops_and_goes_back(fleet, maker, sites, tmp_path):  # noqa: F811
    good = release(fleet, maker, tmp_path, "1.0.0")
    found = wait_ended(fleet, good)
    assert (found.state, found.members, found.wave) == ("succeeded", {"succeeded": DEVICES}, 2)
    wait_for(lambda: versions(sites) == [["1.0.0"]] * DEVICES, f"1.0.0 on all; {versions(sites)}")

    wrong = np.frombuffer(maker.artifacts["golden/y.bin"], np.float32) + 1
    broken = dataclasses.replace(maker, artifacts={**maker.artifacts, "golden/y.bin": wrong.tobytes()})
    found = wait_ended(fleet, release(fleet, broken, tmp_path, "2.0.0"))
    assert found.state == "aborted" and "failed to install it" in found.because
    assert found.members == {"returned": 1, "waiting": DEVICES - 1}
    wait_for(lambda: sum(map(has_returned, sites)) == 1, "the first device to go back")
    assert versions(sites) == [["1.0.0"]] * DEVICES

    rollouts.give_order(fleet.store, good, "abort", "test", note="customers complain")
    wait_for(lambda: versions(sites) == [[]] * DEVICES, f"no model; {versions(sites)}")


def has_returned(site):
    """Whether the device has carried out an order to go back to what it ran."""
    with site.fleet.store.transaction() as session:
        wanted = session.get(WantedModelRow, (site.name, "linear")).document
    done = [one.execution for one in site.reported().executions if one.state == "succeeded"]
    return bool(wanted["is_return"]) and wanted["execution"] in done
