"""Versions of `linear` that are right, wrong or slow, and what tests of a whole service do with them."""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from tests.runtime.conftest import CODES, OFFSET, SCALE, WEIGHT, PackageMaker
from tests.service.service_parts import Running, X, ask, get_bytes, infer_bytes, post_bytes

from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.package.golden import Golden, GoldenOutput
from edgekit_runtime.package.manifest import BackendChoice, Variant
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.options.rollout import CanaryOptions, Gates
from edgekit_runtime.trust.dsse import Statement, Verifier

LARGE = np.array([[1, 2, 3, 400]], np.float32)
ENDLESS = ModelOptions(rollout="canary", canary=CanaryOptions(share=0.5), gates=Gates(min_samples=10**9))
_GOLDEN = CODES.astype(np.float32) * np.float32(SCALE) + np.float32(OFFSET)


def make_model(
    factor: float = 1.0,
    *,
    limit: float | None = None,
    repeats: int = 0,
    batch: object = "N",
    is_normed: bool = False,
) -> bytes:
    """Y = X @ WEIGHT * factor, with X over the norm of the whole batch if `is_normed`.

    NaN where a value is above `limit`; slower by `repeats` products of [4, 4].
    """
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    nodes, stored, last = [], [onnx.numpy_helper.from_array(WEIGHT * np.float32(factor), "w")], "x"
    if limit is not None:
        stored += [
            onnx.numpy_helper.from_array(np.array(value, np.float32), name)
            for name, value in (("limit", limit), ("zero", 0.0))
        ]
        nodes += [
            helper.make_node("Sub", ["limit", "x"], ["left"]),
            helper.make_node("Sqrt", ["left"], ["root"]),
            helper.make_node("Mul", ["root", "zero"], ["nothing"]),
            helper.make_node("Add", ["x", "nothing"], ["checked"]),
        ]
        last = "checked"
    if is_normed:
        nodes.append(helper.make_node("ReduceL2", [last], ["norm"], keepdims=0))
        nodes.append(helper.make_node("Div", [last, "norm"], ["normed"]))
        last = "normed"
    if repeats:
        # Each turns the row round twice. A loop is opened in less time than so many nodes.
        stored.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32)[::-1].copy(), "turn"))
        stored.append(onnx.numpy_helper.from_array(np.array(repeats), "repeats"))
        nodes.append(helper.make_node("Loop", ["repeats", "", last], ["turned"], body=_make_turns()))
        last = "turned"
    nodes.append(helper.make_node("MatMul", [last, "w"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", float32, [batch, 4])],
        [helper.make_tensor_value_info("y", float32, [batch, 2])],
        stored,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    data: bytes = model.SerializeToString()
    return data


def _make_turns() -> onnx.GraphProto:
    helper, kinds = onnx.helper, onnx.TensorProto
    return helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("MatMul", ["row", "turn"], ["half"]),
            helper.make_node("MatMul", ["half", "turn"], ["whole"]),
        ],
        "turns",
        [
            helper.make_tensor_value_info("round", kinds.INT64, []),
            helper.make_tensor_value_info("go", kinds.BOOL, []),
            helper.make_tensor_value_info("row", kinds.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go_on", kinds.BOOL, []),
            helper.make_tensor_value_info("whole", kinds.FLOAT, None),
        ],
    )


def make_endless_model() -> bytes:
    """Y = X @ WEIGHT, after a loop that never ends."""
    helper, kinds = onnx.helper, onnx.TensorProto
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Identity", ["last"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("round", kinds.INT64, []),
            helper.make_tensor_value_info("go", kinds.BOOL, []),
            helper.make_tensor_value_info("last", kinds.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go_on", kinds.BOOL, []),
            helper.make_tensor_value_info("next", kinds.FLOAT, None),
        ],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Loop", ["", "yes", "x"], ["last_x"], body=body),
            helper.make_node("MatMul", ["last_x", "w"], ["y"]),
        ],
        "endless",
        [helper.make_tensor_value_info("x", kinds.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", kinds.FLOAT, ["N", 2])],
        [onnx.numpy_helper.from_array(np.array(True), "yes"), onnx.numpy_helper.from_array(WEIGHT, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    data: bytes = model.SerializeToString()
    return data


def endless(maker: PackageMaker) -> PackageMaker:
    """Return a maker of packages whose self-test never ends."""
    return dataclasses.replace(maker, artifacts={**maker.artifacts, "model.onnx": make_endless_model()})


def changed(maker: PackageMaker, factor: float = 1.0, **model: Any) -> PackageMaker:
    """Return a maker of packages whose model is `make_model(factor, ...)` and passes its own self-test."""
    golden = (_GOLDEN @ (WEIGHT * np.float32(factor))).astype(np.float32)
    artifacts = {"model.onnx": make_model(factor, **model), "golden/y.bin": golden.tobytes()}
    return dataclasses.replace(maker, artifacts={**maker.artifacts, **artifacts})


def with_variant(
    maker: PackageMaker, name: str, factor: float, *, is_normed: bool = False
) -> tuple[PackageMaker, Variant]:
    """Return a maker whose packages hold a second variant, and that variant."""
    paths = {"model": f"variants/{name}/model.onnx", "golden": f"variants/{name}/output0.bin"}
    values = _GOLDEN / np.linalg.norm(_GOLDEN) if is_normed else _GOLDEN
    golden = (values @ (WEIGHT * np.float32(factor))).astype(np.float32)
    output = GoldenOutput(name="y", dtype="float32", shape=(1, 2), path=paths["golden"], atol=1e-5, rtol=1e-5)
    variant = Variant(
        name,
        BackendChoice("ort", paths["model"], {"threads": 1}),
        Golden(maker.manifest().golden.inputs, (output,)),
        {"score": {"metric": "top1", "value": 0.6}},
    )
    model = make_model(factor, is_normed=is_normed)
    artifacts = {**maker.artifacts, paths["model"]: model, paths["golden"]: golden.tobytes()}
    roles = {**maker.roles, paths["model"]: "model", paths["golden"]: "golden"}
    return dataclasses.replace(maker, artifacts=artifacts, roles=roles), variant


def write(maker: PackageMaker, folder: Path, version: str, *, name: str = "linear", **changes: Any) -> Path:
    path = folder / f"{name}-{version}.edgepkg"
    maker.write(path, version=version, name=name, **changes)
    return path


def load(service: Running, name: str = "linear") -> Any:
    return ask(service, post_bytes(f"/v2/repository/models/{name}/load", b""))


def unload(service: Running) -> Any:
    return ask(service, post_bytes("/v2/repository/models/linear/unload", b""))


def infer(service: Running, x: Any = X, name: str = "linear") -> Any:
    return ask(service, infer_bytes(x, path=f"/v2/models/{name}/infer"))


def served_version(service: Running) -> str:
    """Return the version of `linear` that answers."""
    version: str = infer(service).json["model_version"]
    return version


def index(service: Running) -> list[tuple[str, str, str, str]]:
    lines = ask(service, post_bytes("/v2/repository/index", b"")).json
    return [(line["name"], line["version"], line["state"], line["reason"]) for line in lines]


def statistics(service: Running, name: str = "linear", version: str | None = None) -> dict[str, Any]:
    path = f"/v2/models/{name}/stats" if version is None else f"/v2/models/{name}/versions/{version}/stats"
    (found,) = ask(service, get_bytes(path)).json["model_stats"]
    return dict(found)


def metrics(service: Running) -> str:
    return ask(service, get_bytes("/metrics")).body.decode()


def ask_many(service: Running, count: int, x: Any = X, pause_s: float = 0.0) -> Iterator[Any]:
    """Yield the outputs of `count` requests over one connection."""
    from edgekit_runtime import Client

    with Client(service.socket_path) as client:
        for _ in range(count):
            yield client.infer("linear", {"x": x})["y"]
            time.sleep(pause_s)


def read_json(text: str) -> Any:
    return json.loads(text)


@dataclasses.dataclass
class FailingVerifier:
    """One whose process may be gone."""

    trust: Verifier
    is_gone: bool = False

    def verify(self, envelope: bytes, predicate_type: str, where: str) -> tuple[Statement, str]:
        if self.is_gone:
            raise UnavailableError("ended before it answered")
        return self.trust.verify(envelope, predicate_type, where)
