"""Ways in which a device leaves its fleet, and what the device and the fleet say about each."""

import json
import shutil
import signal

import pytest
from tests.agent.site import Site, site  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_fleet.operations import devices

pytest.importorskip("onnxruntime")


def start_online(site):  # noqa: F811
    agent = site.start("agent")
    wait_for(lambda: site.fleet.detail(site.name).summary.is_online, f"the hello; {site.log()}")
    return agent


def wait_for_words(read, *words):
    """Wait until a text holds all words, and show the last text if it does not."""
    texts = [""]

    def has_words():
        texts[0] = read()
        return all(word in texts[0] for word in words)

    try:
        wait_for(has_words, str(words))
    except AssertionError as error:
        raise AssertionError(f"{error}, not in: {texts[0]}") from error


def test_agent_that_is_stopped_in_order_is_offline_at_once(site):  # noqa: F811
    site.enrol()
    for number in (signal.SIGTERM, signal.SIGINT):
        agent = start_online(site)
        wait_for_words(lambda: site.run("fleet", "status"), "\n  connected since 20", "UTC")
        agent.send_signal(number)
        assert agent.wait(20) == 0
        wait_for(lambda: not site.fleet.detail(site.name).summary.is_online, "the goodbye")
    assert "(offline; last seen" in site.fleet.detail(site.name).why
    assert "no agent runs; the fleet was last reached at 20" in site.run("fleet", "status")
    shown = json.loads(site.run("fleet", "status", "--json"))
    assert (shown["agent_runs"], shown["link"]["problem"]) == (False, "")


def test_device_that_left_its_fleet_is_offline_at_once(site):  # noqa: F811
    site.enrol()
    agent = start_online(site)
    shutil.rmtree(site.home / "fleet")
    assert agent.wait(20) != 0
    wait_for(lambda: not site.fleet.detail(site.name).summary.is_online, "the goodbye")
    assert "this device is in no fleet" in site.log()


def test_revoked_device_says_so_and_comes_back_when_it_is_enrolled_again(site):  # noqa: F811
    site.enrol()
    agent = start_online(site)
    devices.revoke(site.fleet.store, site.name, "alice", "stolen")
    wait_for_words(
        lambda: site.run("fleet", "status"),
        "not connected since 20",
        "the fleet has revoked this device; to let it in again",
        f"device '{site.name}' was revoked at 20",
    )
    why = site.fleet.detail(site.name).why
    assert why.startswith("d1 was revoked at 20")
    assert "UTC (stolen), so it gets nothing" in why
    assert "Traceback" not in site.log()
    site.enrol()
    wait_for(lambda: site.fleet.detail(site.name).summary.is_online, f"the hello; {site.log()}")
    assert agent.poll() is None
    wait_for_words(lambda: site.run("fleet", "status"), "\n  connected since 20")


def test_two_machines_with_one_identity_are_named_on_both_sides(site, tmp_path):  # noqa: F811
    site.enrol()
    start_online(site)
    site.want("1.0.0")  # with a document devices connect again within seconds
    wait_for(lambda: site.reported() and site.reported().desired_version, "the document")
    copy = Site(site.fleet, site.maker, tmp_path / "copy")
    try:
        shutil.copytree(site.home, copy.home, dirs_exist_ok=True)
        copy.start("agent")
        why = lambda: site.fleet.detail(site.name).why  # noqa: E731
        wait_for_words(why, "two machines use the identity of d1, at 127.0.0.1 (")
        assert why().count("127.0.0.1 (") == 2
        for each in (site, copy):
            wait_for_words(
                lambda each=each: each.run("fleet", "status"),
                "the fleet says: at 20",
                "two machines use",
            )
    finally:
        copy.end()


def test_agent_that_is_started_again_is_no_copy(site):  # noqa: F811
    site.enrol()
    agent = start_online(site)
    agent.kill()
    agent.wait(20)
    wait_for(lambda: not site.fleet.detail(site.name).summary.is_online, "the last will")
    start_online(site)
    assert "two machines" not in site.fleet.detail(site.name).why
