"""Models whose inputs may end the process that runs them, and what the log says of a crash."""

import json
import platform
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.runtime.conftest import PackageMaker
from tests.runtime.slot_cases import write_keys
from tests.service.serve_parts import Served
from tests.service.service_parts import (
    Manifest_,
    Reply,
    Running,
    X,
    Y,
    ask,
    infer_bytes,
    make_config,
    post_bytes,
    running,
    write_signed,
)
from tests.service.wiring_parts import load
from tests.service.worker_parts import ask_again
from tests.waiting import bounded

from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.archive import OpenedPackage, read_package
from edgekit_runtime.package.figures import INTEGER_DIVISION_FIGURE
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.options.model import Isolation, ModelOptions
from edgekit_runtime.service.serving import loader
from edgekit_runtime.service.serving.hostile_inputs import can_trap, find_hazard
from edgekit_runtime.service.workers.supervisor import OWN_SHARE
from edgekit_runtime.slots import Slots

SMALLEST = np.iinfo(np.int64).min
is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
on_x86 = pytest.mark.skipif(not is_x86, reason="needs a processor that traps, of the kind x86")


def write_divider(
    maker: PackageMaker,
    path: Path,
    operator: str = "Div",
    *,
    dtype: str = "int64",
    version: str = "1.0.0",
    figures: dict[str, Any] | None = None,
) -> None:
    """Write `divider`, c[N] = a[N] / b[N]."""
    helper, kind = onnx.helper, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    a, b, c = (helper.make_tensor_value_info(name, kind, ["N"]) for name in "abc")
    graph = helper.make_graph([helper.make_node(operator, ["a", "b"], ["c"])], "g", [a, b], [c])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    golden = {"a": np.array([7, 9], dtype), "b": np.array([1, 1], dtype)}
    expected = {"c": golden["a"] % 1 if operator == "Mod" else golden["a"]}
    if operator == "Add":
        expected = {"c": golden["a"] + golden["b"]}
    sketch = Manifest_("divider", version, {}, golden)
    write_signed(maker, path, sketch, expected, model.SerializeToString(), figures or {})


def divide_bytes(a: int, b: int, dtype: str = "INT64") -> bytes:
    entries = [
        {"name": name, "datatype": dtype, "shape": [1], "data": [value]}
        for name, value in (("a", a), ("b", b))
    ]
    return post_bytes("/v2/models/divider/infer", json.dumps({"inputs": entries}).encode())


def divide(service: Running, a: int, b: int, dtype: str = "INT64") -> Reply:
    return ask(service, divide_bytes(a, b, dtype))


@pytest.fixture
def both(maker: PackageMaker, tmp_path: Path) -> Path:
    """A folder with `linear` and `divider`."""
    maker.write(tmp_path / "linear.edgepkg")
    write_divider(maker, tmp_path / "divider.edgepkg")
    return tmp_path


@on_x86
@pytest.mark.parametrize("operator", ["Div", "Mod"])
def test_division_that_traps_costs_no_other_model_an_answer(
    maker: PackageMaker, tmp_path: Path, operator: str
) -> None:
    maker.write(tmp_path / "linear.edgepkg")
    write_divider(maker, tmp_path / "divider.edgepkg", operator)
    with running(make_config(tmp_path), PackageFiles([tmp_path], maker.trust)) as service:
        assert divide(service, 8, 2).json["outputs"][0]["data"] == [4 if operator == "Div" else 0]
        assert divide(service, SMALLEST, -1).status == 503
        assert ask(service, infer_bytes(X)).binary == Y


@on_x86
def test_requests_that_trap_get_no_version_rejected(maker: PackageMaker, tmp_path: Path) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    for version in ("1.0.0", "2.0.0"):
        write_divider(maker, tmp_path / "divider.edgepkg", version=version)
        slots.install(tmp_path / "divider.edgepkg")
        slots.begin_start("divider").package.close()
        slots.confirm("divider", version)
    isolation = Isolation(max_crashes=1, max_delay_s=0.1)
    config = make_config(tmp_path, models={"divider": ModelOptions(isolated=True, isolation=isolation)})
    with running(config, InstalledModels(slots)) as service:
        for _ in range(2):
            assert divide(service, SMALLEST, -1).status == 503
            reply = ask_again(service, divide_bytes(8, 2))
            assert reply.json["model_version"] == "2.0.0"
    assert slots.load("divider").state.rejected == ()


@on_x86
def test_package_that_says_it_does_not_divide_stays_in_the_service(
    maker: PackageMaker, tmp_path: Path
) -> None:
    write_divider(maker, tmp_path / "divider.edgepkg", figures={INTEGER_DIVISION_FIGURE: False})
    with running(make_config(tmp_path), PackageFiles([tmp_path], maker.trust)) as service:
        assert divide(service, 8, 2).status == 200
        assert service.call(lambda: service.service.workers.models) == ()


