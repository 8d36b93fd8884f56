"""The emulated link and the slow device. Only here does a test look at rates: they are what is asked for."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import is_running, wait_for

from edgekit_host.emulation.cpu_quota import CpuQuota, can_limit_processor
from edgekit_host.emulation.testbed import Testbed, can_make_namespaces
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.system.child_process import ChildProcess

PEER = str(Path(__file__).with_name("emulated_peer.py"))
needs_root = pytest.mark.skipif(
    not can_make_namespaces(), reason="network namespaces need root, /dev/net/tun and iproute2"
)
BUSY = "while True: pass"


@pytest.fixture(params=[pytest.param("namespaces", marks=needs_root), "proxy"])
def testbed(request: pytest.FixtureRequest) -> Iterator[Testbed]:
    with Testbed(kind=request.param) as made:
        yield made


@pytest.fixture
def quota() -> Iterator[CpuQuota]:
    try:
        made = CpuQuota(0.2)
    except ConfigError as why:
        pytest.skip(str(why))
    with made:
        yield made


def test_machine_without_iproute2_gets_a_proxy_for_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not can_make_namespaces()
    with Testbed() as testbed:
        assert testbed.kind == "proxy"


def test_machine_without_cgroups_limits_no_processor(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("proc /proc proc rw 0 0\n")
    assert not can_limit_processor(mounts)


def free_port(testbed: Testbed) -> int:
    if testbed.kind == "namespaces":
        return 9001
    with socket.create_server((testbed.server_host, 0)) as listener:
        return int(listener.getsockname()[1])


def start_server(testbed: Testbed) -> tuple[str, int]:
    """Return where the device reaches a server of `emulated_peer`."""
    port = free_port(testbed)
    testbed.spawn("server", [sys.executable, PEER, "serve", testbed.server_host, str(port)])
    return testbed.reach(port)


def start_client(testbed: Testbed, what: str, size: int) -> ChildProcess:
    host, port = start_server(testbed)
    return testbed.spawn("device", [sys.executable, PEER, what, host, str(port), str(size)])


def times(client: ChildProcess) -> list[float]:
    """What a client that repeats has printed so far."""
    return [float(line) for line in client.output.decode().splitlines(keepends=True) if line.endswith("\n")]


def wait_for_times(client: ChildProcess, more: int) -> list[float]:
    """Wait for further exchanges, and return how long they took."""
    before = len(times(client))
    wait_for(lambda: len(times(client)) >= before + more, "further exchanges")
    return times(client)[before:]


@pytest.mark.parametrize(("mbit_s", "size"), [(2, 100_000), (20, 800_000)])
@pytest.mark.parametrize("rtt_ms", [20])
def test_asked_link_is_what_tcp_measures(testbed: Testbed, mbit_s: float, size: int, rtt_ms: float) -> None:
    testbed.set_link(up_mbit_s=mbit_s, down_mbit_s=mbit_s * 2, rtt_ms=rtt_ms)
    client = start_client(testbed, "measure", size)
    assert client.wait(60) == 0, client.explain_end()
    got = json.loads(client.output)
    # The proxy is a process that must wake up for every piece; the kernel's queue needs none.
    share, slack_ms = (0.05, 1.0) if testbed.kind == "namespaces" else (0.15, 5.0)
    assert got["up_mbit_s"] == pytest.approx(mbit_s, rel=share)
    assert got["down_mbit_s"] == pytest.approx(mbit_s * 2, rel=share)
    assert got["rtt_ms"] == pytest.approx(20, abs=slack_ms)


def test_changed_link_holds_the_connection(testbed: Testbed) -> None:
    testbed.set_link(up_mbit_s=20, down_mbit_s=20, rtt_ms=5)
    client = start_client(testbed, "repeat", 50_000)  # 20 ms at 20 Mbit/s, 200 ms at 2
    fast = wait_for_times(client, 5)
    testbed.set_link(up_mbit_s=2, down_mbit_s=20, rtt_ms=5)
    slow = wait_for_times(client, 4)[2:]  # the first began before the change
    testbed.set_link(up_mbit_s=20, down_mbit_s=20, rtt_ms=5)
    fast_again = wait_for_times(client, 6)[3:]
    assert min(slow) > 4 * min(fast)
    assert min(slow) > 4 * min(fast_again)
    assert is_running(client.pid)


def test_blocked_link_is_silent_until_it_is_set(testbed: Testbed) -> None:
    client = start_client(testbed, "repeat", 1000)
    wait_for_times(client, 2)
    testbed.block()
    time.sleep(0.1)  # what had arrived before is printed
    before = len(times(client))
    time.sleep(0.5)
    assert len(times(client)) == before
    assert is_running(client.pid)
    testbed.set_link(up_mbit_s=20, down_mbit_s=20, rtt_ms=5)
    wait_for_times(client, 2)


def test_ended_server_breaks_the_connection(testbed: Testbed) -> None:
    port = free_port(testbed)
    server = testbed.spawn("server", [sys.executable, PEER, "serve", testbed.server_host, str(port)])
    host, reached = testbed.reach(port)
    client = testbed.spawn("device", [sys.executable, PEER, "repeat", host, str(reached), "1000"])
    wait_for_times(client, 2)
    server.kill()
    assert client.wait(20) == 1
    assert "EOFError" in client.last_line or "Connection" in client.last_line


def test_link_without_bandwidth_is_refused(testbed: Testbed) -> None:
    with pytest.raises(ConfigError, match=r"use block\(\) for a link that is down"):
        testbed.set_link(up_mbit_s=0, down_mbit_s=20, rtt_ms=5)


@needs_root
def test_closed_testbed_leaves_nothing() -> None:
    with Testbed(device_share=0.2, kind="namespaces") as testbed:
        child = testbed.spawn("device", [sys.executable, "-c", BUSY])
        namespace = wait_for(lambda: own_namespace_of(child.pid), "its namespace")
        assert namespace in namespaces_in_use()
        folders = quota_folders(os.getpid())
        assert folders
    assert not is_running(child.pid)
    assert namespace not in namespaces_in_use()
    assert not any(folder.exists() for folder in folders)


@needs_root
def test_crashed_owner_leaves_nothing() -> None:
    crashing = (
        "import sys, time\n"
        "from edgekit_host.emulation.testbed import Testbed\n"
        "testbed = Testbed(device_share=0.2, kind='namespaces')\n"
        f"print(testbed.spawn('device', [sys.executable, '-c', {BUSY!r}]).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", crashing],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        namespace = wait_for(lambda: own_namespace_of(child), "its namespace")
        folders = quota_folders(owner.pid)
        assert folders
        owner.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_running(child), "its process to end")
    wait_for(lambda: namespace not in namespaces_in_use(), "its namespace to end")
    with CpuQuota(0.2):
        assert not any(folder.exists() for folder in folders)


def test_quota_holds_a_process_to_its_share_also_after_it_was_changed(quota: CpuQuota) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        try:
            quota.procs_file.write_text(str(busy.pid))
            shares = [share_of(busy.pid)]
            quota.change(0.6)
            quota.change(0.2)
            shares.append(share_of(busy.pid))
        finally:
            busy.kill()
    assert max(shares) < 0.3  # asked 0.2; a machine under load gives less


def share_of(pid: int) -> float:
    """Return the share of a processor that a process gets, measured for half a second."""
    begin_s, begin_cpu_s = time.monotonic(), cpu_s(pid)
    time.sleep(0.5)
    return (cpu_s(pid) - begin_cpu_s) / (time.monotonic() - begin_s)


def test_end_of_quota_kills_its_processes(quota: CpuQuota) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        quota.procs_file.write_text(str(busy.pid))
        quota.close()
        assert busy.wait(10) == -signal.SIGKILL
    assert not quota.procs_file.parent.exists()


@pytest.mark.parametrize("share", [0.0, -1.0, 0.05, float("nan"), 1.0])
def test_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        CpuQuota(share)


def test_machine_without_cpuset_controller_says_so(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("tmpfs /sys/fs/cgroup tmpfs ro 0 0\n")
    with pytest.raises(ConfigError, match="no mounted cgroup has it"):
        CpuQuota(0.2, mounts)


@needs_root
def test_version_2_is_bound_to_its_processor(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"cgroup2 {tmp_path} cgroup2 rw,nosuid 0 0\n")
    with CpuQuota(0.2, mounts) as made:
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpuset"
        assert (made.procs_file.parent / "cpuset.cpus").read_text() == str(made.cpu)


def own_namespace_of(pid: int) -> str | None:
    """Return the network namespace of a process once that is not ours."""
    found = str(Path(f"/proc/{pid}/ns/net").readlink())
    return None if found == str(Path("/proc/self/ns/net").readlink()) else found


def namespaces_in_use() -> set[str]:
    """Return the network namespaces that a process is in or holds open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found |= {str(one.readlink()) for one in [process / "ns/net", *(process / "fd").iterdir()]}
    return found


def quota_folders(pid: int) -> list[Path]:
    return [
        one for root in ("cpuset", "") for one in Path("/sys/fs/cgroup", root).glob(f"edgekit-quota-{pid}-*")
    ]


def cpu_s(pid: int) -> float:
    """Return the processor time of a process of one thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
