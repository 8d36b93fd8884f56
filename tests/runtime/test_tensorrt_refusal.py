"""A builder of TensorRT that gives no engine: the refusal names what its log says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from edgekit_runtime.sessions.tensorrt.child import build_all


class Logger:
    Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0, WARNING=2)


def build_with(folder: Path, said: list[tuple[int, str]]) -> dict[str, Any]:
    """Build with a TensorRT that says `said`, (severity, message) each, and gives no engine."""

    class Builder:
        def __init__(self, log: Any) -> None:
            self.log = log

        def create_network(self, _flags: int) -> Any:
            empty = {"num_inputs": 0, "num_outputs": 0, "num_layers": 0}
            return SimpleNamespace(**empty, get_input=None, get_output=None, get_layer=None)

        def create_builder_config(self) -> Any:
            return SimpleNamespace(create_timing_cache=lambda _data: None)

        def build_serialized_network(self, _network: Any, _config: Any) -> None:
            for severity, message in said:
                self.log.log(severity, message)

    trt = SimpleNamespace(
        __version__="10.3.0",
        ILogger=Logger,
        Builder=Builder,
        BuilderFlag=SimpleNamespace(),
        LayerType=SimpleNamespace(QUANTIZE="quantize", DEQUANTIZE="dequantize"),
        OnnxParser=lambda _network, _log: SimpleNamespace(parse=lambda _model: True),
    )
    (folder / "model.onnx").write_bytes(b"")
    request = {"precisions": ["fp32"], "shapes": {}, "workspace_bytes": None, "compute_capability": None}
    return build_all(trt, request, folder)


def test_builder_without_an_engine_is_refused_with_the_errors_of_its_log(tmp_path: Path) -> None:
    answer = build_with(tmp_path, [(1, "no kernel"), (2, "a warning"), (0, "no memory")])
    assert answer == {"version": "10.3.0", "built": [], "refused": {"fp32": ["no kernel", "no memory"]}}


def test_builder_without_an_engine_and_without_an_error_is_refused_all_the_same(tmp_path: Path) -> None:
    answer = build_with(tmp_path, [])
    assert answer["refused"] == {"fp32": ["the builder gave no engine and no reason"]}


def test_builder_without_an_engine_leaves_no_plan(tmp_path: Path) -> None:
    build_with(tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