@on_x86
def test_model_that_is_not_to_be_isolated_stays_in_the_service(maker: PackageMaker, both: Path) -> None:
    config = make_config(both, models={"divider": ModelOptions(isolated=False)})
    with running(config, PackageFiles([both], maker.trust)) as service:
        assert divide(service, 8, 2).status == 200
        assert service.call(lambda: service.service.workers.models) == ()


@on_x86
def test_swap_to_a_version_that_divides_moves_the_model_and_its_connections(
    maker: PackageMaker, tmp_path: Path
) -> None:
    """Requests with a head that was let through before reach the process too."""
    write_divider(maker, tmp_path / "1.edgepkg", "Add")
    with running(make_config(tmp_path), PackageFiles([tmp_path], maker.trust)) as service:
        for _ in range(3):
            assert divide(service, 8, 2).json["outputs"][0]["data"] == [10]
        write_divider(maker, tmp_path / "2.edgepkg", version="2.0.0")
        assert load(service, "divider").status == 200
        for _ in range(3):
            assert divide(service, 8, 2).json["outputs"][0]["data"] == [4]
        assert len(service.call(lambda: service.service.workers.models)) == 1


@on_x86
def test_version_that_divides_is_not_tried_where_no_process_is_and_serves_on(
    maker: PackageMaker, tmp_path: Path
) -> None:
    write_divider(maker, tmp_path / "1.edgepkg", "Add")
    config = make_config(tmp_path, models={"divider": ModelOptions(rollout="canary")})
    with running(config, PackageFiles([tmp_path], maker.trust)) as service:
        write_divider(maker, tmp_path / "2.edgepkg", version="2.0.0")
        reply = load(service, "divider")
        assert (reply.status, "isolated = true" in reply.json["error"]) == (503, True)
        assert divide(service, 8, 2).json["outputs"][0]["data"] == [10]


@on_x86
def test_load_that_may_take_long_may_do_so_in_a_process_of_its_own(
    maker: PackageMaker, tmp_path: Path
) -> None:
    asked = []

    def open_elsewhere(package: OpenedPackage, options: ModelOptions, beside: Any) -> Any:
        asked.append(options.isolation)
        raise BackendError("seen")

    write_divider(maker, tmp_path / "divider.edgepkg")
    options = ModelOptions(load_timeout_s=600.0)
    package = read_package(tmp_path / "divider.edgepkg", maker.trust)
    with package, pytest.raises(BackendError, match="seen"):
        loader.load(package, options, open_elsewhere)
    (isolation,) = asked
    assert OWN_SHARE * isolation.start_timeout_s >= 600.0


def make_hostile(name: str) -> tuple[onnx.ModelProto, dict[str, Any], dict[str, Any]]:
    """Return a model whose clients set a size, a trip count or positions, and its golden tensors."""
    helper, kinds = onnx.helper, onnx.TensorProto
    value = helper.make_tensor_value_info
    x, y = value("x", kinds.INT64, ["N"]), value("y", kinds.INT64, ["N"])
    if name == "sizes":
        zero = helper.make_tensor("value", kinds.INT64, [1], [0])
        nodes = [helper.make_node("ConstantOfShape", ["x"], ["y"], value=zero)]
        inputs, expected = {"x": np.array([3])}, np.zeros(3, np.int64)
    elif name == "loop":
        goes, state = value("goes", kinds.BOOL, []), value("z", kinds.INT64, ["N"])
        nothing = helper.make_graph([], "nothing", [value("i", kinds.INT64, []), goes, state], [goes, state])
        nodes = [
            helper.make_node("ReduceSum", ["x"], ["trips"], keepdims=0),
            helper.make_node("Loop", ["trips", "", "x"], ["y"], body=nothing),
        ]
        inputs, expected = {"x": np.array([3])}, np.array([3])
    else:
        nodes = [helper.make_node("GridSample", ["x", "grid"], ["y"], padding_mode="reflection")]
        x, y = value("x", kinds.FLOAT, ["N", 1, 4, 4]), value("y", kinds.FLOAT, ["N", 1, 2, 2])
        inputs = {"x": np.zeros((1, 1, 4, 4), np.float32), "grid": np.zeros((1, 2, 2, 2), np.float32)}
        expected = np.zeros((1, 1, 2, 2), np.float32)
    grids = [value("grid", kinds.FLOAT, ["N", 2, 2, 2])] if "grid" in inputs else []
    graph = helper.make_graph(nodes, "g", [x, *grids], [y])
    opsets = [helper.make_opsetid("", 16)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), inputs, {"y": expected}


def write_hostile(maker: PackageMaker, path: Path, name: str) -> None:
    model, inputs, expected = make_hostile(name)
    sketch = Manifest_(name, "1.0.0", {}, inputs)
    write_signed(maker, path, sketch, expected, model.SerializeToString(), {})


@pytest.mark.parametrize(
    ("name", "reason", "takes_memory"),
    [
        ("sizes", "sizes of tensors", True),
        ("loop", "runs a loop as often", True),
        ("grid", "GridSample", False),
    ],
)
def test_model_that_a_client_can_end_or_occupy_has_a_hazard(
    maker: PackageMaker, tmp_path: Path, name: str, reason: str, takes_memory: bool
) -> None:
    write_hostile(maker, tmp_path / "hostile.edgepkg", name)
    with read_package(tmp_path / "hostile.edgepkg", maker.trust) as package:
        hazard = find_hazard(package)
    assert hazard is not None
    assert reason in hazard.reason
    assert (hazard.max_data_bytes is not None) is takes_memory


