"""Pipelines without a service: stages, crops, ensembles, and the links that are refused."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.answer_parts import DETECTION, draw, write_cell_detector
from tests.service.pipeline_parts import (
    DETECTOR,
    SHADE,
    make_shade_classifier,
    write_members,
    write_pipeline,
    write_shade_classifier,
    write_sound_classifier,
)

from edgekit_runtime.errors import BackendError, DataError, ManifestError, PackageError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.package.pipeline import Condition, Pipeline, Stage, find_stages_problem
from edgekit_runtime.pipelines import member
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.backends import check_engines
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.system.engines import EngineMissingError
from edgekit_runtime.tasks.agreement import compare_answers
from edgekit_toolkit.packaging.assemble import describe_artifacts

Answer = dict[str, Any]
Write = Callable[..., Path]


@pytest.fixture
def ask(maker: PackageMaker, tmp_path: Path) -> Callable[..., Answer]:
    """Return a function that writes a pipeline, and returns its answer to a picture."""

    def answer(picture: np.ndarray[Any, Any], *stages: Stage, **options: Any) -> Answer:
        path = write_pipeline(maker, tmp_path, stages or (DETECTOR, SHADE), **options)
        with read_package(path, maker.trust) as package:
            session = open_session(package)
            assert run_selftest(session, package).passed
        outputs = session.run({"image": picture[None]})
        session.close()
        result: Answer = json.loads(outputs["answer_json"].tobytes())
        return result

    return answer


def shades(answer: Answer) -> list[tuple[str, str | None]]:
    """Return the label of each box with the best class of its crop."""
    entries = answer["detections"]
    return [(e["label"], e["shade"]["classes"][0]["label"] if "shade" in e else None) for e in entries]


def test_answer_of_crops_stands_in_the_box_that_they_were_cut_from(ask: Callable[..., Answer]) -> None:
    answer = ask(draw(128, 64, red=(0, 0), green=(3, 1)))
    assert sorted(shades(answer)) == [("green", "green"), ("red", "red")]
    (red,) = (entry for entry in answer["detections"] if entry["label"] == "red")
    assert red["box"] == [0, 0, 32, 32]
    assert red["shade"]["classes"][0]["score"] == pytest.approx(1.0, abs=0.01)


def test_picture_without_boxes_has_an_empty_answer(ask: Callable[..., Answer]) -> None:
    assert ask(draw()) == {"detections": []}


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (37, 53)])
def test_odd_sizes_are_answered(ask: Callable[..., Answer], shape: tuple[int, int]) -> None:
    answer = ask(np.full((*shape, 3), 255, np.uint8))
    height, width = shape
    for entry in answer["detections"]:
        left, top, right, bottom = entry["box"]
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        (Condition(label=("green",)), {("green", "green"), ("red", None)}),
        (Condition(min_score=0.9), {("green", None), ("red", "red")}),
        (Condition(label=("blue",)), {("green", None), ("red", None)}),
    ],
)
def test_condition_chooses_the_boxes(
    ask: Callable[..., Answer], when: Condition, expected: set[tuple[str, str | None]]
) -> None:
    picture = draw(red=(0, 0), green=(2, 2))
    picture[:, :, 1] //= 2
    assert set(shades(ask(picture, DETECTOR, replace(SHADE, when=when)))) == expected


def test_most_crops_are_those_of_the_best_boxes(ask: Callable[..., Answer]) -> None:
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[:, :, 0] = 100 + np.arange(64)[:, None]  # 16 boxes, the best at the bottom
    answer = ask(picture, DETECTOR, replace(SHADE, max_crops=3))
    cropped = [entry for entry in answer["detections"] if "shade" in entry]
    assert len(answer["detections"]) == 16
    assert [entry["box"][1] for entry in cropped] == [48, 48, 48]


@pytest.mark.parametrize("rows", ["N", 1])
def test_batches_of_crops_answer_as_crops_alone(
    ask: Callable[..., Answer], maker: PackageMaker, tmp_path: Path, rows: int | str
) -> None:
    picture = np.random.default_rng(1).integers(80, 256, (64, 64, 3)).astype(np.uint8)
    members = write_members(maker, tmp_path)
    if rows == 1:
        members["shade"] = _with_fixed_rows(maker, members["shade"], tmp_path)
    answer = ask(picture, DETECTOR, SHADE, members=members)
    alone = [
        ask(
            np.ascontiguousarray(picture[top:bottom, left:right]),
            Stage(name="shade"),
            members={"shade": members["shade"]},
        )
        for left, top, right, bottom in (map(int, e["box"]) for e in answer["detections"] if "shade" in e)
    ]
    together = [entry["shade"] for entry in answer["detections"] if "shade" in entry]
    assert len(together) == 16
    for crop, reference in zip(together, alone, strict=True):
        for entry, expected in zip(crop["classes"], reference["classes"], strict=True):
            assert entry["score"] == pytest.approx(expected["score"], rel=1e-5)


def _with_fixed_rows(maker: PackageMaker, path: Path, folder: Path) -> Path:
    """Return a package of the same model with one row at a time."""
    with read_package(path, maker.trust) as package:
        manifest = package.manifest
        contents = {artifact.path: bytes(package.read(artifact.path)) for artifact in manifest.artifacts}
    contents["model.onnx"] = make_shade_classifier(rows=1)
    roles = {artifact.path: artifact.role for artifact in manifest.artifacts}
    fixed = replace(
        manifest,
        inputs=tuple(replace(spec, shape=(1, *spec.shape[1:])) for spec in manifest.inputs),
        outputs=tuple(replace(spec, shape=(1, *spec.shape[1:])) for spec in manifest.outputs),
        artifacts=describe_artifacts(contents, roles),
    )
    write_package(folder / "fixed.edgepkg", fixed, contents, maker.signer)
    return folder / "fixed.edgepkg"


@pytest.mark.parametrize(("how", "scores"), [("mean", {"red": 0.5, "green": 0.3}), ("vote", {"red": 1.0})])
def test_ensemble_combines_classes(
    ask: Callable[..., Answer], maker: PackageMaker, tmp_path: Path, how: str, scores: dict[str, float]
) -> None:
    members = {name: tmp_path / f"{name}.edgepkg" for name in ("first", "second")}
    write_shade_classifier(maker, members["first"], factors=(1.0, 0.2))
    write_shade_classifier(maker, members["second"], factors=(0.5, 1.0) if how == "mean" else (1.0, 0.0))
    both = Stage(name="both", ensemble=how, stages=("first", "second"))
    picture = np.zeros((8, 8, 3), np.uint8)
    picture[:, :, 0], picture[:, :, 1] = 170, 128
    stages = (Stage(name="first"), Stage(name="second"), both)
    answer = ask(picture, *stages, members=members, output=["both"])
    assert {e["label"]: e["score"] for e in answer["classes"]} == pytest.approx(scores, abs=0.01)


def test_mean_of_an_ensemble_counts_all_classes_of_each_model(
    ask: Callable[..., Answer], maker: PackageMaker, tmp_path: Path
) -> None:
    members = {name: tmp_path / f"{name}.edgepkg" for name in ("first", "second")}
    write_shade_classifier(maker, members["first"], factors=np.linspace(1, 0.8, 150).tolist())
    write_shade_classifier(maker, members["second"], factors=np.linspace(0, 1, 150).tolist())
    both = Stage(name="both", ensemble="mean", stages=("first", "second"))
    picture = np.full((8, 8, 3), 255, np.uint8)
    stages = (Stage(name="first"), Stage(name="second"), both)
    answer = ask(picture, *stages, members=members, output=["both"])
    best = answer["classes"][0]
    assert (best["index"], best["score"]) == (149, pytest.approx(0.9, abs=1e-4))


def test_stages_on_the_source_stand_under_their_names(
    ask: Callable[..., Answer], maker: PackageMaker, tmp_path: Path
) -> None:
    answer = ask(draw(red=(0, 0)), DETECTOR, Stage(name="shade"))
    assert [e["label"] for e in answer["detector"]["detections"]] == ["red"]
    assert answer["shade"]["classes"][0]["label"] == "red"


def test_stage_on_a_whole_picture_runs_if_its_condition_holds(ask: Callable[..., Answer]) -> None:
    scene = Stage(name="shade", input="detector", when=Condition(label=("green",)))
    assert "shade" not in ask(draw(red=(0, 0)), DETECTOR, scene)
    answer = ask(draw(red=(0, 0), green=(1, 0)), DETECTOR, scene)
    assert {entry["label"] for entry in answer["shade"]["classes"]} == {"red", "green"}


def test_boxes_within_crops_are_in_pixels_of_the_picture(
    ask: Callable[..., Answer], maker: PackageMaker, tmp_path: Path
) -> None:
    members = {name: tmp_path / f"{name}.edgepkg" for name in ("detector", "parts")}
    for path in members.values():
        write_cell_detector(maker, path)
    parts = Stage(name="parts", input="detector", crop="boxes")
    answer = ask(draw(256, 256, red=(2, 1)), DETECTOR, parts, members=members)
    (entry,) = answer["detections"]
    boxes = [inner["box"] for inner in entry["parts"]["detections"]]
    assert len(boxes) == 16
    assert min(box[0] for box in boxes) == entry["box"][0] == 128
    assert max(box[3] for box in boxes) == entry["box"][3] == 128


def test_thousand_boxes_give_no_more_crops_than_stated(
    ask: Callable[..., Answer], maker: PackageMaker, tmp_path: Path
) -> None:
    members = write_members(maker, tmp_path)
    options = {**DETECTION.options, "overlap": 1, "min_score": 0, "max_boxes": 1000}
    write_cell_detector(maker, members["detector"], task=TaskChoice("detection", options))
    answer = ask(np.full((64, 64, 3), 255, np.uint8), DETECTOR, replace(SHADE, max_crops=5), members=members)
    assert sum("shade" in entry for entry in answer["detections"]) == 5


@pytest.mark.parametrize(
    "box", [[-90, -90, -10, -10], [5, 5, 5, 9], [float("nan"), 0, 4, 4], [0, 0, 9e9, 9e9]]
)
def test_boxes_beyond_the_picture_or_without_an_area_have_no_crop(
    ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, box: list[float]
) -> None:
    from edgekit_runtime.tasks.kinds.detection import DETECTION as TASK
    from edgekit_runtime.tasks.task import TASKS

    entry = {"label": "red", "index": 0, "score": 1.0, "box": box}
    hostile = replace(TASK, decode=lambda *_: {"detections": [dict(entry)]})
    monkeypatch.setitem(TASKS, "detection", hostile)
    if box[0] != box[0]:
        with pytest.raises(BackendError, match="NaN"):
            ask(draw())
        return
    (answer,) = ask(draw())["detections"]
    assert ("shade" in answer) == (box[2] > 1e9)


def test_wrong_inputs_are_refused(maker: PackageMaker, tmp_path: Path) -> None:
    with read_package(write_pipeline(maker, tmp_path), maker.trust) as package:
        session = open_session(package)
    for inputs in (
        {"image": np.zeros((1, 0, 9, 3), np.uint8)},
        {"image": np.zeros((2, 9, 9, 3), np.uint8)},
        {"image": np.zeros((1, 9, 9, 3), np.float32)},
        {"pixels": np.zeros((1, 9, 9, 3), np.uint8)},
    ):
        with pytest.raises(DataError):
            session.run(inputs)
    session.close()


def test_run_is_stopped_between_two_crops(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgekit_runtime.tasks.kinds.classification import CLASSIFICATION as TASK
    from edgekit_runtime.tasks.task import TASKS

    decoded: list[object] = []
    opened: list[Any] = []

    def decode(outputs: object, *_: object) -> Answer:
        decoded.append(outputs)
        for session in opened:
            session.cancel_runs()
        return {"classes": []}

    monkeypatch.setitem(TASKS, "classification", replace(TASK, decode=decode))
    monkeypatch.setattr(member, "MAX_BATCH", 4)
    members = write_members(maker, tmp_path)
    options = {**DETECTION.options, "overlap": 1, "min_score": 0, "max_boxes": 1000}
    write_cell_detector(maker, members["detector"], task=TaskChoice("detection", options))
    path = write_pipeline(maker, tmp_path, (DETECTOR, replace(SHADE, max_crops=1000)), members)
    with read_package(path, maker.trust) as package:
        opened.append(open_session(package))
    decoded.clear()
    with pytest.raises(BackendError, match=r"stage 'shade': .*between two crops"):
        opened[0].run({"image": np.full((1, 64, 64, 3), 255, np.uint8)})
    assert len(decoded) == 4
    opened[0].close()


def test_failing_stage_is_named(maker: PackageMaker, tmp_path: Path) -> None:
    with read_package(write_pipeline(maker, tmp_path), maker.trust) as package:
        session = open_session(package)
    session.sessions["shade"].close()  # type: ignore[attr-defined]  # of a pipeline
    session.run({"image": draw()[None]})  # no boxes
    with pytest.raises(BackendError, match=r"stage 'shade': .*closed"):
        session.run({"image": draw(red=(0, 0))[None]})
    session.close()


def test_selftest_names_the_member_that_computes_something_else(maker: PackageMaker, tmp_path: Path) -> None:
    path = write_pipeline(maker, tmp_path)
    with read_package(path, maker.trust) as package:
        manifest = package.manifest
        contents = {artifact.path: bytes(package.read(artifact.path)) for artifact in manifest.artifacts}
        session = open_session(package)
        checks = {check.name: check.passed for check in run_selftest(session, package).checks}
        session.close()
    assert checks == {"detector/boxes": True, "shade/scores": True, "answer_json": True}
    changed = "members/shade/golden/scores.bin"
    contents[changed] = np.float32([9, 9]).tobytes()
    own = Manifest.from_json(json.loads(contents["members/shade/manifest.json"]))
    inner = {a.path: contents[f"members/shade/{a.path}"] for a in own.artifacts}
    roles = {artifact.path: artifact.role for artifact in own.artifacts}
    own = replace(own, artifacts=describe_artifacts(inner, roles))
    contents["members/shade/manifest.json"] = own.to_bytes()
    roles = {artifact.path: artifact.role for artifact in manifest.artifacts}
    write_package(
        path, replace(manifest, artifacts=describe_artifacts(contents, roles)), contents, maker.signer
    )
    with read_package(path, maker.trust) as package:
        session = open_session(package)
        (failed,) = (check for check in run_selftest(session, package).checks if not check.passed)
        session.close()
    assert failed.message.startswith("stage 'shade': output 'scores'")


def test_member_that_is_not_what_its_manifest_says_is_refused(maker: PackageMaker, tmp_path: Path) -> None:
    path = write_pipeline(maker, tmp_path)
    with read_package(path, maker.trust) as package:
        manifest = package.manifest
        contents = {artifact.path: bytes(package.read(artifact.path)) for artifact in manifest.artifacts}
    contents["members/shade/model.onnx"] = make_shade_classifier((2.0, 2.0))
    roles = {artifact.path: artifact.role for artifact in manifest.artifacts}
    write_package(
        path, replace(manifest, artifacts=describe_artifacts(contents, roles)), contents, maker.signer
    )
    with read_package(path, maker.trust) as package, pytest.raises(PackageError, match=r"shade.*model\.onnx"):
        open_session(package)


def test_engine_of_every_member_must_be_installed(maker: PackageMaker, tmp_path: Path) -> None:
    with read_package(write_pipeline(maker, tmp_path), maker.trust) as package:
        manifest = package.manifest
    check_engines(manifest)
    pipeline = manifest.pipeline
    assert pipeline is not None
    assert [stage.engines for stage in pipeline.stages] == [("ort",), ("ort",)]
    stages = (pipeline.stages[0], replace(pipeline.stages[1], engines=("abacus",)))
    with pytest.raises(EngineMissingError, match=r"stage 'shade'.*abacus"):
        check_engines(replace(manifest, pipeline=replace(pipeline, stages=stages)))


def test_reader_that_does_not_know_pipelines_refuses_them_as_newer(
    maker: PackageMaker, tmp_path: Path
) -> None:
    with read_package(write_pipeline(maker, tmp_path), maker.trust) as package:
        manifest = package.manifest
    assert manifest.format.critical == ("pipeline",)
    with pytest.raises(ManifestError, match="go together"):
        replace(manifest, pipeline=None)


def stage(name: str, **fields: Any) -> Stage:
    return Stage(name=name, **fields)


@pytest.mark.parametrize(
    ("stages", "output", "reason"),
    [
        ([], ["a"], "0 stages"),
        ([stage(f"s{n}") for n in range(17)], ["s0"], "17 stages, expected 1 to 16"),
        ([stage("a"), stage("a")], ["a"], "two stages have the name 'a'"),
        ([stage("a", input="b")], ["a"], "stage 'a' names the stage 'b', there are: a"),
        (
            [stage("a", input="b"), stage("b", input="a")],
            ["a"],
            "wait for one another: a -> b -> a|b -> a -> b",
        ),
        ([stage("a", input="a")], ["a"], "wait for one another"),
        ([stage("a", crop="boxes")], ["a"], "needs the answer of another stage"),
        ([stage("box")], ["box"], "field of answers"),
        ([stage("a"), stage("b", ensemble="mean", stages=("a",))], ["b"], "two or more"),
        ([stage("a"), stage("b", ensemble="mean")], ["b"], "needs both"),
        ([stage("a"), stage("b", stages=("a",))], ["b"], "needs both"),
        (
            [stage("a"), stage("b", input="a"), stage("c", ensemble="vote", stages=("a", "b"))],
            ["c"],
            "same input",
        ),
        (
            [stage("a"), stage("b"), stage("c", ensemble="vote", stages=("a", "b"))],
            ["a", "c"],
            "output has 'a', which 'c' combines",
        ),
        (
            [
                stage("a"),
                stage("b"),
                stage("c", ensemble="vote", stages=("a", "b")),
                stage("d", input="c", crop="boxes"),
            ],
            ["c", "d"],
            "crops of 'c', an ensemble",
        ),
        ([stage("a"), stage("b", input="a")], ["b"], "not 'a', within whose answer"),
        ([stage("a")], ["b"], "output names the stage 'b'"),
        ([stage("a")], [], "output must name"),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages: Sequence[Stage], output: list[str], reason: str) -> None:
    problem = find_stages_problem(tuple(stages), tuple(output))
    assert problem is not None
    assert any(part in problem for part in reason.split("|")), problem


def test_stage_before_its_input_is_refused_in_a_manifest() -> None:
    with pytest.raises(ManifestError, match="stands before"):
        Pipeline(stages=(stage("b", input="a"), stage("a")), output=("a", "b"))


@pytest.mark.parametrize(
    ("stages", "members", "reason"),
    [
        ((stage("shade"), stage("detector", input="shade", crop="boxes")), {}, "takes crops, but 'shade'"),
        ((DETECTOR, SHADE), {"detector": {"task": None}}, "stage 'detector': its package states no task"),
        (
            (DETECTOR, SHADE),
            {"detector": {"preprocessing": None}},
            "stage 'detector': its package states no preprocessing",
        ),
        (
            (DETECTOR, stage("shade"), stage("both", ensemble="mean", stages=("detector", "shade"))),
            {"detector": {"labels": b"red\n"}},
            "'detector' and 'shade', which have other labels",
        ),
        ((DETECTOR, SHADE), {"sound": True}, "pictures and sound"),
        (
            (DETECTOR, stage("shade"), stage("both", ensemble="mean", stages=("detector", "shade"))),
            {},
            "combines classes of one task, but 'detector' is object detection",
        ),
    ],
)
def test_members_that_do_not_suit_their_links_are_refused(
    maker: PackageMaker, tmp_path: Path, stages: Sequence[Stage], members: dict[str, Any], reason: str
) -> None:
    paths = write_members(maker, tmp_path)
    if "sound" in members:
        write_sound_classifier(maker, paths["shade"])
    if "detector" in members:
        write_cell_detector(maker, paths["detector"], **members["detector"])
    output = [s.name for s in stages if s.name not in stages[-1].stages]
    with pytest.raises((DataError, PackageError), match=reason):
        write_pipeline(maker, tmp_path, stages, paths, output=output)


BOX = {"label": "car", "box": [0, 0, 10, 10], "score": 0.9}
SHIFTED = {**BOX, "box": [1, 1, 11, 11], "score": 0.7}


@pytest.mark.parametrize(
    ("current", "candidate", "agreement"),
    [
        ({"detections": [BOX]}, {"detections": [SHIFTED]}, 1.0),
        ({"detections": [BOX]}, {"detections": [{**BOX, "label": "bus"}]}, 0.0),
        ({"detections": [BOX]}, {"detections": [{**BOX, "box": [50, 50, 60, 60]}]}, 0.0),
        ({"detections": [BOX]}, {"detections": [BOX, SHIFTED]}, 0.5),
        ({"detections": [BOX]}, {"detections": []}, 0.0),
        ({"detections": []}, {"detections": []}, 1.0),
        ({}, {}, 1.0),
        ({"classes": [{"label": "a"}, {"label": "b"}]}, {"classes": [{"label": "a"}]}, 1.0),
        ({"classes": [{"label": "a"}]}, {"classes": [{"label": "b"}]}, 0.0),
        (
            {"detections": [{**BOX, "kind": {"classes": [{"label": "a"}]}}]},
            {"detections": [{**BOX, "kind": {"classes": [{"label": "b"}]}}]},
            0.0,
        ),
        ({"detections": [{**BOX, "kind": {"classes": [{"label": "a"}]}}]}, {"detections": [BOX]}, 0.0),
        ({"values": [1.0]}, {"values": [1.0]}, 1.0),
        ({"values": [1.0]}, {"classes": []}, 0.0),
        ({"embedding": [3.0, -4.0]}, {"embedding": [-3.0, 4.0]}, 0.0),
        ({"embedding": [3.0, -4.0]}, {"embedding": [3.0]}, 0.0),
        ({"values": [{"label": "age", "value": 1.0}]}, {"values": [{"label": "size", "value": 1.0}]}, 0.0),
        ({"text": "stop"}, {"text": "step"}, 0.0),
        ({"mixed": [1, [2]]}, {"mixed": [1, [2]]}, 1.0),
    ],
)
def test_answers_agree_by_labels_and_boxes(current: Answer, candidate: Answer, agreement: float) -> None:
    assert compare_answers(current, candidate) == agreement
    assert compare_answers(candidate, current) == agreement


@pytest.mark.parametrize(
    ("current", "candidate"),
    [
        ({"embedding": [3.0, -4.0]}, {"embedding": [3.0, -4.05]}),
        ({"values": [{"label": "age", "value": 5.0}]}, {"values": [{"label": "age", "value": 5.05}]}),
        ({"count": 500}, {"count": 505}),
        ({"rows": [[3, 0], [0, 4]]}, {"rows": [[3, 0], [0, 4.05]]}),
    ],
)
def test_numbers_agree_by_their_relative_difference(current: Answer, candidate: Answer) -> None:
    assert compare_answers(current, candidate) == pytest.approx(0.99)
