"""What the offload evaluations share: a planned and signed package, its service, and sessions on a device.

All of it is the product: the planner measures and signs, `edgekit offload serve` serves with TLS and a token,
`edgekit-device offload server` sets the server, and `open_session` runs on the emulated device
(`offload_worker`). The emulated server has the one processor that the device leaves. Figures are `emulated`.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx

from edgekit_offload.packaging.plan_package import attach
from edgekit_offload.packaging.submodels import attach_plans
from edgekit_offload.partition.calibrate import find_bytes
from edgekit_offload.partition.coding import Coding
from edgekit_offload.partition.split import WEIGHTS_PATH, SplitModels, whole_upload
from edgekit_offload.planning.costs import reply_bytes, request_bytes
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.measurement import CutMeasurement
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels, time_models
from edgekit_offload.profiling.model_profile import ModelProfile
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_plan import LOCAL, OffloadPlan, PlanCosts
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.system.child_process import run_program
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.tensors import Array
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.signing_keys import load_signer
from offload_bench import PORT, START_LIMIT_S, EmulatedBench
from planned_ways import GRAPH as SESSION
from planned_ways import plan_model
from public_models import SHARED
from serving import write_signed
from works import WORKS

ROWS = 4  # different requests, so that an answer to another one is seen
PLANNED_ROWS = 16  # as many samples as sizes are measured on
CLASSES = 1000  # at most, in an answer
PLAN_S, WHOLE_PLAN_S = 6.0, 3.0
UINT8 = "uint8"
ALL = "all"
MODELS = {
    "resnet8": "resnet8_cifar10_fp32.onnx",
    "vww": "mobilenetv1_025_vww_fp32.onnx",
    "mobilenet_v1_025": "mobilenet_v1_025_224_fp32.onnx",
    "efficientnet_lite0": "efficientnet_lite0_fp32.onnx",
}


@dataclass(frozen=True)
class Planned:
    """A model with its plans.

    Attributes:
        name: of the model.
        packages: `all` for the package with every plan, and for each plan one with that plan alone, which a
            session then has to run.
        plans: what was extracted and measured.
        rows: .npz of requests, input -> one a row; `plan_product` did not plan on them.
        as_sent: the plans with the sizes of these requests in place of the samples'.
        seconds: that planning and packaging took.
        usual_s: the speed of the device at which it was measured (`SpeedGate`).
    """

    name: str
    packages: Mapping[str, Path]
    plans: Mapping[str, OffloadPlan]
    rows: Path
    seconds: float
    usual_s: float | None = None
    as_sent: Mapping[str, OffloadPlan] = field(default_factory=dict)


def read_rows(name: str, count: int = ROWS) -> Array:
    """Return requests for a model, real images as it takes them, float32 [count, ...]."""
    calibration, evaluation = next(work for work in WORKS if work.name == name).load()
    (rows,) = (
        array for key, array in (evaluation if name == "resnet8" else calibration).items() if key != "y"
    )
    return rows[:count]


def plan_product(
    name: str, folder: Path, share: float, bandwidths: Sequence[float], rtts: Sequence[float]
) -> Planned:
    """Plan a model for the emulated machines, and sign packages with what came of it.

    The requests are other images than the samples, so a prediction is not of its own samples.
    """
    began_s = time.monotonic()
    content, images = (SHARED / MODELS[name]).read_bytes(), read_rows(name, PLANNED_ROWS + ROWS)
    given = first_input(content)
    feeds = [{given: image[np.newaxis]} for image in images]
    folder = folder / name
    folder.mkdir()
    whole = write_signed(folder, name, content, feeds[0], load_signer())
    np.savez(folder / "rows.npz", **{given: images[PLANNED_ROWS:]})
    machines = Machine.parse(f"local@{share:.0%}"), server_machine()
    grid = Grid(tuple(bandwidths), tuple(rtts))
    samples = feeds[:PLANNED_ROWS]
    planning = plan_model(name, content, samples, machines, grid, seconds=PLAN_S, max_loss=1.0)
    result, measurement = planning.result, planning.measurement
    plans = {
        way.name: way.plan
        for way in result.candidates
        if way.plan.tail is None or way.name in measurement.splits
    }
    packages = {}
    for key, kept in {ALL: tuple(plans.values()), **{name: (one,) for name, one in plans.items()}}.items():
        own = folder / f"plans{len(packages)}"
        own.mkdir()
        shown = replace(result, table=replace(result.table, plans=kept))
        packages[key] = attach(whole, shown, measurement.splits, own, "default")
    sizes = replace(measurement, feeds=feeds[PLANNED_ROWS:], splits={})
    as_sent = {key: resize(one, sizes, measurement.splits.get(key)) for key, one in plans.items()}
    spent_s = time.monotonic() - began_s
    return Planned(name, packages, plans, folder / "rows.npz", spent_s, measurement.usual_s, as_sent)


def resize(plan: OffloadPlan, requests: CutMeasurement, split: SplitModels | None) -> OffloadPlan:
    """Return a plan with the sizes that other requests than its samples have, in its own compression."""
    if split is None:
        return plan
    sent = requests.send_samples(plan, split)
    packed = plan.compression == "zstd"
    costs = replace(
        plan.costs,
        upload_bytes=sent.upload_bytes if packed == (sent.compression == "zstd") else sent.plain_bytes,
        plain_bytes=sent.plain_bytes if packed else None,
        download_bytes=sent.download_bytes,
    )
    return replace(plan, costs=costs)


def plan_whole(name: str, content: bytes, rows: Array, folder: Path, share: float) -> Planned:
    """Measure and sign only local and the upload of 8-bit inputs, which takes seconds instead of minutes."""
    began_s = time.monotonic()
    given = first_input(content)
    folder = folder / name
    folder.mkdir()
    whole = write_signed(folder, name, content, {given: rows[:1]}, load_signer())
    np.savez(folder / "rows.npz", **{given: rows})
    device, server = Machine.parse(f"local@{share:.0%}"), server_machine()
    profile = profile_kernels(
        device, RunnableGraph(content, SESSION, inputs={given: rows[:1]}), name=name, seconds=WHOLE_PLAN_S
    )
    local = OffloadPlan(LOCAL, PlanCosts(profile.whole_s, is_measured=True))
    upload, split = measure_upload(content, given, rows, profile, (device, server))
    table = CutTable((local, upload))
    packages = {
        ALL: sign_plans(whole, {UINT8: split}, table, folder / "all"),
        LOCAL: sign_plans(whole, {}, CutTable((local,)), folder / LOCAL),
        UINT8: sign_plans(whole, {UINT8: split}, CutTable((upload,)), folder / UINT8),
    }
    plans = {LOCAL: local, UINT8: upload}
    return Planned(name, packages, plans, folder / "rows.npz", time.monotonic() - began_s)


def sign_plans(whole: Path, splits: Mapping[str, SplitModels], table: CutTable, folder: Path) -> Path:
    folder.mkdir()
    with read_package(whole, TrustStore.from_folder(find_keys_folder())) as package:
        return attach_plans(package, splits, table, folder=folder, sign=load_signer())


def first_input(content: bytes) -> str:
    graph = onnx.load_from_string(content).graph
    weights = {one.name for one in graph.initializer}
    (given,) = [one.name for one in graph.input if one.name not in weights]
    return given


def server_machine() -> Machine:
    """Return this machine without the processor that the emulated device gets."""
    cpus = sorted(os.sched_getaffinity(0))
    local = Machine.parse("local")
    return replace(local, argv=("taskset", "-c", ",".join(map(str, cpus[:-1] or cpus)), *local.argv))


def measure_upload(
    content: bytes, given: str, rows: Array, profile: ModelProfile, machines: tuple[Machine, Machine]
) -> tuple[OffloadPlan, SplitModels]:
    """Return the upload of the pixels as bytes, measured as the planner measures it."""
    if rows.dtype == np.uint8:
        split = whole_upload(content)
    else:
        lattice = find_bytes(rows)
        assert lattice is not None, "the input is an image"
        split = whole_upload(content, Coding(UINT8, {given: lattice}))
    shapes = {one.name: [size if isinstance(size, int) else 1 for size in one.shape] for one in split.sent}
    sent = {one.name: np.zeros(shapes[one.name], one.dtype) for one in split.sent}
    weights = {WEIGHTS_PATH: content} if split.tail.reads_weights else {}
    tail = RunnableGraph(split.tail.content, SESSION, weights, sent)
    device, server = machines
    device_s = 0.0
    if split.head is not None:
        head = RunnableGraph(split.head.content, SESSION, inputs={given: rows[:1]})
        device_s = time_models(device, [head], seconds=WHOLE_PLAN_S / 2)[0].seconds
    (on_server,) = time_models(server, [tail], seconds=WHOLE_PLAN_S / 2)
    up_bytes = request_bytes(sent)
    down_bytes = reply_bytes({"classes": np.zeros((1, CLASSES), np.float32)})
    request_s = profile.request.seconds(up_bytes)
    costs = PlanCosts(
        device_s + request_s, on_server.seconds, up_bytes, down_bytes, request_s, is_measured=True
    )
    head_name = None if split.head is None else f"{UINT8}.head"
    return OffloadPlan(UINT8, costs, head=head_name, tail=f"{UINT8}.tail"), split


class ProductBench(EmulatedBench):
    """Serves planned packages; the device is told of the server and opens them (`offload_worker`)."""

    def __init__(self, folder: Path, share: float) -> None:
        super().__init__(folder, share)
        self.server: Any = None

    def serve(self, planned: Sequence[Planned]) -> None:
        """Start `edgekit offload serve` with the tails of all packages, and wait until it is ready."""
        options = ["--host", self.testbed.server_host, "--port", str(PORT)]
        for option, name in (
            ("--tls-cert", "server.pem"),
            ("--tls-key", "server.key"),
            ("--token-file", "token"),
        ):
            options += [option, str(self.folder / name)]
        command = [sys.executable, "-m", "edgekit_cli", "offload", "serve", *options]
        self.server = self.start_server([*command, *(str(one.packages[ALL]) for one in planned)])

    def start_device(self) -> None:
        argv = [sys.executable, "-m", "edgekit_runtime.cli", "offload", "server", self.url]
        argv += ["--token-file", str(self.folder / "token"), "--ca-file", str(self.folder / "server.pem")]
        ended = run_program(argv, (), START_LIMIT_S, 1 << 16)
        assert ended.exit_code == 0, ended
        self.start_program("offload_worker.py")

    def open(self, planned: Planned, names: Sequence[str]) -> None:
        """Close the open sessions on the device and open those of a model."""
        packages = {name: str(planned.packages[name]) for name in names}
        is_exact = planned.plans.keys() <= {LOCAL, UINT8}
        local, rows = str(planned.packages[LOCAL]), str(planned.rows)
        self.order("load", packages=packages, local=local, rows=rows, is_exact=is_exact)

    def set_link(self, mbit_s: float, rtt_ms: float) -> None:
        self.testbed.set_link(up_mbit_s=mbit_s, down_mbit_s=mbit_s, rtt_ms=rtt_ms)


@contextmanager
def whole_bench(
    name: str, content: bytes, rows: Array, share: float, link: tuple[float, float]
) -> Iterator[tuple[ProductBench, Planned]]:
    """Yield a device that has local runs, the upload of 8-bit inputs and both, on a link of Mbit/s and ms."""
    with TemporaryDirectory() as folder:
        use_folder(Path(folder))
        planned = plan_whole(name, content, rows, Path(folder), share)
        with ProductBench(Path(folder), share) as bench:
            bench.serve([planned])
            bench.start_device()
            bench.set_link(*link)
            bench.open(planned, [ALL, LOCAL, UINT8])
            yield bench, planned


def use_folder(folder: Path) -> None:
    """Make this process and its children keep keys, options and caches in a folder of their own."""
    os.environ["EDGEKIT_HOME"], os.environ["EDGEKIT_CACHE"] = str(folder / "home"), str(folder / "cache")


def describe_load() -> str:
    one, five, _ = os.getloadavg()
    return f"load average {one:.1f} (1 min), {five:.1f} (5 min) on {os.cpu_count()} cores"
