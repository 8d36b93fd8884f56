"""A package with a cut table and a real tail, and servers of others as processes."""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from tests.runtime.conftest import make_signer
from tests.runtime.slot_cases import write_keys

from edgekit_runtime.client import Client
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Artifact, BackendChoice, Manifest, Submodel
from edgekit_runtime.package.submodels import served_name
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.packaging.signing_keys import StatementSigner

TINY = Path(__file__).parents[2] / "models/tiny"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "edgekit"


@dataclass(frozen=True)
class Exported:
    """A package of digits_cnn whose tail begins behind its first kernel.

    Attributes:
        path: the package; the trusted keys are in `keys` beside it.
        tail: the name that the tail is served under.
        images, sent, expected: inputs, what the head sends for them, and what the tail answers.
    """

    path: Path
    tail: str
    images: NDArray[np.float32]
    sent: dict[str, NDArray[np.float32]]
    expected: dict[str, NDArray[np.float32]]


def make_package(folder: Path) -> Exported:
    """Write a signed package with a cut table."""
    whole = onnx.shape_inference.infer_shapes(onnx.load(TINY / "digits_cnn.onnx"))
    cut = next(node.output[0] for node in whole.graph.node if node.op_type == "Relu")
    parts = onnx.utils.Extractor(whole)
    head, tail = parts.extract_model(["image"], [cut]), parts.extract_model([cut], ["logits"])
    with np.load(TINY / "digits_cnn.eval.npz") as samples:
        images = samples["image"][:8].astype(np.float32)
    sent = run(head, {"image": images})
    expected = run(tail, sent)
    contents = {"model.onnx": whole.SerializeToString()}
    contents |= {"sub/head.onnx": head.SerializeToString(), "sub/tail.onnx": tail.SerializeToString()}
    roles = {"model.onnx": "model", "cut-table.json": "cut-table"}
    roles |= {"sub/head.onnx": "submodel", "sub/tail.onnx": "submodel"}
    golden = _golden(contents, "whole", {"image": images[:1]}, run(whole, {"image": images[:1]}))
    of_tail = _golden(contents, "tail", {cut: sent[cut][:1]}, {"logits": expected["logits"][:1]})
    of_head = _golden(contents, "head", {"image": images[:1]}, {cut: sent[cut][:1]})
    first = Submodel(
        "cut1.head", _specs({"image": images}), _specs(sent), BackendChoice("ort", "sub/head.onnx"), of_head
    )
    submodel = Submodel(
        "cut1.tail",
        _specs({cut: sent[cut]}),
        _specs(expected),
        BackendChoice("ort", "sub/tail.onnx"),
        of_tail,
    )
    name = served_name("digits", submodel, {one.path: one for one in _artifacts(contents, roles)})
    costs = PlanCosts(0.001, 0.001, 8.0 * sent[cut][0].nbytes, 40.0)
    plans = (
        OffloadPlan("local", PlanCosts(0.001)),
        OffloadPlan("cut1", costs, "cut1.head", name),
        OffloadPlan("cut1-zstd", costs, "cut1.head", name, compression="zstd"),
    )
    contents["cut-table.json"] = json.dumps(to_plain(CutTable(plans))).encode()
    manifest = Manifest(
        name="digits",
        version="1.0.0",
        target="x86-64",
        inputs=_specs({"image": images}),
        outputs=_specs(expected),
        artifacts=_artifacts(contents, roles),
        backend=BackendChoice("offload", "model.onnx", {}, BackendChoice("ort", "model.onnx")),
        golden=golden,
        submodels=(first, submodel),
    )
    path = folder / manifest.file_name
    write_package(path, manifest, contents, StatementSigner(make_signer(1)))
    write_keys(folder / "keys")
    return Exported(path, name, images, sent, expected)


def run(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def _specs(arrays: Mapping[str, NDArray[np.float32]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, str(array.dtype), ("N", *array.shape[1:])) for name, array in arrays.items()
    )


def _golden(
    contents: dict[str, bytes], where: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Golden:
    """Return golden tensors, and put their bytes into `contents`."""
    taken, given = [], []
    for name, array in inputs.items():
        contents[f"golden/{where}-in.bin"] = array.tobytes()
        taken.append(GoldenInput(name, "float32", array.shape, f"golden/{where}-in.bin", None))
    for name, array in outputs.items():
        contents[f"golden/{where}-out.bin"] = array.tobytes()
        given.append(
            GoldenOutput(
                name=name,
                dtype="float32",
                shape=array.shape,
                path=f"golden/{where}-out.bin",
                atol=1e-4,
                rtol=1e-4,
            )
        )
    return Golden(tuple(taken), tuple(given))


def _artifacts(contents: Mapping[str, bytes], roles: Mapping[str, str]) -> tuple[Artifact, ...]:
    return tuple(
        Artifact(path, len(data), hashlib.sha256(data).hexdigest(), roles.get(path, "golden"))
        for path, data in sorted(contents.items())
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def process(
    argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server until the block ends."""
    with log.open("wb") as file:
        child = subprocess.Popen(
            argv, stdout=file, stderr=subprocess.STDOUT, env=None if env is None else {**env}
        )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def wait_ready(child: "subprocess.Popen[bytes]", place: int | Path, log: Path, limit_s: float = 60) -> None:
    """Return when the server on a port or a Unix socket is ready."""
    address = str(place) if isinstance(place, Path) else f"127.0.0.1:{place}"
    end = time.monotonic() + limit_s
    while time.monotonic() < end and child.poll() is None:
        with contextlib.suppress(EdgekitError), Client(address, timeout_s=2) as client:
            if client.ready():
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text(errors="replace")[-4000:])


def cached_environment(name: str, *packages: str, may_make: bool) -> Path | None:
    """Return the folder of a Python environment in the cache; None if there is none, and none can be made."""
    folder = CACHE / f"{name}-py{sys.version_info.major}{sys.version_info.minor}"
    done = folder / "complete"
    if not done.exists():
        if not may_make:
            return None
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", *packages]
        if subprocess.run(pip, check=False, env={**os.environ, "PYTHONPATH": ""}).returncode:
            return None  # the reason is in its output
        done.touch()
    return folder
