"""The agent takes a delta where it can, and the whole file where it cannot."""

import time

import pytest
from tests.agent.site import site, status  # noqa: F401  # fixtures
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_fleet.releases.deltas import make_delta
from edgekit_fleet.releases.repository import NewTarget
from edgekit_runtime.agent.documents import DeltaOffer

pytest.importorskip("zstandard")


def test_delta_saves_bytes_and_a_wrong_one_costs_only_its_own(site):  # noqa: F811
    site.enrol()
    site.start("agent")
    site.want("1.0.0")
    wait_for(lambda: status(site) == ("converged", ["succeeded"]), f"1.0.0; {site.log()}")
    update_by_delta(site, "1.0.0", "2.0.0", is_good=True, metadata_bytes=2500)
    update_by_delta(site, "2.0.0", "3.0.0", is_good=False, metadata_bytes=3000)


def update_by_delta(site, before, version, *, is_good, metadata_bytes):  # noqa: F811
    """Let the device update with a delta, and check how many bytes came."""
    package, _ = site.publish(version)
    old, new = (site.path / f"linear-{name}-x86-64.edgepkg" for name in (before, version))
    suffix, content = make_delta(old.read_bytes(), new.read_bytes())
    source = site.path / f"linear-{version}.from-{before}{suffix}"
    source.write_bytes(content if is_good else content[:-8] + bytes(8))
    (delta,) = site.repository.publish(
        [NewTarget(device_class="x86-64", name=source.name, source=source)], time.time()
    )
    base = site.slots().load("linear").state.current.sha256
    offer = DeltaOffer(from_sha256=base, path=delta.path, size_bytes=delta.size_bytes, sha256=delta.sha256)
    site.want(version, deltas=(offer,))

    def find_sent_bytes():
        report = site.reported()
        has_ended = [execution.state for execution in report.executions] == ["succeeded"]
        is_new = has_ended and [model.version for model in report.models] == [version]
        return report.executions[0].sent_bytes if is_new else 0

    sent_bytes = wait_for(find_sent_bytes, f"{version}; {site.log()}")
    # Beside the metadata, which names all files: the delta, and the whole file only after a wrong delta.
    whole_bytes = 0 if is_good else package.size_bytes
    assert delta.size_bytes + whole_bytes <= sent_bytes < delta.size_bytes + whole_bytes + metadata_bytes
    assert delta.size_bytes < 0.1 * package.size_bytes


def test_first_package_comes_as_a_coded_file(site):  # noqa: F811
    site.enrol()
    package, _ = site.publish("1.0.0")
    _, content = make_delta(b"", (site.path / "linear-1.0.0-x86-64.edgepkg").read_bytes())
    source = site.path / "linear-1.0.0.coded.ekdelta"
    source.write_bytes(content)
    (coded,) = site.repository.publish(
        [NewTarget(device_class="x86-64", name=source.name, source=source)], time.time()
    )
    offer = DeltaOffer(from_sha256="", path=coded.path, size_bytes=coded.size_bytes, sha256=coded.sha256)
    site.start("agent")
    site.want("1.0.0", deltas=(offer,))
    site.wait_status("converged", ["succeeded"])
    wait_for(lambda: site.reported().executions[0].sent_bytes, "its bytes")
    assert coded.size_bytes < 0.5 * package.size_bytes
    # Beside it the first metadata, about 3 kB; the package would be 2 kB more.
    assert coded.size_bytes <= site.reported().executions[0].sent_bytes < coded.size_bytes + 3500


def test_delta_and_whole_file_have_one_budget(site):  # noqa: F811
    site.enrol()
    found, _ = site.publish("2.0.0")
    site.install("1.0.0")
    wrong = site.path / "linear-2.0.0.from-1.0.0.ekdelta"
    wrong.write_bytes(bytes(found.size_bytes - 1))
    (delta,) = site.repository.publish(
        [NewTarget(device_class="x86-64", name=wrong.name, source=wrong)], time.time()
    )
    base = site.slots().load("linear").state.current.sha256
    offer = DeltaOffer(from_sha256=base, path=delta.path, size_bytes=delta.size_bytes, sha256=delta.sha256)
    # Enough for the metadata (2 kB) and one of both files.
    budget_bytes = 2 * found.size_bytes + 1000
    site.start("agent", "--month-mb", str(budget_bytes / 1e6))
    site.want("2.0.0", deltas=(offer,))
    site.wait_status("diverged", ["refused"])
    (execution,) = site.reported().executions
    assert execution.code == "budget"
    assert delta.size_bytes < execution.sent_bytes
    assert [one.version for one in site.reported().models] == ["1.0.0"]
