"""Three tiers from the command line to the answer: device, edge machine and cloud as processes."""

import contextlib
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from tests.free_port import free_port
from tests.offload.machine_here import MACHINE_HERE
from tests.offload.offload_service import serving
from tests.service.serve_parts import wait_ready
from tests.waiting import wait_for

from edgekit_cli.cli import cli
from edgekit_cli.offload import plan_request
from edgekit_offload.packaging import plan_package
from edgekit_offload.partition.opened_model import OpenedModel
from edgekit_offload.planning import measurement
from edgekit_offload.profiling import machine as machines
from edgekit_offload.profiling.machine import Machine, RunnableGraph
from edgekit_offload.profiling.model_profile import ModelProfile
from edgekit_runtime.offload.cut_table import CutTable, read_cut_table
from edgekit_runtime.offload.measurement.job import Timing
from edgekit_runtime.offload.measurement.request_cost import RequestCost
from edgekit_runtime.offload.offload_options import OffloadOptions, write_offload_options
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer

# Seconds of each kernel in the cloud, by its weights. Only the times of codings are this machine's: at
# 0.1 Mbit/s a coding would have to take 0.2 s longer than it does to change where to cut.
SECONDS = {"w1": 3e-5, "w2": 5e-4, "w3": 5e-3}
SLOWDOWNS = {"ssh:device": 300.0, "ssh:edge": 30.0, "ssh:cloud": 1.0}


def pyramid() -> bytes:
    """Three convolutions, each output far smaller than the one before."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (4, 3, 4, 4), "w2": (2, 4, 4, 4), "w3": (4, 2, 4, 4)}
    nodes = [
        helper.make_node("Conv", [f"t{n}", name], [f"t{n + 1}"], strides=[4, 4])
        for n, name in enumerate(shapes)
    ]
    weights = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in shapes.items()]
    given = helper.make_tensor_value_info("t0", TensorProto.FLOAT, [1, 3, 64, 64])
    made = helper.make_tensor_value_info("t3", TensorProto.FLOAT, [1, 4, 1, 1])
    graph = helper.make_graph(nodes, "g", [given], [made], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


def seconds_of(machine: Machine, content: bytes) -> dict[str, float]:
    """Return what each convolution of a graph takes on a machine, by its output."""
    nodes = onnx.load_from_string(content).graph.node if content else ()
    slowdown = SLOWDOWNS[machine.text]
    return {one.output[0]: SECONDS[one.input[1]] * slowdown for one in nodes if one.op_type == "Conv"}


def fake_profile(
    machine: Machine, graph: RunnableGraph, *, name: str = "model", seconds: float = 1.0
) -> ModelProfile:
    """The kernels of this machine, with the times of another one."""
    own = seconds_of(machine, graph.content)
    real = machines.profile_kernels(MACHINE_HERE, graph, name=name, seconds=0.01)
    total_s = sum(own.values())
    # A tensor whose layout is changed is written twice: the convolution comes first.
    kernels = tuple(
        replace(one, seconds=sum(own.pop(tensor, 0.0) for tensor in one.writes)) for one in real.kernels
    )
    assert not own
    return replace(
        real, measured_on=machine.text, kernels=kernels, whole_s=total_s, request=RequestCost(0.0, 0.0)
    )


def fake_times(machine: Machine, graphs: Sequence[RunnableGraph], *, seconds: float) -> tuple[Timing, ...]:
    del seconds
    return tuple(Timing(sum(seconds_of(machine, one.content).values()) + 1e-5, 0.0, 1) for one in graphs)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the packages of the device and of the edge machine."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    for module in (plan_request, plan_package):
        monkeypatch.setattr(module, "profile_kernels", fake_profile)
    monkeypatch.setattr(measurement, "time_models", fake_times)
    monkeypatch.setattr(
        OpenedModel, "run_seconds", lambda *_: 1.0
    )  # coding here is as fast as in the profiles
    generate_key("default")
    (tmp_path / "m.onnx").write_bytes(pyramid())
    package = write_plain_package(
        tmp_path / "m.onnx", name="pyramid", target="x86-64", folder=tmp_path, sign=load_signer()
    )
    out = tmp_path / "plans"
    where = ["--device", "ssh:device", "--edge", "ssh:edge", "--server", "ssh:cloud", "--tiers", "3"]
    link = ["--edge-link", "0.1@2", "--bandwidth", "0.1", "--rtt", "2", "--max-loss", "100%"]
    arguments = ["offload", "plan", str(package), *where, *link, "-o", str(out)]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)
    assert done.exception is None
    (device,), (edge,) = out.glob("*.edgepkg"), (out / "edge").glob("*tier1*.edgepkg")
    return device, edge


def table_of(package: Path) -> CutTable:
    with read_package(package, TrustStore.from_folder(package_keys(package))) as opened:
        table = read_cut_table(opened)
    assert table is not None
    return table


def package_keys(package: Path) -> Path:
    return next(one / "keys" for one in package.parents if (one / "keys").exists())


@contextlib.contextmanager
def offloading(package: Path, port: int, plan: str) -> Iterator[RemoteSession]:
    write_offload_options(OffloadOptions(f"127.0.0.1:{port}", plan=plan))
    session: Any = open_session(package, trust=TrustStore.from_folder(package_keys(package)))
    assert isinstance(session, RemoteSession)
    try:
        yield session
    finally:
        session.close()


def count_requests(port: int, model: str) -> int:
    """Return how many inferences a service has answered for a model."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as found:
        lines = found.read().decode().splitlines()
    name = "edgekit_requests_total{"
    counted = [one for one in lines if one.startswith(name) and f'"{model}"' in one and "succeeded" in one]
    return int(sum(float(one.rpartition(" ")[2]) for one in counted))


