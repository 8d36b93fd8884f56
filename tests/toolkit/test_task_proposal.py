"""The task of a package: proposed where the outputs leave no doubt, stated by `--task`, or none."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.service.answer_parts import LETTERBOX, draw, encode, make_cell_detector
from tests.toolkit.cases import cases
from tests.toolkit.package_run import edgekit, isolated_home, package, read_only

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.tasks.task import read_task
from edgekit_toolkit.evaluation.detections import layout_of_task
from edgekit_toolkit.evaluation.metrics import Probes, find_metric
from edgekit_toolkit.packaging.recipe import read_recipe
from edgekit_toolkit.tasks.proposal import decide_task, parse_task, write_task
from edgekit_toolkit.tasks.proposers import Evidence

Outputs = Mapping[str, NDArray[Any]]
COUNT = 16
LABELS = ("a", "b", "c")
DRAW = np.random.default_rng(4)


def spread_boxes(count: int) -> NDArray[np.float32]:
    """Centres and sizes in pixels of an input of 416 pixels, [16, count, 4]."""
    centre, size = DRAW.uniform(60, 350, (COUNT, count, 2)), DRAW.uniform(10, 50, (COUNT, count, 2))
    return np.concatenate([centre, size], axis=-1).astype(np.float32)


def few_high(*shape: int, classes: int) -> NDArray[np.float32]:
    """Scores that are low but for one class of every tenth row."""
    scores = DRAW.uniform(0, 0.02, (*shape, classes))
    scores[:, ::10, :] = np.where(DRAW.integers(0, classes, (COUNT, 1, 1)) == np.arange(classes), 0.8, 0.01)
    return scores.astype(np.float32)


def evidence(*, labels: tuple[str, ...] = LABELS, labelled: bool = False, **outputs: Any) -> Evidence:
    runs = [{name: value[index : index + 1] for name, value in outputs.items()} for index in range(COUNT)]
    return Evidence(
        probes=Probes(runs, 1), labels=labels, labelled=labelled, placement=Placement.of(416, 416)
    )


def logits(shares: NDArray[Any]) -> NDArray[Any]:
    return np.log(shares / (1 - shares)).astype(np.float32)


def grid_rows() -> NDArray[np.float32]:
    rows = DRAW.normal(0, 0.5, (COUNT, 3549, 8)).astype(np.float32)
    rows[..., 4] = few_high(COUNT, 3549, classes=1)[..., 0]
    rows[..., 5:] = few_high(COUNT, 3549, classes=3)
    return rows


def set_logits() -> NDArray[np.float32]:
    values = DRAW.normal(-4, 1, (COUNT, 40, 4))
    values[..., 3] = 4
    values[:, ::10] = [3, -4, -4, -2]
    return values.astype(np.float32)


DETR = (
    "detection:layout=apart,output=boxes,scores_output=logits,boxes=centre,unit=shares,scores=softmax,"
    "background=last,overlap=1.0"
)
BLAZE_FACE = (
    "detection:layout=anchors,output=regressors,scores_output=classificators,boxes=centre,scores=sigmoid,"
    "strides=[8,16,16,16],aspects=[1.0],reduced=false,unit_anchors=true,divisors=[0.0,0.0,0.0,0.0],"
    "sizes=linear"
)
OBJECTS = few_high(COUNT, 200, classes=1)
CASES: dict[str, tuple[Evidence, str]] = {
    "YOLOv8": (
        evidence(y=np.concatenate([spread_boxes(200), few_high(COUNT, 200, classes=3)], -1).swapaxes(1, 2)),
        "detection:layout=scored,boxes=centre",
    ),
    "YOLOv5": (
        evidence(y=np.concatenate([spread_boxes(200), OBJECTS, np.tile(OBJECTS + 0.1, 3)], -1)),
        "detection:layout=objectness,boxes=centre",
    ),
    "YOLOv5 without labels": (
        evidence(labels=(), y=np.concatenate([spread_boxes(200), OBJECTS, np.tile(OBJECTS + 0.1, 3)], -1)),
        "detection:layout=objectness,boxes=centre",
    ),
    "YOLOX": (evidence(y=grid_rows()), "detection:layout=grid"),
    "DETR": (
        evidence(labels=LABELS, logits=set_logits(), boxes=spread_boxes(40) / 416),
        DETR,
    ),
    "sigmoid": (
        evidence(labels=(), boxes=spread_boxes(40), logits=logits(few_high(COUNT, 40, classes=3) + 0.001)),
        "detection:layout=apart,output=boxes,scores_output=logits,boxes=centre,scores=sigmoid",
    ),
    "BlazeFace": (
        dataclasses.replace(
            evidence(
                labels=(),
                regressors=DRAW.normal(0, 20, (COUNT, 896, 16)).astype(np.float32),
                classificators=logits(few_high(COUNT, 896, classes=1) + 0.001),
            ),
            placement=Placement.of(128, 128),
        ),
        BLAZE_FACE,
    ),
    "softmax": (
        evidence(labels=(), y=DRAW.dirichlet(np.ones(9), COUNT).astype(np.float32)),
        "classification:scores=probabilities",
    ),
    "logits with labels": (
        evidence(y=DRAW.normal(0, 4, (COUNT, 3)).astype(np.float32)),
        "classification:scores=softmax",
    ),
    "background": (
        evidence(y=DRAW.normal(0, 4, (COUNT, 4)).astype(np.float32)),
        "classification:scores=softmax,background=1",
    ),
}
UNCERTAIN = {
    "logits without labels": evidence(labels=(), y=DRAW.normal(0, 4, (COUNT, 10)).astype(np.float32)),
    "features": evidence(labels=(), y=DRAW.normal(0, 1, (COUNT, 7, 7, 32)).astype(np.float32)),
    "boxes without an object": evidence(
        y=np.concatenate([spread_boxes(200), 0.1 * few_high(COUNT, 200, classes=3)], -1)
    ),
}


@cases("case", CASES)
def test_outputs_without_doubt_propose_their_task(case: str) -> None:
    decision = decide_task("auto", CASES[case][0])
    assert decision.choice is not None
    assert write_task(decision.choice) == CASES[case][1]
    assert f"{decision.choice.name} (" in decision.describe()
    assert "), proposed by the outputs; --task changes it, --task none" in decision.describe()


@pytest.mark.parametrize("case", UNCERTAIN)
def test_outputs_that_may_mean_anything_propose_none(case: str) -> None:
    decision = decide_task("auto", UNCERTAIN[case])
    assert decision.choice is None
    assert "no task: the outputs do not tell for certain what they mean; --task NAME" in decision.describe()


@cases("case", CASES)
def test_proposal_written_as_an_option_reads_the_same(case: str) -> None:
    decision = decide_task("auto", CASES[case][0])
    assert decision.choice is not None
    again = parse_task(write_task(decision.choice))
    assert again is not None
    assert read_task(again) == read_task(decision.choice)


def test_no_task_can_be_requested() -> None:
    assert decide_task("none", CASES["YOLOX"][0]).choice is None


def test_stated_task_takes_from_the_proposal_what_it_leaves_open() -> None:
    choice = decide_task("detection:min_score=0.4", CASES["DETR"][0]).choice
    assert choice is not None
    assert write_task(choice) == CASES["DETR"][1] + ",min_score=0.4"


def test_stated_layout_stands_where_another_one_is_proposed() -> None:
    decision = decide_task("detection:layout=objectness", CASES["YOLOX"][0])
    assert decision.choice == TaskChoice("detection", {"layout": "objectness"})


def test_score_of_detections_reads_by_the_layout_of_the_task() -> None:
    """Grids are found only by the size of the input, which a metric alone does not know."""
    found, outputs = CASES["YOLOX"][0], CASES["YOLOX"][0].probes.runs[0]
    assert find_metric("auto", found.probes, labelled=False).name == "similarity"
    layout = layout_of_task(decide_task("auto", found).choice, found.placement)
    metric = find_metric("auto", dataclasses.replace(found.probes, stated_layout=layout), labelled=False)
    assert metric.name == "detections"
    assert metric.score(outputs, outputs, None).tolist() == [1]


@cases(
    ("requested", "message"),
    [
        ("detector", "no task 'detector', expected one of auto, none, classification, detection"),
        ("detection:layout", "'layout' is no KEY=VALUE"),
        ("detection:layout=yolo", "layout is 'yolo', expected one of scored"),
        ("detection:strides=[8,0]", "strides is"),
        (
            "detection:layout=rows",
            "expected rows of 6 values.*the outputs are.*--task detection:layout=grid fits",
        ),
        ("detection:layout=grid,strides=[8]", "3549 boxes, but grids of strides .8. .* have 2704 cells"),
        ("detection:output=z", "no output 'z', the model has y"),
    ],
)
def test_task_that_does_not_fit_is_refused_with_what_does(requested: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        decide_task(requested, CASES["YOLOX"][0])


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a detector of red and green cells, its photographs and its package."""
    folder = tmp_path_factory.mktemp("cells")
    photos = folder / "photos"
    photos.mkdir()
    for number in range(24):
        picture = draw(128, 96, red=(number % 4, 0), green=(number // 4 % 4, 1 + number // 16))
        photos.joinpath(f"{number:02}.png").write_bytes(encode(picture))
    folder.joinpath("cells.onnx").write_bytes(make_cell_detector())
    folder.joinpath("labels.txt").write_text("red\ngreen\n")
    folder.joinpath("pre.json").write_text(json.dumps(LETTERBOX))
    with isolated_home(folder):
        assert run_package(folder, "out").code == 0
        yield folder


def run_package(folder: Path, out: str, *options: object) -> Any:
    files = ["--calibration", folder / "photos", "--labels", folder / "labels.txt"]
    return package(
        folder / "cells.onnx", folder / out, *files, "--preprocessing", folder / "pre.json", *options
    )


def test_package_of_a_detector_carries_its_task_and_repeats_it(packaged: Path) -> None:
    with read_only(packaged / "out") as opened:
        assert opened.manifest.task == TaskChoice("detection", {"layout": "scored", "boxes": "corners"})
        content = opened.path.read_bytes()
    (recipe,) = (packaged / "out").glob("*.recipe.json")
    assert read_recipe(recipe).task == {
        "name": "detection",
        "options": {"boxes": "corners", "layout": "scored"},
    }
    repeated = edgekit("package", packaged / "cells.onnx", "--recipe", recipe, "-o", packaged / "again")
    assert repeated.code == 0
    with read_only(packaged / "again") as again:
        assert again.path.read_bytes() == content


def test_report_has_the_answers_in_pixels_of_the_photographs(packaged: Path) -> None:
    (path,) = (packaged / "out").glob("*.report.json")
    report = json.loads(path.read_text())
    assert report["task"]["name"] == "detection"
    assert not [warning for warning in report["warnings"] if "labels" in warning]
    assert report["data"]["evaluation"]["metric"] == "detections"
    assert len(report["samples"]) == 8
    for sample in report["samples"]:
        assert (sample["width"], sample["height"]) == (128, 96)
        number = int(sample["name"].removesuffix(".png"))
        left = 32 * (number % 4)
        boxes = {found["label"]: found["box"] for found in sample["package"]["detections"]}
        assert boxes["red"] == [left, 0, left + 32, 32]
        assert sample["float"] == sample["package"]
    page = path.with_suffix(".html").read_text()
    assert page.count("data:image/jpeg;base64,") == 8


def test_run_prints_the_boxes_of_a_photograph(packaged: Path) -> None:
    (path,) = (packaged / "out").glob("*.edgepkg")
    photo = packaged / "photos" / "05.png"
    assert "red 0.9766 [32.0, 0.0, 64.0, 32.0]" in edgekit("run", path, "--input", photo).stdout
    (answer,) = edgekit("run", path, "--input", photo, "--json").json["answers"]
    assert {found["label"] for found in answer["detections"]} == {"red", "green"}
    assert edgekit("run", path, "--json").json["answers"] == []  # golden inputs mean nothing


def test_summary_says_the_task_and_how_to_change_it(packaged: Path) -> None:
    outcome = run_package(packaged, "other", "--task", "detection:min_score=0.9", "--version", "2.0.0")
    assert outcome.code == 0
    line = " ".join(outcome.stdout.split())
    assert (
        "Task: detection (layout=scored, boxes=corners, min_score=0.9), as requested; --task changes it"
        in line
    )


def test_task_that_does_not_fit_writes_no_package(packaged: Path) -> None:
    outcome = run_package(packaged, "refused", "--task", "detection:layout=grid")
    assert outcome.code != 0
    assert "16 boxes, but grids" in outcome.stderr
    assert "--task detection:layout=scored,boxes=corners fits" in outcome.stderr
    assert not (packaged / "refused").exists()
