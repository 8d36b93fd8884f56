"""LiteRT in half precision: which targets offer it, and what an emulated Cortex-A76 computes."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.toolkit.package_run import mlp, package, read_only, samples, tiny

from edgekit_runtime.errors import EdgekitError, TargetError
from edgekit_runtime.system.engines import EngineMissingError
from edgekit_toolkit.openings.emulated_processor import EMULATED, find_emulated_python
from edgekit_toolkit.pipeline.untimed_forms import find_untimed_support
from edgekit_toolkit.quantize.forms import FLOAT16_ARITHMETIC, FLOAT32, Form
from edgekit_toolkit.targets.loader import load_target

pytest.importorskip("ai_edge_litert", reason="ai-edge-litert is not installed")
from edgekit_toolkit.models.tflite import TfliteModel
from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
from edgekit_toolkit.tflite.convert import convert
from edgekit_toolkit.tflite.flatbuffer import parsed


def _why_no_emulator() -> str:
    try:
        find_emulated_python()
    except EngineMissingError as error:
        return str(error)
    return ""


emulated = pytest.mark.skipif(bool(_why_no_emulator()), reason=_why_no_emulator())
CAPABLE = ("android-arm64", "jetson-agx-orin", "jetson-orin-nano", "rpi5")


@pytest.fixture
def model() -> TfliteModel:
    built = LiteRtQuantizer(convert(mlp(1), {"N": 1}), threads=1).build(Form(FLOAT16_ARITHMETIC))
    assert built is not None
    return built


def test_form_adds_metadata_to_the_float_model_and_nothing_else(model: TfliteModel) -> None:
    floats = LiteRtQuantizer(convert(mlp(1), {"N": 1}), threads=1).build(Form(FLOAT32))
    assert floats is not None
    content = parsed(model.content)
    entries = {bytes(entry.name).decode(): entry.buffer for entry in content.metadata}
    assert bytes(content.buffers[entries["reduced_precision_support"]].data) == b"fp16accfp16"
    assert 0 < model.size_bytes - floats.size_bytes < 200
    assert [tensor.dtype for tensor in model.stored_tensors()][:2] == ["float32", "float32"]


@pytest.mark.parametrize("name", ["rpi4", "rpi-zero-2w", "x86-64"])
def test_target_whose_cores_lack_the_arithmetic_refuses_the_form(name: str) -> None:
    with pytest.raises(TargetError, match="have no fp16 arithmetic"):
        find_untimed_support(FLOAT16_ARITHMETIC, load_target(name))


@pytest.mark.parametrize("name", CAPABLE)
def test_host_without_an_emulator_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))
    with pytest.raises(EngineMissingError, match="edgekit hil image"):
        find_untimed_support(FLOAT16_ARITHMETIC, load_target(name))


@emulated
def test_emulated_processor_computes_in_half_precision(model: TfliteModel) -> None:
    feeds = {"x": samples(1, 3)["x"]}
    (here,) = TfliteModel(model.content).open(threads=1)(feeds)
    (there,) = model.open(threads=1)(feeds)
    error = float(np.abs(there - here).max() / np.ptp(here))
    assert 2e-5 < error < 5e-3  # float32 differs by 1e-7, half precision has 11 bits
    np.testing.assert_array_equal(there, there.astype(np.float16))


@emulated
def test_model_that_the_engine_refuses_leaves_the_processor_usable(model: TfliteModel) -> None:
    feeds = {"x": samples(1, 3)["x"]}
    with pytest.raises(EdgekitError):
        EMULATED.run("litert", b"no model", feeds)
    assert len(model.open(threads=1)(feeds)) == 1


@emulated
@pytest.mark.usefixtures("home")
def test_package_carries_the_form_as_a_variant_that_was_not_timed(tmp_path: Path) -> None:
    source, data = tiny("italy_power_mlp")
    options = ("--backend", "ort", "--search-seconds", "0", "--budget", "size=1MB,drop=20%")
    done = package(source, tmp_path, *data, *options, "--also", FLOAT16_ARITHMETIC, target="rpi5")
    assert done.code == 0, done.stderr
    report = json.loads(next(tmp_path.glob("*.report.json")).read_text())
    (variant,) = report["variants"]
    assert variant["name"] == "litert-float16-arithmetic"
    latencies = [variant["figures"][name] for name in ("latency", "host_latency")]
    assert {(figure["value"], figure["label"]) for figure in latencies} == {(None, "not measured")}
    assert variant["figures"]["score"]["on"] == "Cortex-A76, emulated"
    with read_only(tmp_path) as opened:
        (carried,) = opened.manifest.variants
        assert opened.manifest.backend.name == "ort"
        assert carried.figures["needs_feature"] == "asimdhp"


@emulated
@pytest.mark.usefixtures("home")
def test_limit_on_latency_leaves_an_untimed_form_out(tmp_path: Path) -> None:
    source, data = tiny("italy_power_mlp")
    options = ("--backend", "ort", "--search-seconds", "0", "--budget", "latency=1s,drop=20%")
    done = package(source, tmp_path, *data, *options, "--also", FLOAT16_ARITHMETIC, target="rpi5")
    report = json.loads(next(tmp_path.glob("*.report.json")).read_text())
    assert done.code == 0, done.stderr
    assert report["variants"] == []
    assert any("no figure shows that it keeps the limit on latency" in text for text in report["warnings"])
