"""A planned, signed package of a small network of pictures, and a service with its tails."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fork_server import runtime_server
from tests.offload.onnx_models import model_of
from tests.offload.session.offload_parts import LOCAL, set_server, wait_until
from tests.service.serve_parts import wait_ready
from tests.waiting import bounded

import edgekit_runtime
from edgekit_offload.packaging.submodels import attach_plans
from edgekit_offload.partition.calibrate import find_bytes
from edgekit_offload.partition.coding import Coding
from edgekit_offload.partition.split import Part, SplitModels, split_model, whole_upload
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_plan import Escalation, OffloadPlan, PlanCosts
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer

SIZE = 32
MARGIN = 0.6  # of the cascade: about half of the pictures lie on either side
Array = np.ndarray[Any, np.dtype[Any]]

REMOTE = PlanCosts(device_s=1e-4, server_s=1e-4, upload_bytes=4000.0, download_bytes=40.0)


def make_pictures(count: int, seed: int = 0) -> Array:
    """Return smooth 8-bit pictures as float32 [count, 3, SIZE, SIZE], range -1..1."""
    generator = np.random.default_rng(seed)
    at = np.linspace(0, 1, SIZE)
    waves = generator.uniform(0.5, 3.0, (count, 3, 2, 1))
    phases = generator.uniform(0, 6, (count, 3, 1, 1))
    image = np.sin(6 * waves[:, :, :1] * at[:, None] + phases) + np.cos(6 * waves[:, :, 1:] * at)
    pixels = np.rint((image + 2) / 4 * 255).clip(0, 255)
    return (pixels / 127.5 - 1).astype(np.float32)


def make_model(seed: int = 0) -> bytes:
    """Return logits[N, 5] of image[N, 3, SIZE, SIZE]."""
    generator = np.random.default_rng(seed)
    weights = {
        "w1": generator.normal(size=(8, 3, 3, 3)).astype(np.float32) / 5,
        "w2": generator.normal(size=(16, 8, 3, 3)).astype(np.float32) / 8,
        "w3": generator.normal(size=(16, 5)).astype(np.float32),
        "b3": np.zeros(5, np.float32),
    }
    nodes = [
        ("Conv", ["image", "w1"], ["c1"]),
        ("Relu", ["c1"], ["r1"]),
        ("MaxPool", ["r1"], ["p1"]),
        ("Conv", ["p1", "w2"], ["c2"]),
        ("Relu", ["c2"], ["r2"]),
        ("GlobalAveragePool", ["r2"], ["p2"]),
        ("Flatten", ["p2"], ["f2"]),
        ("Gemm", ["f2", "w3", "b3"], ["logits"]),
    ]
    pool = {2: {"kernel_shape": [2, 2], "strides": [2, 2]}}
    return model_of(nodes, {"image": ["N", 3, SIZE, SIZE]}, ["logits"], weights=weights, attributes=pool)


def make_splits(model: bytes) -> dict[str, SplitModels]:
    """Return every kind of plan there is."""
    lattices = {"image": find_bytes(make_pictures(40, seed=1))}
    assert lattices["image"] is not None
    coded: Any = lattices
    whole = whole_upload(model)
    cascade = SplitModels(head=_as_part(model), tail=whole.tail, sent=whole.sent, coded=whole.coded)
    return {
        "raw": whole,
        "cut3-int8": split_model(model, range(3), Coding("int8")),
        "cut5": split_model(model, range(5)),
        "uint8": whole_upload(model, Coding("uint8", coded)),
        "jpeg": whole_upload(model, Coding("pixels", coded)),
        "cascade": cascade,
    }


def _as_part(model: bytes) -> Part:
    """Return a whole model as a head: a cascade's small model, which here is as good as the large one."""
    tail = whole_upload(model).tail
    return Part(model, tail.inputs, tail.outputs, reads_weights=False)


def make_plans(splits: dict[str, SplitModels]) -> list[OffloadPlan]:
    """Return their plans, without one for the device alone."""
    plans = []
    for name, split in splits.items():
        plans.append(
            OffloadPlan(
                name,
                REMOTE,
                head=None if split.head is None else f"{name}.head",
                tail=f"{name}.tail",
                media={one.name: "jpeg:95" for one in split.sent} if name == "jpeg" else {},
                compression="zstd" if name in ("cut3-int8", "uint8") else "identity",
                escalation=Escalation("logits", MARGIN, 0.5) if name == "cascade" else None,
            )
        )
    return plans


def write_planned(folder: Path, *, is_whole: bool = True) -> Path:
    """Write a planned package, with its key in `folder/keys`; `is_whole` adds a plan for the device alone."""
    keys = folder / "keys"
    if not keys.exists():
        generate_key("default", keys)
    sign, model = load_signer(folder=keys), make_model()
    (folder / "model.onnx").write_bytes(model)
    plain = write_plain_package(
        folder / "model.onnx", name="pictures", target="x86-64", folder=folder, sign=sign
    )
    splits = make_splits(model)
    plans = make_plans(splits)
    made = folder / ("planned" if is_whole else "split-only")
    made.mkdir()
    decode = {"jpeg": {one.name: "jpeg" for one in splits["jpeg"].sent}}
    with read_package(plain, TrustStore.from_folder(keys)) as package:
        table = CutTable((LOCAL, *plans) if is_whole else tuple(plans))
        return attach_plans(package, splits, table, folder=made, sign=sign, decode=decode)


@contextlib.contextmanager
def serving(home: Path, folder: Path, *arguments: object, limit_s: float = 240.0) -> Iterator[str]:
    """Run `edgekit-device serve` with the keys in `folder/keys`; yield its address of TCP.

    Args:
        home: folder of its configuration and its Unix socket; first openings are remembered as for all tests.
        folder: of the keys.
        arguments: `--tails` or `--package` and whatever else.
        limit_s: time after which it is killed.
    """
    environment = {
        **os.environ,
        "EDGEKIT_HOME": str(home / "home"),
        "EDGEKIT_STATE": str(home / "state"),
        "PYTHONPATH": str(Path(edgekit_runtime.__file__).parents[1]),
    }
    stated = ["--unix-socket", str(home / "s.sock"), "--port", "0", "--keys", str(folder / "keys")]
    process = runtime_server().popen(
        [sys.executable, "-m", "edgekit_runtime.cli", "serve", *stated, *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with bounded(process, limit_s):
        yield f"127.0.0.1:{wait_ready(process).rsplit(':', 1)[1].strip()}"


@contextlib.contextmanager
def offloading(folder: Path, package: Path, plan: str, home: Path) -> Iterator[RemoteSession]:
    """Open a session that runs one plan on a service of its own."""
    with (
        serving(folder, folder, "--tails", package) as server,
        offloading_to(server, folder, package, plan, home) as session,
    ):
        yield session


@contextlib.contextmanager
def offloading_to(server: str, folder: Path, package: Path, plan: str, home: Path) -> Iterator[RemoteSession]:
    """Open a session that runs one plan on a service."""
    with pytest.MonkeyPatch.context() as patch:
        set_server(home, patch, server, plan=plan)
        session = open_session(package, trust=TrustStore.from_folder(folder / "keys"))
        assert isinstance(session, RemoteSession)
        try:
            wait_until(lambda: session.decision().plan.name == plan, f"{plan} is not used")
            yield session
        finally:
            session.close()
