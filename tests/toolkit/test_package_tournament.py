"""`edgekit package --backend auto`: engines of one package against each other."""

import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from onnx import helper
from tests.toolkit.package_run import edgekit, mlp, model_of, package, read_only, saved, tensor

from edgekit_runtime.autotune import contest
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.pipeline.engine_tournament import search_engines
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.selection.budget import parse_budget
from edgekit_toolkit.targets.loader import load_target

pytestmark = [
    pytest.mark.usefixtures("home"),
    pytest.mark.skipif(
        not (find_spec("ai_edge_litert") and find_spec("ai_edge_quantizer")),
        reason="LiteRT is not installed: edgekit[litert-host]",
    ),
]


def test_tournament_is_the_default_where_the_target_has_several_engines_and_keeps_one(tmp_path: Path) -> None:
    model = saved(mlp(1), tmp_path / "net.onnx")
    options = ("--search-seconds", 0, "-o", tmp_path / "out", "--json")
    report = edgekit("package", model, "--target", "rpi5", *options).json
    assert [one["backend"] for one in report["tournament"]] == ["ort", "litert"]
    kept = [one for one in report["tournament"] if one["kept"]]
    assert [one["backend"] for one in kept] == [report["target"]["backend"]]
    assert all(one["latency_ms"] > 0 for one in report["tournament"])
    assert "Engines" in (next((tmp_path / "out").glob("*.report.html"))).read_text()
    with read_only(tmp_path / "out") as opened:
        assert opened.manifest.backend.name == kept[0]["backend"]
    report = edgekit("package", model, "--target", "android-arm64", *options).json
    assert (report["target"]["backend"], report["tournament"]) == ("litert", [])


def test_engine_that_cannot_take_the_model_loses_the_tournament(tmp_path: Path) -> None:
    nodes = [helper.make_node("Det", ["x"], ["d"])]
    model = saved(model_of(nodes, [tensor("x", [1, 3, 3])], [tensor("d", [1])], {}), tmp_path / "net.onnx")
    report = package(model, tmp_path / "out", "--backend", "auto", "--json", target="rpi5").json
    by_name = {one["backend"]: one for one in report["tournament"]}
    assert by_name["ort"]["kept"]
    assert "Det" in by_name["litert"]["reason"]


def test_tournament_takes_a_model_with_an_input_without_axes(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["x", "scale"], ["y"])]
    inputs = [tensor("x", [1, 4]), tensor("scale", [])]
    model = saved(model_of(nodes, inputs, [tensor("y", [1, 4])], {}), tmp_path / "net.onnx")
    report = package(model, tmp_path / "out", "--backend", "auto", "--json", target="rpi5").json
    assert [one["reason"] for one in report["tournament"]] == ["", ""]


def auto_request(tmp_path: Path) -> Request:
    return Request(
        model=saved(mlp(1), tmp_path / "net.onnx"),
        target=load_target("x86-64"),
        budget=parse_budget("drop=50%"),
        name="net",
        version="1.0.0",
        threads=1,
        search_s=0.0,
        backend="auto",
        variants=2,
    )


def test_tournament_says_its_processes_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    said: list[str] = []
    search_engines(auto_request(tmp_path), load_signer(), lambda what, *_: said.append(what))
    assert "tournament: process 1 of at most 7: 2 settings in turn" in said
    assert list(folder.iterdir()) == []


def test_engine_that_crashes_in_its_own_process_is_neither_kept_nor_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROGUE", "crash")
    monkeypatch.setattr(contest, "MODULE", "tests.runtime.rogue_contest")
    run = search_engines(auto_request(tmp_path), load_signer(), lambda *_: None)
    first, second = run.tournament
    assert (first.backend, first.is_packaged, first.reason) == ("ort", True, "")
    assert (second.backend, second.is_packaged, second.latency_ms) == ("litert", False, None)
    assert "ended by SIGSEGV" in second.reason
    assert {one.run.request.backend for one in run.variants} <= {"ort"}


def test_package_of_one_engine_states_the_threads_of_its_recipe(tmp_path: Path) -> None:
    request = replace(auto_request(tmp_path), backend="ort", thread_counts=(1, 2), variants=1)
    said: list[str] = []
    run = search_engines(request, load_signer(), lambda what, *_: said.append(what))
    assert "tournament: process 1 of at most 7: 2 settings in turn" in said
    assert run.tournament == ()
    chosen = run.chosen
    assert chosen is not None
    assert chosen.recipe.threads in {None, 1}
    assert chosen.package.manifest.backend.options.get("threads") == chosen.recipe.threads
    assert chosen.package.manifest.provenance["recipe_sha256"] == chosen.recipe.sha256


@pytest.mark.skipif(saturates(), reason="times of this processor, without VNNI, do not hold for x86-64")
def test_choice_slower_than_float32_gives_way_to_a_form_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_BRIEF", "times,memory")
    monkeypatch.setattr(contest, "MODULE", "tests.toolkit.stated_contest")
    request = replace(auto_request(tmp_path), backend="ort", thread_counts=(1, 2), variants=1)
    run = search_engines(request, load_signer(), lambda *_: None)
    assert run.chosen is not None
    # One thread is the first entrant, and slower; then the choice is, beside the float model.
    assert run.chosen.recipe.threads is None
    assert run.choice.reason.startswith(f"{run.chosen.label}: within every limit; ")
    assert run.choice.reason.endswith(" is slower in a race here")
    assert run.slower_than == ""


def test_tournament_for_tensorrt_is_left_to_the_device(tmp_path: Path) -> None:
    model = saved(mlp(1), tmp_path / "net.onnx")
    report = package(model, tmp_path / "out", "--backend", "auto", "--json", target="jetson").json
    assert (report["target"]["backend"], report["tournament"]) == ("tensorrt", [])