def test_model_that_divides_and_takes_sizes_has_the_limit_on_memory_too(
    maker: PackageMaker, tmp_path: Path
) -> None:
    model, inputs, expected = make_hostile("sizes")
    model.graph.node.insert(0, onnx.helper.make_node("Div", ["x", "x"], ["unused"]))
    sketch = Manifest_("sizes", "1.0.0", {}, inputs)
    write_signed(maker, tmp_path / "sizes.edgepkg", sketch, expected, model.SerializeToString(), {})
    with read_package(tmp_path / "sizes.edgepkg", maker.trust) as package:
        hazard = find_hazard(package)
    assert hazard is not None
    assert hazard.max_data_bytes is not None


def test_isolation_of_the_user_keeps_its_settings_and_gets_the_limits_of_a_hazard(
    maker: PackageMaker, tmp_path: Path
) -> None:
    write_hostile(maker, tmp_path / "sizes.edgepkg", "sizes")
    taken: list[ModelOptions] = []

    def open_remote(_: OpenedPackage, options: ModelOptions, __: object) -> Any:
        taken.append(options)
        raise BackendError("seen")

    for isolation in (Isolation(niceness=3), Isolation(max_crashes=7, max_data_bytes=9)):
        with (
            read_package(tmp_path / "sizes.edgepkg", maker.trust) as package,
            pytest.raises(BackendError, match="seen"),
        ):
            options = ModelOptions(isolated=True, isolation=isolation)
            loader.load(package, options, open_remote)
    first, second = (options.isolation for options in taken)
    assert (first.niceness, first.max_data_bytes is None) == (3, False)
    assert first.max_crashes > 1_000_000
    assert (second.max_crashes, second.max_data_bytes) == (7, 9)


def ask_zeros(service: Running, count: int) -> Reply:
    entry = {"name": "x", "datatype": "INT64", "shape": [1], "data": [count]}
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    body = json.dumps({"inputs": [entry], "outputs": outputs}).encode()
    return ask(service, post_bytes("/v2/models/sizes/infer", body))


def test_size_that_takes_all_memory_costs_no_other_model_an_answer(
    maker: PackageMaker, tmp_path: Path
) -> None:
    maker.write(tmp_path / "linear.edgepkg")
    write_hostile(maker, tmp_path / "sizes.edgepkg", "sizes")
    with running(make_config(tmp_path), PackageFiles([tmp_path], maker.trust)) as service:
        assert ask_zeros(service, 5).status == 200
        assert ask_zeros(service, 10**10).status >= 500  # 80 GB
        assert ask(service, infer_bytes(X)).binary == Y


def test_packages_without_the_record_are_searched_for_the_operators(
    maker: PackageMaker, tmp_path: Path
) -> None:
    maker.write(tmp_path / "linear.edgepkg")
    write_divider(maker, tmp_path / "div.edgepkg")
    write_divider(maker, tmp_path / "mod.edgepkg", "Mod", figures={INTEGER_DIVISION_FIGURE: True})
    write_divider(maker, tmp_path / "no.edgepkg", figures={INTEGER_DIVISION_FIGURE: False})
    found = {}
    for path in sorted(tmp_path.iterdir()):
        with read_package(path, maker.trust) as package:
            found[path.stem] = (can_trap(package, "x86_64"), can_trap(package, "aarch64"))
    assert found == {
        "linear": (False, False),
        "div": (True, False),
        "mod": (True, False),
        "no": (False, False),
    }


@on_x86
def test_log_names_the_model_whose_inference_ended_the_service(maker: PackageMaker, tmp_path: Path) -> None:
    write_divider(maker, tmp_path / "linear.edgepkg", figures={INTEGER_DIVISION_FIGURE: False})
    write_keys(tmp_path / "keys")
    service: Any = Served(tmp_path, "--keys", str(tmp_path / "keys"))
    with bounded(service.process):
        service.wait_ready()
        with pytest.raises(OSError):
            divide(service, SMALLEST, -1)
        code, said = service.end_by_itself()
    assert code == -signal.SIGFPE
    assert "in inference of divider 1.0.0" in said


def test_loop_without_inputs_is_a_hazard_like_a_file_that_cannot_be_read(
    maker: PackageMaker, tmp_path: Path
) -> None:
    model, inputs, expected = make_hostile("loop")
    del model.graph.node[1].input[:]
    sketch = Manifest_("loop", "1.0.0", {}, inputs)
    write_signed(maker, tmp_path / "loop.edgepkg", sketch, expected, model.SerializeToString(), {})
    with read_package(tmp_path / "loop.edgepkg", maker.trust) as package:
        hazard = find_hazard(package)
    assert hazard is not None
    assert "cannot be read" in hazard.reason