def test_tail_of_the_first_cut_is_a_package_that_the_edge_machine_splits_on(
    planned: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, edge = planned
    first = next(one for one in table_of(device).plans if one.name.startswith("tier1"))
    assert first.tail is not None
    assert edge.name.startswith(first.tail)  # under the name that devices ask for
    second = next(one for one in table_of(edge).plans if one.name.startswith("cut"))
    assert second.tail is not None
    feeds = {"t0": np.random.default_rng(5).normal(size=(1, 3, 64, 64)).astype(np.float32)}
    reference = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, feeds)[0]
    ports = free_port(), free_port()
    home = tmp_path / "home-of-edge"
    home.mkdir()
    keys = ("--keys", tmp_path / "keys")
    with contextlib.ExitStack() as stack:
        cloud = stack.enter_context(serving(tmp_path, edge, "--port", ports[1], *keys))
        wait_ready(cloud)
        monkeypatch.setenv("EDGEKIT_HOME", str(home))
        write_offload_options(OffloadOptions(f"127.0.0.1:{ports[1]}", plan=second.name))
        box = stack.enter_context(serving(home, device, "--whole", edge, "--port", ports[0], *keys))
        wait_ready(box)
        monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
        session = stack.enter_context(offloading(device, ports[0], first.name))
        wait_for(lambda: session.decision().plan.name == first.name, "the edge machine to be proved")
        before = count_requests(ports[1], second.tail)

        def ask() -> np.ndarray[Any, Any]:
            return session.run(feeds)["t3"]

        wait_for(lambda: ask() is not None and count_requests(ports[1], second.tail) > before + 3, "cloud")
        through_all = ask()
        assert session.counts.remote > 0
        # A tensor in 4 or 8 bits; the second cut is exact.
        np.testing.assert_allclose(through_all, reference, atol=0.2 * float(np.abs(reference).max()))
        cloud.kill()
        cloud.wait()
        failed = session.counts.failed
        for _ in range(5):
            np.testing.assert_allclose(ask(), through_all, rtol=1e-4, atol=1e-4)
        assert session.counts.failed == failed  # the edge machine answers alone, nothing falls on the device
