"""Encrypted releases of a real manager on a device whose agent and service are processes."""

import pytest
from tests.agent.site import Site
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.runtime.encryption_parts import find_plaintext, make_heavy
from tests.waiting import wait_for

from edgekit_fleet.operations import devices, releases, rollouts
from edgekit_fleet.operations.rollouts import StartRollout
from edgekit_fleet.rollouts.runner import RolloutRunner
from edgekit_runtime.encryption.container import is_encrypted

pytest.importorskip("onnxruntime")


class EncryptedSite(Site):
    """A device of a fleet that rolls releases out."""

    def __init__(self, fleet, maker, path, name="d1"):  # noqa: F811
        fleet.decide = RolloutRunner().turn
        heavy, self.secret = make_heavy(maker)
        super().__init__(fleet, heavy, path, name)

    def release(self, version, **options):
        paths = [self.make(version)[0]]
        named = {"actor": "test", "name": f"v{version}", **options}
        return releases.make_release(self.fleet.folder, self.fleet.store, self.maker.trust, paths, **named)

    def roll_out(self, version):
        request = StartRollout(release=f"v{version}", selector="all", waves="100%", soak_s=0.0)
        name = rollouts.start_rollout(self.fleet.store, request, "test")
        self.wait_version(version)
        wait_for(lambda: rollouts.find_rollout(self.fleet.store, name).ended_at, f"the end; {self.log()}")
        return name

    def wait_version(self, version):
        def runs():
            report = self.reported()
            return report.status == "converged" and [model.version for model in report.models] == [version]

        wait_for(runs, f"{version}; {self.log()} {self.fleet.detail(self.name).why}")

    def list_packages(self):
        return sorted((self.home / "state" / "models" / "linear").glob("*.edgepkg"))

    def find_plain(self):
        """Return where the weights lie plain: on the device, or in what its fleet offers."""
        folders = (self.home, self.path / "run", self.fleet.folder.repository)
        return [place for folder in folders for place in find_plaintext(folder, self.secret)]


@pytest.fixture
def site(fleet, maker, tmp_path):  # noqa: F811
    site = EncryptedSite(fleet, maker, tmp_path)
    try:
        site.enrol()
        site.start("agent")
        wait_for(site.reported, "the first report")
        yield site
    finally:
        site.end()


def test_encrypted_release_is_served_updated_by_a_delta_and_rolled_back(site):
    site.release("1.0.0", encrypt=True)
    site.roll_out("1.0.0")
    site.serve()
    wait_for(lambda: site.served() == [("1.0.0", "READY", "")], f"1.0.0 served; {site.log()}")
    site.release("2.0.0", encrypt=True)
    name = site.roll_out("2.0.0")
    wait_for(lambda: [line[0] for line in site.served()] == ["2.0.0"], f"2.0.0 served; {site.log()}")
    (execution,) = site.reported().executions
    assert 0 < execution.sent_bytes < 0.5 * site.list_packages()[0].stat().st_size  # by the delta
    assert len(site.list_packages()) == 2 and all(map(is_encrypted, site.list_packages()))
    assert site.find_plain() == []
    rollouts.give_order(site.fleet.store, name, "abort", "test")
    site.wait_version("1.0.0")
    devices.revoke(site.fleet.store, "d1", "test", "stolen")
    site.release("3.0.0", encrypt=True)
    wait_for(lambda: "revoked" in site.run("fleet", "status"), "the refusal")
    assert site.find_plain() == [] and not [path for path in site.list_packages() if "3.0.0" in path.name]
