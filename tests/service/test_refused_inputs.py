"""Inputs that fit the specs of a model and that its engine refuses: the client's fault, and said so."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Array, X, ask, infer_bytes, make_config, running

from edgekit_runtime.errors import BackendError, RefusedInputError
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.model import ModelOptions, SchedulingLimits
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

TABLE = np.arange(16, dtype=np.float32).reshape(8, 2)
HUGE = numpy_helper.from_array(np.int64([1 << 40, 1, 4]), "size")
GOOD, BAD = X, np.float32([[9, 0, 0, 0]])  # the first value of a row is an index into the table


def make_model(nodes: list[onnx.NodeProto], *initializers: onnx.TensorProto) -> bytes:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])
    graph = helper.make_graph(nodes, "refusing", [x], [y], initializers)
    opset = [helper.make_opsetid("", 13)]
    data: bytes = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    return data


@pytest.fixture(scope="module")
def lookup() -> bytes:
    """y = TABLE[int(x[:, 0])]."""
    return make_model(
        [
            helper.make_node("Gather", ["x", "zero"], ["first"], axis=1),
            helper.make_node("Cast", ["first"], ["index"], to=TensorProto.INT64),
            helper.make_node("Gather", ["table", "index"], ["y"]),
        ],
        numpy_helper.from_array(np.int64(0), "zero"),
        numpy_helper.from_array(TABLE, "table"),
    )


def look_up(x: Array) -> Array:
    found: Array = TABLE[x[:, 0].astype(np.int64)]
    return found


@pytest.mark.parametrize(
    "options",
    [
        ModelOptions(),
        ModelOptions(scheduling=SchedulingLimits(max_batch=4)),
        ModelOptions(isolated=True),
    ],
    ids=["alone", "batches", "isolated"],
)
def test_input_that_the_engine_refuses_is_answered_with_400_and_others_are_served(
    maker: PackageMaker, lookup: bytes, tmp_path: Path, options: ModelOptions
) -> None:
    golden = np.float32([[-1, -0.5, 0, 0.5]])
    artifacts = {**maker.artifacts, "model.onnx": lookup, "golden/y.bin": look_up(golden).tobytes()}
    maker = dataclasses.replace(maker, artifacts=artifacts)
    maker.write(tmp_path / "linear.edgepkg")
    config = make_config(tmp_path, models={"linear": options})
    with running(config, PackageFiles([tmp_path / "linear.edgepkg"], maker.trust)) as service:
        refused = ask(service, infer_bytes(BAD))
        assert (refused.status, "out of data bounds" in refused.json["error"]) == (400, True)
        assert ask(service, infer_bytes(GOOD)).binary == look_up(GOOD).tobytes()


def test_refused_input_is_told_from_a_fault_of_the_engine(lookup: bytes) -> None:
    session = OrtSession(lookup, OrtOptions())
    with pytest.raises(RefusedInputError):
        session.run({"x": BAD})
    session.interrupt()
    with pytest.raises(BackendError) as caught:
        session.run({"x": GOOD})
    assert type(caught.value) is BackendError


def test_memory_that_is_lacking_is_no_fault_of_the_input() -> None:
    model = make_model([helper.make_node("Expand", ["x", "size"], ["y"])], HUGE)
    with pytest.raises(BackendError, match="llocat") as caught:
        OrtSession(model, OrtOptions()).run({"x": GOOD})
    assert type(caught.value) is BackendError
