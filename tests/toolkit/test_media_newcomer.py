"""A newcomer's way: a folder of photographs, one command, and a package that names what it sees."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from PIL import Image
from tests.toolkit.package_run import Outcome, edgekit, model_of, package, saved, tensor

SHARED = Path(__file__).resolve().parents[3] / "shared" / "models"
COLOURS = {"blue": (20, 20, 220), "green": (20, 220, 20), "red": (220, 20, 20)}
FIELDS = {"resize": 10, "center_crop": 8, "scale": 1 / 255, "mean": [0.5] * 3, "std": [0.25] * 3}

pytestmark = pytest.mark.usefixtures("home")


def colour_model() -> onnx.ModelProto:
    """Scores [N, 3] for blue, green and red of image [N, 3, 8, 8]: the means of the channels, reversed."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["image"], ["means"]),
        helper.make_node("Flatten", ["means"], ["flat"]),
        helper.make_node("MatMul", ["flat", "reverse"], ["scores"]),
    ]
    reverse = np.eye(3, dtype=np.float32)[::-1].copy()
    return model_of(
        nodes, [tensor("image", ["N", 3, 8, 8])], [tensor("scores", ["N", 3])], {"reverse": reverse}
    )


def write_photos(folder: Path) -> Path:
    """Write ten noisy photographs of each colour, of several sizes, in class folders."""
    draw = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(10):
            noise = draw.integers(-20, 21, (12 + number, 16, 3))
            pixels = (np.array(colour) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.jpg")
    return folder / "photos"


def write_preprocessing(folder: Path) -> Path:
    path = folder / "preprocessing.json"
    path.write_text(json.dumps(FIELDS))
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path)


@pytest.fixture
def preprocessing(tmp_path: Path) -> Path:
    return write_preprocessing(tmp_path)


@dataclass(frozen=True)
class Packaged:
    """A package for photographs; no test changes these files."""

    model: Path
    photos: Path
    outcome: Outcome
    path: Path


@pytest.fixture(scope="module")
def packaged(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Packaged:
    folder = tmp_path_factory.mktemp("packaged")
    model, photos = saved(colour_model(), folder / "colours.onnx"), write_photos(folder)
    options = ("--calibration", photos, "--preprocessing", write_preprocessing(folder))
    outcome = package(model, folder / "out", *options, "--json")
    assert outcome.code == 0, outcome.stderr
    return Packaged(model, photos, outcome, next((folder / "out").glob("*.edgepkg")))


def test_folder_of_photographs_is_calibrated_judged_and_reported(packaged: Packaged) -> None:
    report: dict[str, Any] = packaged.outcome.json
    text = json.dumps(report)
    assert "top1" in text
    assert any("0 blue, 1 green, 2 red" in note for note in report["warnings"])
    assert any("15 of its samples calibrate, 15 others judge" in note for note in report["warnings"])


def test_package_names_the_class_of_a_photograph(packaged: Packaged) -> None:
    made, photos = packaged.path, packaged.photos
    found = edgekit("run", made, "--input", photos / "red" / "3.jpg", "--json").json
    assert found["files"] == [str(photos / "red" / "3.jpg")]
    assert found["outputs"][0]["top_classes"][0][0]["label"] == "red"
    shown = edgekit("run", made, "--input", photos)
    assert shown.code == 0
    assert "green" in shown.stdout


def test_labels_file_numbers_the_folders(tmp_path: Path, photos: Path, preprocessing: Path) -> None:
    """In the order of the file, of which the folders need not have all."""
    (photos / "blue").rename(tmp_path / "set aside")
    (tmp_path / "labels.txt").write_text("blue\ngreen\nred\n")
    model = saved(colour_model(), tmp_path / "colours.onnx")
    options = ("--eval", photos, "--preprocessing", preprocessing, "--labels", tmp_path / "labels.txt")
    outcome = package(model, tmp_path / "out", *options, "--json")
    assert outcome.code == 0, outcome.stderr
    assert not any("sorted names" in note for note in outcome.json["warnings"])
    assert outcome.json["candidates"][0]["figures"]["score"]["value"] == 1.0


def test_recipe_repeats_a_package_with_the_classes_of_its_folders(packaged: Packaged, tmp_path: Path) -> None:
    made = packaged.path
    recipe = made.with_name(made.name.removesuffix(".edgepkg") + ".recipe.json")
    again = edgekit("package", packaged.model, "--recipe", recipe, "-o", tmp_path / "again")
    assert again.code == 0, again.stderr
    assert (tmp_path / "again" / made.name).read_bytes() == made.read_bytes()


def test_folders_of_other_classes_than_the_model_are_refused(
    tmp_path: Path, photos: Path, preprocessing: Path
) -> None:
    (photos / "red").rename(photos / "green" / "red")
    model = saved(colour_model(), tmp_path / "colours.onnx")
    outcome = package(model, tmp_path / "out", "--eval", photos, "--preprocessing", preprocessing)
    assert outcome.code != 0
    assert "2 classes were found in the names of folders (0 blue, 1 green)" in outcome.stderr


def test_run_without_preprocessing_in_the_package_says_what_to_do(tmp_path: Path, photos: Path) -> None:
    model = saved(colour_model(), tmp_path / "colours.onnx")
    assert package(model, tmp_path / "out").code == 0
    made = next((tmp_path / "out").glob("*.edgepkg"))
    outcome = edgekit("run", made, "--input", photos / "red" / "3.jpg")
    assert outcome.code != 0
    assert "--preprocessing FILE.json" in outcome.stderr


def test_200_real_photographs_in_class_folders_give_a_package(tmp_path: Path) -> None:
    data, model = SHARED / "data" / "cifar10_jpeg.npz", SHARED / "models" / "resnet8_cifar10_fp32.onnx"
    if not data.exists() or not model.exists():
        pytest.skip("../shared/models is absent")
    with np.load(data) as arrays:
        names, pixels, labels = arrays["classes"], arrays["x"][::10], arrays["y"][::10]
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        folder = tmp_path / "photos" / str(names[label])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.jpg", quality=95)
    (tmp_path / "p.json").write_text('{"scale": 1}')  # this model takes pixels 0..255
    options = ("--calibration", tmp_path / "photos", "--preprocessing", tmp_path / "p.json", "--json")
    outcome = package(model, tmp_path / "out", *options)
    assert outcome.code == 0, outcome.stderr
    # The float model has 76.4 % on all 2000 of these photographs; 100 judge here.
    assert outcome.json["candidates"][0]["figures"]["score"]["value"] > 0.65
