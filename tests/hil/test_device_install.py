"""Devices that are set up over a real ssh, without a network of their own."""

import contextlib
import functools
import hashlib
import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from tests.free_port import free_port
from tests.hil import wheel_unpacker
from tests.hil.ssh_device import find_obstacle, open_device

from edgekit_cli.cli import main
from edgekit_fleet.identity.authority import open_authority
from edgekit_fleet.operations import devices
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.web.server import serve_devices
from edgekit_hil.provisioning import install as installing
from edgekit_hil.provisioning import wheelhouse
from edgekit_hil.provisioning.install import InstallRequest, install, probe, uninstall
from edgekit_hil.provisioning.ssh_host import SshHost
from edgekit_runtime.errors import ProvisioningError, TransportError
from edgekit_runtime.service import systemd
from edgekit_toolkit.targets import loader

pytestmark = pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or "")

KEY = """-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=
-----END PUBLIC KEY-----
"""
PACK, PACK_PIP = wheelhouse.make_zip, wheelhouse.pack_pip
UNITS = ("edgekit.service", "edgekit-agent.service")


@pytest.fixture(scope="module", autouse=True)
def own_packages(tmp_path_factory):
    """Install the runtime alone, without pip, with the packages of this environment beside it."""
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import platform; print(platform.python_version())"],
        check=False,
        capture_output=True,
        text=True,
    ).stdout
    if version.split(".")[:2] != [str(number) for number in sys.version_info[:2]]:
        pytest.skip("/usr/bin/python3 is not of the version of this Python, whose packages it would take")
    unpacker = PACK({"pip/__main__.py": Path(wheel_unpacker.__file__).read_bytes()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(wheelhouse, "read_pinned", lambda *_: [])
        patch.setattr(
            wheelhouse.Wheelhouse, "download", lambda self: self.folder.mkdir(parents=True, exist_ok=True)
        )
        patch.setattr(wheelhouse, "pack_pip", lambda: unpacker)
        change_runtime(patch, {})
        yield


@pytest.fixture(scope="module")
def first(own_packages, tmp_path_factory):
    """A device that is set up, and the report of that."""
    with open_device(tmp_path_factory.mktemp("first")) as device:
        yield device, set_up(device)


@pytest.fixture
def first_release(first):
    return first[1].release


@pytest.fixture
def installed(tmp_path, first):
    """A device that is set up as the first one was."""
    with open_device(tmp_path, like=first[0]) as opened:
        yield opened


@pytest.fixture
def device(tmp_path):
    with open_device(tmp_path) as opened:
        yield opened


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "vendor.pub.pem"
    path.write_text(KEY)
    return path


def set_up(device, **wanted):
    return install(device.host, InstallRequest(**wanted), lambda _: None)


@functools.cache
def pack_once(files):
    return PACK(dict(files))


def change_runtime(monkeypatch, files):
    """Let the runtime that is installed differ from ours by some files."""
    packages = sysconfig.get_paths()["purelib"].encode()

    def pack(content):
        own_files = {name: data.encode() for name, data in files.items()}
        return pack_once(tuple({**content, "packages.pth": packages, **own_files}.items()))

    monkeypatch.setattr(wheelhouse, "make_zip", pack)


def test_device_is_set_up_and_the_second_run_changes_nothing(device, key, monkeypatch):
    monkeypatch.setattr(wheelhouse, "pack_pip", PACK_PIP)
    first = set_up(device, keys=[key], target="rpi5")
    assert first.changed == (
        f"release {first.release}",
        "user edgekit",
        "key vendor",
        "edgekit.service",
        "edgekit-agent.service",
        "current release",
        "services started",
    )
    second = set_up(device, keys=[key], target="rpi5")
    assert (second.changed, second.notes, second.release) == ((), (), first.release)
    facts = probe(device.host)
    assert (facts.release, facts.service, facts.agent) == (first.release, "active", "inactive")
    assert facts.keys == {"vendor": hashlib.sha256(key.read_bytes()).hexdigest()}
    assert device.run("ls /opt/edgekit") == "current\nlock\nreleases\nstarted\n"
    assert "Environment=EDGEKIT_TARGET=rpi5" in device.run("cat /etc/systemd/system/edgekit.service")
    assert "ExecStart=/opt/edgekit/current/bin/edgekit-device serve" in device.run(
        "cat /etc/systemd/system/edgekit.service"
    )
    assert device.run("stat -c %U /etc/edgekit/keys /etc/edgekit/fleet").split() == ["edgekit", "edgekit"]


def test_units_pass_systemd_analyze(installed):
    installed.run("rm /opt/edgekit/releases/*/*.printed")  # as in a release that an earlier edgekit made
    set_up(installed, target="rpi5")
    assert "edgekit-device agent" in installed.run(f"cat /etc/systemd/system/{UNITS[1]}")
    paths = " ".join(f"/etc/systemd/system/{unit}" for unit in UNITS)
    verify = f"command -v systemd-analyze >/dev/null || exit 0; systemd-analyze verify {paths} 2>&1"
    assert installed.run(verify) == ""


def test_upgrade_goes_beside_the_old_version(installed, first_release, monkeypatch):
    change_runtime(monkeypatch, {"edgekit_runtime/added.py": "# 2"})
    second = set_up(installed)
    assert second.changed == (f"release {second.release}", "current release", "services started")
    facts = probe(installed.host)
    assert (facts.release, facts.previous) == (second.release, first_release)
    change_runtime(monkeypatch, {"edgekit_runtime/added.py": "# 3"})
    third = set_up(installed)
    kept = set(installed.run("ls /opt/edgekit/releases").split())
    assert kept == {second.release, third.release}  # and no older one


def test_version_that_fails_its_check_changes_nothing(installed, first_release, monkeypatch):
    change_runtime(monkeypatch, {"edgekit_runtime/cli.py": "raise SystemExit(7)"})
    with pytest.raises(ProvisioningError, match="edgekit-device does not start"):
        set_up(installed)
    assert probe(installed.host).release == first_release
    assert "restart" not in installed.run("cat /run/systemctl.log")


def test_version_that_does_not_start_is_taken_back_with_its_units(installed, first_release, monkeypatch):
    set_up(installed, target="rpi5")
    units = " ".join(f"/etc/systemd/system/{unit}" for unit in UNITS)
    before = installed.run(f"cat {units}")
    source = Path(systemd.__file__).read_text()
    changed = source.replace("WatchdogSec=10s", "WatchdogSec=11s")
    assert changed != source
    change_runtime(monkeypatch, {"edgekit_runtime/service/systemd.py": changed})
    facts = probe(installed.host)
    second = wheelhouse.Wheelhouse.plan(facts, facts.choose_python(), "ort").release
    installed.run(f"echo {second} >/run/refused")
    with pytest.raises(ProvisioningError, match=f"{first_release} runs again"):
        set_up(installed, target="rpi4")
    facts = probe(installed.host)
    assert (facts.release, facts.previous, facts.service) == (first_release, "", "active")
    assert installed.run("cat /opt/edgekit/started").strip() == first_release
    assert installed.run(f"cat {units}") == before
    installed.run("rm /run/refused")
    assert set_up(installed, target="rpi5").release == second == probe(installed.host).release
    assert "WatchdogSec=11s" in installed.run(f"cat {units}")


def test_interrupted_installation_is_mended_by_the_next_one(installed, key, monkeypatch, is_long):
    cuts = ("lock", "make_release", "make_user", "trust_keys", "write_units", "activate", "remove_old")
    real = installing.read_script()
    begin = real.index("install_release() {")
    for last in cuts if is_long else ("make_release", "trust_keys", "activate"):
        installed.run("rm -f /etc/edgekit/keys/*")
        change_runtime(monkeypatch, {"edgekit_runtime/added.py": f"# {last}"})
        line = next(each for each in real[begin:].splitlines() if each.split()[:1] == [last])
        cut = real[:begin] + real[begin:].replace(line, f"{line}\n    kill -9 $$", 1)
        with monkeypatch.context() as patch:
            patch.setattr(installing, "read_script", lambda script=cut: script)
            with pytest.raises((ProvisioningError, TransportError)):
                set_up(installed, keys=[key])
        report = set_up(installed, keys=[key])
        facts = probe(installed.host)
        assert (facts.release, [*facts.keys], facts.service) == (report.release, ["vendor"], "active")
        assert installed.run("cat /opt/edgekit/started").strip() == report.release
    assert set_up(installed, keys=[key]).changed == ()


def wrap(device, program, note):
    """Note something on each call of a program there, before it runs."""
    real = device.run(f"command -v {program}").strip()
    script = f'#!/bin/sh\n{note} >>/run/{program}.log\nexec {real} "$@"\n'
    device.run(f"cat >/usr/local/sbin/{program} <<'END'\n{script}END\nchmod 755 /usr/local/sbin/{program}")


def test_release_is_on_the_disk_before_its_mark(device):
    """A mark that outlives a power cut while the packages are empty files would never be mended."""
    wrap(device, "sync", 'echo "$# $(ls /opt/edgekit/releases/*/complete 2>/dev/null | wc -l)"')
    set_up(device)
    whole_then_mark_then_end = ["0 0", "1 1", "0 1"]
    assert device.run("cat /run/sync.log").splitlines() == whole_then_mark_then_end


def test_half_made_release_is_made_again(installed, first_release):
    folder = f"/opt/edgekit/releases/{first_release}"
    installed.run(f"rm {folder}/complete; rm -r {folder}/lib")
    assert f"release {first_release}" in set_up(installed).changed


def test_device_without_systemd_gets_all_but_a_start(tmp_path):
    with open_device(tmp_path, has_systemd=False) as device:
        found = set_up(device)
        assert found.notes == ("systemd does not run here: nothing was started",)
        assert set_up(device).changed == ()
        assert uninstall(device.host, purge=False)


def test_device_joins_a_fleet_once(tmp_path, first):
    if not all(folder.stat().st_mode & 1 for folder in Path(sysconfig.get_paths()["purelib"]).parents):
        pytest.skip("the user of the service cannot read the packages of this environment")
    fleet, settings = FleetFolder(tmp_path / "fleet"), FleetSettings(web_port=free_port())
    fleet.write_settings(settings)
    authority = open_authority(fleet, settings)
    TufRepository(fleet.repository, fleet.repository_keys).create(time.time())
    with (
        contextlib.closing(fleet.open_store()) as store,
        serve_devices(store, fleet, settings, authority),
        open_device(tmp_path, has_network=True, like=first[0]) as device,
    ):
        parts = (store, settings, authority)
        (invitation,) = devices.invite(*parts, ("pi-1",), actor="test", target="x86-64")
        assert set_up(device).changed == ()
        wrap(device, "runuser", 'echo "$*"')
        assert set_up(device, code=str(invitation.code)).changed == ("enrolment",)
        arguments = device.run("cat /run/runuser.log")  # the list of processes shows them to everybody
        assert "enroll --code -" in arguments
        assert str(invitation.code) not in arguments
        facts = probe(device.host)
        assert (facts.device, facts.agent, facts.models) == ("pi-1", "active", "")
        assert json.loads(probe(device.host, has_models=True).models)["models"] == []
        again = set_up(device, code=str(invitation.code))
        assert again.changed == ()
        assert again.notes == ("this device is in a fleet already; the code was not used",)


def test_target_is_given_to_the_device_as_packages_state_it(monkeypatch, capsys):
    found = []

    def install(_, wanted, __):
        found.append(wanted.target)
        raise ProvisioningError("far enough")

    monkeypatch.setattr(installing, "install", install)
    file = Path(loader.__file__).parent / "rpi5.toml"
    for target in ("jetson", str(file)):
        assert main(["device", "install", "--host", "pi@board", "--target", target]) == 21
    assert "far enough" in capsys.readouterr().err
    assert found == ["jetson-orin-nano", "rpi5"]


def test_user_who_may_use_sudo_sets_up_and_removes(tmp_path, key):
    """As on a Raspberry Pi or a Jetson, where nobody logs in as root."""
    with open_device(tmp_path, user="pi") as device:
        assert probe(device.host).rights == "sudo"
        first = set_up(device, keys=[key])
        assert first.changed[-1] == "services started"
        facts = probe(device.host)
        assert (facts.release, [*facts.keys], facts.service) == (first.release, ["vendor"], "active")
        assert set_up(device, keys=[key]).changed == ()
        assert device.run("stat -c %U /opt/edgekit/current/complete") == "root\n"
        assert uninstall(device.host, purge=True)
        assert device.run("ls -d /opt/edgekit /etc/edgekit 2>/dev/null; true") == ""


def test_user_without_rights_is_refused(tmp_path):
    with open_device(tmp_path, user="pi") as device:
        device.run("rm /usr/local/bin/raise")
        with pytest.raises(ProvisioningError, match="may not use sudo without a password"):
            set_up(device)
        with pytest.raises(ProvisioningError, match="may not use sudo without a password"):
            uninstall(device.host, purge=False)


def test_uninstall_keeps_models_and_keys_unless_purged(installed, key):
    set_up(installed, keys=[key])
    assert "current removed" in uninstall(installed.host, purge=False)
    left = installed.run(
        "ls /etc/edgekit/keys; ls -d /opt/edgekit /etc/systemd/system/edgekit* 2>/dev/null; true"
    )
    assert left == "vendor.pub.pem\n"
    assert set_up(installed, keys=[key]).changed
    assert "/etc/edgekit removed" in uninstall(installed.host, purge=True)
    assert (
        installed.run("ls -d /etc/edgekit /var/lib/edgekit 2>/dev/null; id edgekit 2>/dev/null; true") == ""
    )
    assert uninstall(installed.host, purge=True) == ()


def test_key_that_has_the_name_of_another_is_refused(installed, key):
    set_up(installed, keys=[key])
    installed.run("echo other >/etc/edgekit/keys/vendor.pub.pem")
    with pytest.raises(ProvisioningError, match="another key by the name 'vendor'"):
        set_up(installed, keys=[key])


def test_key_alone_is_copied_without_packages(installed, key, first_release, monkeypatch):
    set_up(installed, keys=[key])
    (key.parent / "more.pub.pem").write_text(KEY)
    monkeypatch.setattr(wheelhouse.Wheelhouse, "list_content", lambda _: pytest.fail("packages are copied"))
    second = set_up(installed, keys=[key, key.parent / "more.pub.pem"])
    assert (second.changed, second.release) == (("key more",), first_release)
    assert [*probe(installed.host).keys] == ["more", "vendor"]


def test_device_with_a_full_disk_is_refused_before_anything_is_copied(device):
    device.run("mount -t tmpfs -o size=20m tmpfs /opt")
    with pytest.raises(ProvisioningError, match="21 MB free, expected"):
        set_up(device)
    assert device.run("ls /opt") == ""


@contextlib.contextmanager
def hold_lock(device):
    """Hold the lock of an installation, as another one would."""
    words = ["flock", "/opt/edgekit/lock", "sh", "-c", "echo held; exec cat"]
    holder = ["nsenter", "-t", str(device.pid), "-m", *words]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield  # at the end of its input it ends


def test_two_installations_at_once_are_refused(device, key):
    device.run("mkdir -p /opt/edgekit")
    for wanted in ({}, {"keys": [key]}, {}):  # packages to copy, a key to copy, nothing
        with hold_lock(device), pytest.raises(ProvisioningError, match="another installation is running"):
            set_up(device, **wanted)
        set_up(device, **wanted)


def test_device_that_cannot_take_the_packages_says_why(device):
    device.run("mkdir -p /opt/edgekit && mount -t tmpfs -o ro tmpfs /opt/edgekit")
    with pytest.raises(ProvisioningError, match="lock: Read-only file system"):
        set_up(device)


def test_unknown_host_key_is_never_accepted(device):
    known = device.folder / "known_hosts"
    known.write_text("")
    with pytest.raises(ProvisioningError, match="host key is unknown here, or has changed"):
        probe(device.host)
    assert known.read_text() == ""


def test_changed_host_key_is_never_accepted(device):
    (device.folder / "known_hosts").write_text(f"device {(device.folder / 'user_key.pub').read_text()}")
    with pytest.raises(ProvisioningError, match="host key is unknown here, or has changed"):
        probe(device.host)


def test_refused_login_says_how_to_copy_a_key(device):
    (device.folder / "sshd_config").write_text(
        (device.folder / "sshd_config").read_text().replace("user_key.pub", "nobody")
    )
    with pytest.raises(ProvisioningError, match="ssh-copy-id"):
        probe(device.host)


def test_unreachable_device_is_a_transport_error(tmp_path):
    (tmp_path / "empty").write_text("")
    with pytest.raises(TransportError, match="cannot be reached"):
        probe(SshHost("127.0.0.1", 1, tmp_path / "empty"))
