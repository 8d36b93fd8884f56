"""The memory of one inference: requests that would take too much, and what large ones leave behind."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import (
    Array,
    Manifest_,
    Replies,
    Reply,
    Running,
    ask,
    get_bytes,
    make_config,
    post_bytes,
    running,
    write_signed,
)

from edgekit_runtime.errors import RequestError
from edgekit_runtime.package.figures import RUN_MEMORY_FIGURE
from edgekit_runtime.protocol.infer_request import InferTensor
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.config import Inference
from edgekit_runtime.service.options.model import ModelOptions, SchedulingLimits
from edgekit_runtime.service.scheduling.run_memory import InputLimit, RunMemory
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_runtime.tensors import TensorSpec

DIGITS = Path(__file__).parents[2] / "models" / "tiny" / "digits_cnn.onnx"
RATIO = 49.0  # of the digits CNN, as the toolkit estimates it
ROW_BYTES = 256
MANY_ROWS = 10_000  # take 126 MB beside their inputs, 142 where measured
MB = 1_000_000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def write_digits(maker: PackageMaker, path: Path, figures: Mapping[str, Any]) -> None:
    """Write the digits CNN: logits[N, 10] of image[N, 1, 8, 8]."""
    session = OrtSession(DIGITS)
    x = np.random.default_rng(0).random((1, 1, 8, 8), np.float32)
    expected = session.run({"image": x})
    session.close()
    write_signed(
        maker, path, Manifest_("digits", "1.0.0", {}, {"image": x}), expected, DIGITS.read_bytes(), figures
    )


def ask_rows(service: Running, rows: int) -> Reply:
    x: Array = np.zeros((rows, 1, 8, 8), np.float32)
    entry = {
        "name": "image",
        "datatype": "FP32",
        "shape": list(x.shape),
        "parameters": {"binary_data_size": x.nbytes},
    }
    text = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    fields = f"Inference-Header-Content-Length: {len(text)}\r\n"
    return ask(service, post_bytes("/v2/models/digits/infer", text + x.tobytes(), fields))


STATED = {"memory_estimate": {RUN_MEMORY_FIGURE: RATIO}}


@pytest.mark.parametrize(("figures", "ratio"), [(STATED, RATIO), ({}, 64 * (256 + 40) / 256)])
def test_rows_beyond_the_memory_of_a_run_are_refused_with_their_largest_number(
    maker: PackageMaker, tmp_path: Path, figures: Mapping[str, Any], ratio: float
) -> None:
    write_digits(maker, tmp_path / "digits.edgepkg", figures)
    limit = 20 * MB
    most = int(limit / ratio) // ROW_BYTES
    config = make_config(tmp_path, inference=Inference(max_run_bytes=limit))
    with running(config, PackageFiles([tmp_path], maker.trust)) as service:
        assert ask_rows(service, most).status == 200
        for rows in (most + 1, 100_000):
            reply = ask_rows(service, rows)
            assert reply.status == 413
            assert f"at most {most} rows" in reply.json["error"]
            assert str(limit) in reply.json["error"]


def test_rows_of_a_configuration_without_limits_are_bounded(maker: PackageMaker, tmp_path: Path) -> None:
    """250,000 rows of a model of 78 kB took 4 GB."""
    write_digits(maker, tmp_path / "digits.edgepkg", {})
    with running(make_config(tmp_path), PackageFiles([tmp_path], maker.trust)) as service:
        assert ask_rows(service, 250_000).status == 413
        assert ask_rows(service, 100).status == 200


def test_inputs_for_which_the_package_was_made_are_always_taken() -> None:
    memory = RunMemory(1000.0, {"x": ("float32", (4, 100))})
    limit = InputLimit(memory, [TensorSpec("x", "float32", ("N", 100))], 1)
    dtype = np.dtype("float32")
    limit.check([InferTensor("x", dtype, (4, 100))])
    with pytest.raises(RequestError, match="at most 4 rows"):
        limit.check([InferTensor("x", dtype, (5, 100))])


def test_limit_of_a_model_without_rows_is_stated_in_bytes() -> None:
    memory = RunMemory(10.0, {"x": ("float32", (1, 3, 8, 8))})
    limit = InputLimit(memory, [TensorSpec("x", "float32", (1, 3, "H", "W"))], 100_000)
    with pytest.raises(RequestError, match="at most 10000 bytes"):
        limit.check([InferTensor("x", np.dtype("float32"), (1, 3, 800, 800))])


def test_calls_of_a_batch_keep_the_limit_of_a_run_together(maker: PackageMaker, tmp_path: Path) -> None:
    write_identity_of_any_width(
        maker, tmp_path / "wide.edgepkg", {"memory_estimate": {RUN_MEMORY_FIGURE: 1000.0}}
    )
    limits = SchedulingLimits(max_batch=4, max_delay_s=1.0)
    config = make_config(
        tmp_path,
        inference=Inference(max_run_bytes=1_000_000),
        models={"wide": ModelOptions(scheduling=limits)},
    )
    with running(config, PackageFiles([tmp_path], maker.trust)) as service, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(service.connect()) for _ in range(2)]
        for client in clients:
            client.sendall(wide_bytes(200))  # 800 bytes each, of 1000
        assert [Replies(client).next().status for client in clients] == [200, 200]
        assert count_runs(service) == 2


def write_identity_of_any_width(maker: PackageMaker, path: Path, figures: Mapping[str, Any]) -> None:
    """Write `wide`: y[N, W] of x[N, W], made for a width of 10."""
    helper = onnx.helper
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", "W"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "wide", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.ones((1, 10), np.float32)
    sketch = Manifest_("wide", "1.0.0", {}, {"x": x})
    write_signed(maker, path, sketch, {"y": x}, model.SerializeToString(), figures)


def wide_bytes(width: int) -> bytes:
    entry = {"name": "x", "datatype": "FP32", "shape": [1, width], "data": [1.5] * width}
    return post_bytes("/v2/models/wide/infer", json.dumps({"inputs": [entry]}).encode())


def count_runs(service: Running) -> int:
    (stated,) = ask(service, get_bytes("/v2/models/wide/stats")).json["model_stats"]
    count: int = stated["execution_count"]
    return count


def test_session_gives_back_what_a_large_run_took() -> None:
    session = OrtSession(DIGITS)
    small = {"image": np.zeros((1, 1, 8, 8), np.float32)}
    large = {"image": np.ones((MANY_ROWS, 1, 8, 8), np.float32)}
    session.run(small)
    before = resident_bytes()
    session.run(large)
    assert resident_bytes() - before > 60 * MB
    session.trim(small)
    assert resident_bytes() - before < 20 * MB
    assert len(session.run(large)["logits"]) == MANY_ROWS


def test_service_gives_back_what_a_large_request_took(maker: PackageMaker, tmp_path: Path) -> None:
    write_digits(maker, tmp_path / "digits.edgepkg", STATED)
    with running(make_config(tmp_path), PackageFiles([tmp_path], maker.trust)) as service:
        assert ask_rows(service, 1).status == 200
        before = resident_bytes()
        assert ask_rows(service, MANY_ROWS).status == 200
        assert resident_bytes() - before < 40 * MB


def test_usual_batches_and_small_runs_are_not_trimmed() -> None:
    memory = RunMemory(RATIO, {"image": ("float32", (1, 1, 8, 8))})
    assert memory.should_trim(MANY_ROWS * ROW_BYTES, 1)
    assert not memory.should_trim(MANY_ROWS * ROW_BYTES, MANY_ROWS)
    assert not memory.should_trim(100 * ROW_BYTES, 1)
