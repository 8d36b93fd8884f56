"""`edgekit package pipeline.toml`: what is written, what it costs, and which files are refused."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from tests.runtime.conftest import PackageMaker, make_maker
from tests.service.answer_parts import draw
from tests.service.pipeline_parts import make_shade_classifier, write_members
from tests.toolkit.cases import cases
from tests.toolkit.package_run import Outcome, edgekit, mlp, read_only, saved

from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions import open_session
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.evidence import evidence_path, write_evidence
from edgekit_toolkit.packaging.signing_keys import load_signer

pytestmark = pytest.mark.usefixtures("home")

STREET = """
name = "street"

[[stages]]
name = "shade"
package = "shade.edgepkg"
input = "detector"
crop = "boxes"
margin = 0.1
max_crops = 4
when = {label = ["red"], min_score = 0.5}

[[stages]]
name = "detector"
package = "detector.edgepkg"
"""
MEMORY = {"memory_estimate": {"bytes_above_engine": 1_000_000, "run_bytes_per_input_byte": 2.0}}


@pytest.fixture
def maker() -> PackageMaker:
    """Return a maker whose packages are signed by the key of this home."""
    signer = load_signer()
    return dataclasses.replace(make_maker(), signer=signer, trust=TrustStore.from_folder(find_keys_folder()))


def run(folder: Path, *options: object, toml: str = STREET, target: str = "x86-64") -> Outcome:
    (folder / "street.toml").write_text(toml)
    return edgekit("package", folder / "street.toml", "--target", target, "-o", folder / "out", *options)


def state_costs(path: Path, latency_ms: float, memory_bytes: float) -> None:
    costs = {
        "latency_held_against_limits": {"value": latency_ms, "label": "modelled", "on": "x86-64"},
        "memory": {"value": memory_bytes},
    }
    write_evidence(evidence_path(path), path, costs, load_signer())


def test_package_holds_all_members_and_answers(maker: PackageMaker, tmp_path: Path) -> None:
    write_members(maker, tmp_path)
    outcome = run(tmp_path, "--json")
    assert outcome.code == 0
    assert outcome.json["package"] == "street-1.0.0-x86-64.edgepkg"
    assert [(s["name"], s["task"], s["count"]) for s in outcome.json["stages"]] == [
        ("detector", "detection", 1),
        ("shade", "classification", 4),
    ]
    with read_only(tmp_path / "out") as package:
        assert set(package.list_members()) == {"detector", "shade"}
        session = open_session(package)
        answer = json.loads(
            session.run({"image": draw(red=(0, 0), green=(1, 1))[None]})["answer_json"].tobytes()
        )
        session.close()
    assert {entry["label"]: "shade" in entry for entry in answer["detections"]} == {
        "red": True,
        "green": False,
    }
    written = {path.suffixes[-2] + path.suffixes[-1] for path in (tmp_path / "out").iterdir()}
    assert {".report.html", ".report.json", ".evidence.json"} <= written


def test_second_run_gives_the_next_version_with_the_same_members(maker: PackageMaker, tmp_path: Path) -> None:
    write_members(maker, tmp_path)
    digests = []
    for _ in range(2):
        path = tmp_path / "out" / run(tmp_path, "--json").json["package"]
        with read_package(path, maker.trust) as package:
            digests.append(dataclasses.replace(package.manifest, version="0").sha256)
    assert path.name == "street-1.0.1-x86-64.edgepkg"
    assert digests[0] == digests[1]


def test_costs_are_added_up_by_stage(maker: PackageMaker, tmp_path: Path) -> None:
    paths = write_members(maker, tmp_path, figures=MEMORY)
    state_costs(paths["detector"], 5.0, 21e6)
    state_costs(paths["shade"], 0.5, 41e6)
    document = run(tmp_path, "--json").json
    assert document["figures"]["latency"] == 5.0 + 4 * 0.5
    assert document["figures"]["memory"] is None  # the detector's package states none
    write_members(maker, tmp_path, figures=MEMORY, detector_figures=MEMORY)
    state_costs(paths["detector"], 5.0, 21e6)
    state_costs(paths["shade"], 0.5, 41e6)
    document = run(tmp_path, "--json").json
    crops_bytes = (4 - 1) * 2 * 3 * 8 * 8 * 4  # three more rows of a batch
    assert document["figures"]["memory"] == 40e6 + 2 * 1_000_000 + crops_bytes
    assert document["figures"]["size"] > document["stages"][0]["size_bytes"]
    plain = run(tmp_path)
    assert "modelled, x86-64" in plain.stdout
    assert "7.00 ms" in plain.stdout
    page = (tmp_path / "out" / "street-1.0.0-x86-64.report.html").read_text()
    assert "<td>shade</td>" in page


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ("size=1kB", "exceeds its limit on size: Size .* of 1.00 kB"),
        ("latency=6ms", "exceeds its limit on latency: .*Latency 7.00 ms of 6.00 ms"),
        ("memory=1MB", "the memory of the pipeline is not known, .* stage 'detector'"),
        ("transport=1kB", "exceeds its limit on transport"),
    ],
)
def test_limit_that_the_whole_exceeds_is_refused(
    maker: PackageMaker, tmp_path: Path, limits: str, reason: str
) -> None:
    paths = write_members(maker, tmp_path)
    state_costs(paths["detector"], 5.0, 21e6)
    state_costs(paths["shade"], 0.5, 41e6)
    outcome = run(tmp_path, "--budget", limits, "--json")
    assert outcome.code == 5
    assert not list((tmp_path / "out").glob("*.edgepkg"))
    assert re.search(reason, outcome.error["message"]), outcome.error["message"]


@cases(
    ("old", "new", "reason"),
    [
        ('input = "detector"', 'input = "detektor"', "stage 'shade' names the stage 'detektor'"),
        ('package = "detector.edgepkg"', "", "stage 'detector' needs one of package, model and ensemble"),
        ('package = "detector.edgepkg"', 'package = "none.edgepkg"', "none.edgepkg"),
        ('name = "shade"', 'name = "detector"', "two stages have the name 'detector'"),
        ('crop = "boxes"', 'crop = "halves"', "crop"),
        ("margin = 0.1", "margin = 2", "margin"),
        ("max_crops = 4", "max_crops = 0", "max_crops"),
        ("max_crops = 4", "zoom = 4", "unknown setting 'zoom'"),
        (
            'package = "detector.edgepkg"',
            'package = "detector.edgepkg"\ninput = "shade"',
            "wait for one another",
        ),
        ("[[stages]]", "[[stages", "expected TOML"),
        ('package = "shade.edgepkg"', 'package = "shade.edgepkg"\noptions = {batch = 1}', "has options"),
    ],
)
def test_wrong_file_is_refused_with_its_reason(
    maker: PackageMaker, tmp_path: Path, old: str, new: str, reason: str
) -> None:
    write_members(maker, tmp_path)
    outcome = run(tmp_path, "--json", toml=STREET.replace(old, new, 1))
    assert outcome.code != 0
    assert reason in outcome.error["message"], outcome.error["message"]


def test_member_of_another_target_is_refused(maker: PackageMaker, tmp_path: Path) -> None:
    write_members(maker, tmp_path)
    outcome = run(tmp_path, "--json", target="rpi5")
    assert (outcome.code, "is for x86-64, the pipeline for rpi5" in outcome.error["message"]) == (4, True)


def test_inspect_lists_the_stages(maker: PackageMaker, tmp_path: Path) -> None:
    write_members(maker, tmp_path)
    assert run(tmp_path).code == 0
    outcome = edgekit("inspect", tmp_path / "out" / "street-1.0.0-x86-64.edgepkg")
    assert "shade     ort, on at most 4 crops of the boxes of detector" in outcome.stdout


def test_pipeline_in_a_pipeline_is_refused(maker: PackageMaker, tmp_path: Path) -> None:
    write_members(maker, tmp_path)
    assert run(tmp_path).code == 0
    inner = "out/street-1.0.0-x86-64.edgepkg"
    outcome = run(tmp_path, "--json", toml=STREET.replace("detector.edgepkg", inner))
    assert "is a pipeline, expected a package of one model" in outcome.error["message"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--eval", "x.npz"), "--eval is for one model"),
        (("--budget", "drop=1%"), "limit on drop"),
        (("--budget", "energy=1mJ"), "limit on energy"),
    ],
)
def test_options_for_models_are_refused(
    maker: PackageMaker, tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    write_members(maker, tmp_path)
    outcome = run(tmp_path, *options)
    assert (outcome.code, reason in outcome.stderr) == (2, True), outcome.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ('{budget = "size=1B"}', "stage 'net': "),
        ('{task = "none", dim = ["N=1"]}', "stage 'net': its package states no task"),
    ],
)
def test_model_is_packaged_by_its_own_options_first(tmp_path: Path, options: str, reason: str) -> None:
    saved(mlp(), tmp_path / "net.onnx")
    outcome = run(tmp_path, "--json", toml=model_stage(options))
    assert outcome.code != 0
    assert reason in outcome.error["message"]
    assert bool(list((tmp_path / "out").glob("net-1.0.0-*.edgepkg"))) is ("budget" not in options)


def test_model_is_packaged_into_the_pipeline(maker: PackageMaker, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(make_shade_classifier())
    (tmp_path / "rules.json").write_text('{"resize": [8, 8], "scale": 0.00392156862745098}')
    options = '{preprocessing = "rules.json", task = "classification:top=1"}'
    outcome = run(tmp_path, "--json", toml=model_stage(options))
    assert outcome.code == 0, outcome.stderr
    assert outcome.json["figures"]["latency"] > 0
    with read_package(tmp_path / "out" / outcome.json["package"], maker.trust) as package:
        session = open_session(package)
        answer = json.loads(session.run({"image": draw(red=(0, 0))[None]})["answer_json"].tobytes())
        session.close()
    assert [entry["index"] for entry in answer["classes"]] == [0]


def model_stage(options: str) -> str:
    """Return the file of one stage whose model is packaged without a search."""
    quick = 'backend = "ort", search-seconds = 0, '
    return f'[[stages]]\nname = "net"\nmodel = "net.onnx"\noptions = {{{quick}{options[1:]}\n'
