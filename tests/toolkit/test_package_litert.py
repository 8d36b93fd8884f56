"""`edgekit package` for LiteRT."""

import hashlib
import json
import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.fork_server import host_server
from tests.toolkit.package_run import (
    Outcome,
    check_refused,
    edgekit,
    environment,
    mlp,
    model_of,
    package,
    read_only,
    samples,
    saved,
    stored,
    tensor,
    tiny,
)
from tests.toolkit.small_tflite import computed_shape, small_cnn

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.system.install_hint import install_command
from edgekit_toolkit.measurement import brevity
from edgekit_toolkit.quantize.forms import FLOAT16_WEIGHTS, Form

pytestmark = [
    pytest.mark.usefixtures("home"),
    pytest.mark.skipif(
        not (find_spec("ai_edge_litert") and find_spec("ai_edge_quantizer")),
        reason="LiteRT is not installed: edgekit[litert-host]",
    ),
]
TINY_MODELS = (
    "mnist5k_dscnn",
    "japanese_vowels_tcn",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("digits_cnn", "italy_power_mlp")),
)


def for_litert(model: Path, out: Path, *options: object, target: str = "rpi5") -> Outcome:
    return package(model, out, "--backend", "litert", *options, target=target)


@pytest.mark.parametrize("model", TINY_MODELS)
def test_every_tiny_model_is_packaged_for_litert(model: str, tmp_path: Path) -> None:
    source, data = tiny(model)
    outcome = for_litert(source, tmp_path, *data, "--search-seconds", 0.1, "--json")
    assert (outcome.code, outcome.json["target"]["backend"]) == (0, "litert")
    layers = outcome.json["layers"]
    assert not [layer["name"] for layer in layers if ";" in layer["name"]]
    # They are those of the file.
    assert {layer["op"] for layer in layers} <= {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"}
    assert all(layer["macs"] > 0 for layer in layers)
    assert any("are those of ort" in warning for warning in outcome.json["warnings"])
    with read_only(tmp_path) as opened:
        assert [one.path for one in opened.manifest.artifacts if one.role == "model"] == ["model.tflite"]
        assert opened.manifest.backend.name == "litert"
        score: Any = opened.manifest.figures["score"]
        assert 100 * (score["source_value"] - score["value"]) <= 1
        assert score["engine"] == "LiteRT"
        session = open_session(opened)
        assert run_selftest(session, opened).passed
        session.close()


def test_memory_limit_of_another_machine_is_said_to_be_measured_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(mlp(1), tmp_path / "net.onnx")

    def check(budget: str, *, warns: bool) -> float:
        report = for_litert(model, tmp_path / "out", "--budget", budget, "--json").json
        assert any("measured here, not on rpi5" in text for text in report["warnings"]) == warns
        memory = report["candidates"][0]["figures"]["memory"]
        assert (memory["label"], memory["on"]) == ("measured", "host")
        return float(memory["value"])

    check("size=1MB", warns=False)
    monkeypatch.setenv(brevity.VARIABLE, "times,races")
    assert check("memory=1GB", warns=True) > 1 << 20


def test_package_has_inputs_and_outputs_of_the_source_in_its_order(tmp_path: Path) -> None:
    node, weight = helper.make_node, np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    nodes = [
        node("MatMul", ["x", "w"], ["p"]),
        node("MatMul", ["a", "w"], ["q"]),
        node("Add", ["p", "q"], ["z"]),
        node("Sub", ["p", "q"], ["b"]),
    ]
    inputs, outputs = [tensor("x", [1, 8]), tensor("a", [1, 8])], [tensor("z", [1, 4]), tensor("b", [1, 4])]
    model = saved(model_of(nodes, inputs, outputs, {"w": weight}), tmp_path / "net.onnx")
    assert for_litert(model, tmp_path / "out").code == 0
    with read_only(tmp_path / "out") as opened:
        assert [spec.name for spec in opened.manifest.outputs] == ["z", "b"]
        session = open_session(opened)
        feeds = {name: np.ones((1, 8), np.float32) for name in ("x", "a")}
        made = session.run(feeds)
        np.testing.assert_allclose(made["b"], 0, atol=0.2)
        np.testing.assert_allclose(made["z"], 2 * weight.sum(0, keepdims=True), atol=0.5)


def test_recipe_for_litert_gives_the_same_bytes(tmp_path: Path) -> None:
    source, data = tiny("digits_cnn")
    assert for_litert(source, tmp_path / "first", *data, "--search-seconds", 0.1).code == 0
    recipe = next((tmp_path / "first").glob("*.recipe.json"))
    assert {"ai-edge-litert", "ai-edge-quantizer"} <= json.loads(recipe.read_text())["tools"].keys()
    assert edgekit("package", source, "--recipe", recipe, "-o", tmp_path / "second").code == 0
    first, second = (next((tmp_path / name).glob("*.edgepkg")).read_bytes() for name in ("first", "second"))
    assert first == second


def test_recipe_that_gives_a_tflite_model_to_another_engine_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "net.tflite"
    source.write_bytes(small_cnn().content())
    assert for_litert(source, tmp_path / "first").code == 0
    recipe = json.loads(next((tmp_path / "first").glob("*.recipe.json")).read_text())
    recipe = {**recipe, "backend": "ort"}
    del recipe["sha256"]
    forged = tmp_path / "forged.recipe.json"
    forged.write_text(json.dumps({**recipe, "sha256": hashlib.sha256(encode_json(recipe)).hexdigest()}))
    check_refused(
        lambda *more: edgekit("package", source, "--recipe", forged, "-o", tmp_path / "out", *more),
        11,
        "for ort, which does not run .tflite models",
    )


def test_operator_that_litert_has_no_mapping_for_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    nodes = [helper.make_node("Det", ["x"], ["d"], name="the_det")]
    model = saved(model_of(nodes, [tensor("x", [1, 3, 3])], [tensor("d", [1])], {}), tmp_path / "net.onnx")
    outcome = for_litert(model, tmp_path / "out")
    assert outcome.code == 3
    assert "Det" in outcome.stderr
    assert "the_det" in outcome.stderr
    assert not list((tmp_path / "out").glob("*"))
    assert package(model, tmp_path / "ort", target="rpi5").code == 0


@pytest.mark.parametrize(("target", "backend"), [("jetson", "openvino"), ("rpi5", "tensorrt")])
def test_engine_that_the_target_does_not_run_is_refused(target: str, backend: str, tmp_path: Path) -> None:
    model = saved(mlp(1), tmp_path / "net.onnx")
    outcome = package(model, tmp_path / "out", "--backend", backend, target=target)
    assert outcome.code == 2
    assert f"not {backend}" in outcome.stderr


def test_fixed_batch_is_kept(tmp_path: Path) -> None:
    model = saved(mlp("N"), tmp_path / "net.onnx")
    data = ("--eval", stored(tmp_path / "e.npz", samples(16, 1)))
    assert for_litert(model, tmp_path / "out", *data, "--batch", 4).code == 0
    with read_only(tmp_path / "out") as opened:
        assert opened.manifest.inputs[0].shape == (4, 8)


def package_without(
    model: Path,
    out: Path,
    *choices: tuple[str, ...],
    hidden: str = "ai-edge-litert,flatbuffers",
) -> list[Outcome]:
    """As where distributions are not installed: one process that cannot import them runs each choice."""
    command = ["package", str(model), "-o", str(out), "--search-seconds", "0"]
    arguments = json.dumps([[*command, *options] for options in choices])
    argv = [sys.executable, "-m", "tests.toolkit.hidden_distributions", hidden, arguments]
    pipe = subprocess.PIPE
    with host_server().popen(argv, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    return [Outcome(*end) for end in json.loads(out)]


def test_missing_quantizer_leaves_the_float_form_and_says_so_once(tmp_path: Path) -> None:
    model = saved(mlp(1), tmp_path / "net.onnx")
    options = ("-t", "rpi5", "--backend", "litert", "--json")
    (outcome,) = package_without(model, tmp_path, options, hidden="ai-edge-quantizer")
    report = outcome.json
    assert [one["label"] for one in report["candidates"]] == ["float32"]
    (warning,) = (one for one in report["warnings"] if install_command("litert-host") in one)
    assert "all other forms: they need ai-edge-quantizer" in warning
    assert "ai-edge-quantizer" not in report["provenance"]["tools"]


def test_engine_that_is_not_installed_is_reported_with_what_installs_it(tmp_path: Path) -> None:
    """A target of the user's own, that has no other engine, is never packaged for one."""
    text = (files("edgekit_toolkit.targets") / "android-arm64.toml").read_text(encoding="utf-8")
    phone = tmp_path / "phone.toml"
    phone.write_text(text.replace('name = "android-arm64"', 'name = "phone"').replace('fallback = "ort"', ""))
    model = saved(mlp(1), tmp_path / "net.onnx")
    choices: list[tuple[str, ...]] = [(), ("--backend", "auto"), ("--backend", "litert")]
    only_litert = [("-t", str(phone), *options) for options in choices]
    options = ("-t", "rpi5", "-o", str(tmp_path / "rpi5"), "--backend", "auto", "--json")
    packaged, *refused = package_without(model, tmp_path / "out", options, *only_litert)
    by_name = {one["backend"]: one for one in packaged.json["tournament"]}
    assert by_name["ort"]["kept"]
    assert install_command("litert-host") in by_name["litert"]["reason"]
    assert [outcome.code for outcome in refused] == [9, 9, 9]
    for outcome in refused:
        assert install_command("litert-host") in " ".join(outcome.stderr.split())
    assert not list(tmp_path.glob("out/*"))


def test_integer_inputs_reach_litert_as_they_are(tmp_path: Path) -> None:
    node = helper.make_node
    table = np.random.default_rng(1).normal(size=(50, 8)).astype(np.float32)
    weight = np.random.default_rng(2).normal(size=(8, 4)).astype(np.float32)
    nodes = [
        node("Gather", ["table", "ids"], ["v"]),
        node("ReduceMean", ["v"], ["m"], axes=[1], keepdims=0),
        node("MatMul", ["m", "w"], ["y"]),
    ]
    made: onnx.ModelProto = model_of(
        nodes,
        [tensor("ids", [1, 6], TensorProto.INT64)],
        [tensor("y", [1, 4])],
        {"table": table, "w": weight},
    )
    assert for_litert(saved(made, tmp_path / "net.onnx"), tmp_path / "out").code == 0


# Models that are .tflite files already.


@pytest.fixture(scope="module")
def float_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float form of a tiny model, as somebody else might have converted it."""
    from edgekit_toolkit.tflite.convert import convert  # needs LiteRT's schema

    folder = tmp_path_factory.mktemp("tflite")
    model = onnx.load(tiny("digits_cnn")[0])
    (folder / "digits.tflite").write_bytes(convert(model, {"N": 1}))
    return folder / "digits.tflite"


def test_float_tflite_is_quantized_and_repeated(float_file: Path, tmp_path: Path) -> None:
    before, (_, data) = float_file.read_bytes(), tiny("digits_cnn")
    outcome = package(float_file, tmp_path / "a", *data, "--search-seconds", 0.1, "--json", target="rpi5")
    assert outcome.code == 0
    report = outcome.json
    assert (report["target"]["backend"], report["source"]["opset"], report["steps"]) == ("litert", None, [])
    assert any(one["label"].startswith("int8 per-channel") for one in report["candidates"])
    assert report["data"]["evaluation"]["baseline"] > 0.95
    recipe = next((tmp_path / "a").glob("*.recipe.json"))
    assert edgekit("package", float_file, "--recipe", recipe, "-o", tmp_path / "b").code == 0
    first, second = (next((tmp_path / name).glob("*.edgepkg")).read_bytes() for name in ("a", "b"))
    assert first == second
    assert float_file.read_bytes() == before


def test_tflite_over_a_limit_on_transport_is_refused_with_a_request_for_onnx(
    tmp_path: Path,
) -> None:
    (tmp_path / "net.tflite").write_bytes(small_cnn().content())
    options = ("-b", "transport=500B", "--search-seconds", 1, "--json")
    refused = package(tmp_path / "net.tflite", tmp_path / "a", *options, target="rpi5")
    assert refused.code == 5
    assert "the model as ONNX" in refused.error["needed"]


def test_tflite_with_float16_weights_is_quantized(float_file: Path, tmp_path: Path) -> None:
    from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer  # needs LiteRT's schema

    half = LiteRtQuantizer(float_file.read_bytes(), threads=1).build(Form(FLOAT16_WEIGHTS))
    assert half is not None
    (tmp_path / "half.tflite").write_bytes(half.content)
    _, data = tiny("digits_cnn")
    options = (*data, "--search-seconds", 0.1, "--json")
    outcome = package(tmp_path / "half.tflite", tmp_path / "a", *options, target="rpi5")
    assert outcome.code == 0
    candidates = outcome.json["candidates"]
    assert candidates[0]["label"] == "as it is"
    int8 = next(one for one in candidates if one["label"].startswith("int8 per-channel"))
    assert int8["figures"]["size"]["value"] < 0.75 * candidates[0]["figures"]["size"]["value"]
    assert int8["figures"]["score"]["value"] > 0.95


def test_quantized_tflite_is_packaged_as_it_is(float_file: Path, tmp_path: Path) -> None:
    _, data = tiny("digits_cnn")
    options = ("--search-seconds", 0, "--budget", "size=40kB,drop=100%")
    assert package(float_file, tmp_path / "a", *data, *options, target="rpi5").code == 0
    with read_only(tmp_path / "a") as opened:
        content = bytes(opened.read("model.tflite"))
    given = tmp_path / "given.tflite"
    given.write_bytes(content)
    report = package(given, tmp_path / "b", *data, "--json", target="android-arm64").json
    with read_only(tmp_path / "b") as opened:
        assert bytes(opened.read("model.tflite")) == content
    assert [one["label"] for one in report["candidates"]] == ["as it is"]


def test_tflite_with_two_tensors_of_one_name_is_packaged(tmp_path: Path) -> None:
    lite = small_cnn()
    lite.graph.tensors[lite.place("d")].name = "a"
    (tmp_path / "net.tflite").write_bytes(lite.content())
    report = package(tmp_path / "net.tflite", tmp_path / "out", "--json", target="rpi5").json
    assert report["outcome"]["kind"] == "packaged"
    assert len(report["layers"]) == 3


def test_tflite_that_computes_its_output_shape_is_packaged_with_the_real_one(tmp_path: Path) -> None:
    (tmp_path / "net.tflite").write_bytes(computed_shape((1, 1, 4)).content())
    assert package(tmp_path / "net.tflite", tmp_path / "out", target="rpi5").code == 0
    with read_only(tmp_path / "out") as opened:
        assert opened.manifest.outputs[0].shape == (1, 64, 4)
        session = open_session(opened)
        assert run_selftest(session, opened).passed
        session.close()
    (recipe,) = (tmp_path / "out").glob("*.recipe.json")
    again = edgekit("package", tmp_path / "net.tflite", "--recipe", recipe, "-o", tmp_path / "again")
    assert again.code == 0, again.stderr


def test_tflite_for_an_engine_that_cannot_run_it_is_refused(float_file: Path, tmp_path: Path) -> None:
    for target, options in (("jetson", ("--backend", "tensorrt")), ("rpi5", ("--backend", "ort"))):
        outcome = package(float_file, tmp_path / "out", *options, target=target)
        assert outcome.code == 2
        assert "LiteRT runs alone" in " ".join(outcome.stderr.split())


@pytest.mark.parametrize("options", [("--batch", 4), ("--dim", "N=2")])
def test_sizes_of_a_tflite_stay(options: tuple[object, ...], float_file: Path, tmp_path: Path) -> None:
    outcome = package(float_file, tmp_path / "out", *options, target="rpi5")
    assert outcome.code == 3
    assert "cannot change the sizes of a .tflite" in " ".join(outcome.stderr.split())


def test_damaged_tflite_is_refused(float_file: Path, tmp_path: Path) -> None:
    content = float_file.read_bytes()
    path = tmp_path / "net.tflite"
    path.write_bytes(content[: len(content) // 2])
    outcome = package(path, tmp_path / "out", target="rpi5")
    assert outcome.code == 3
    assert "net.tflite" in outcome.stderr
