"""`edgekit export --format android`: the folder, and its Kotlin beside our preprocessing and tasks.

The Kotlin runs on a Java machine; what calls Android and LiteRT is compiled against stubs of them.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.package_run import TINY, edgekit

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.audio import AudioRules
from edgekit_runtime.preprocessing.features import FeatureRules
from edgekit_runtime.preprocessing.images import ImageRules, take_image
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.preprocessing.rules import MediaRules
from edgekit_runtime.tasks.task import Context, read_task
from edgekit_runtime.tensors import Array
from edgekit_toolkit.packaging.android_export import write_rules, write_task

STUBS = Path(__file__).parent / "android_stubs"
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "android.md"
MAIN = "app/src/main/java/edgekit"
LITERT = "1.4.2"
# Compilers of a long run, and threads that collect garbage, cost a program of a second more than they save.
SHORT_RUN = {"JAVA_OPTS": "-Xms128M -Xmx512M -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
LABELS = ("cat", "dog", 'a "$5" coin')

IMAGES = {
    "plain": ImageRules(colour="RGB", scale=1.0, layout="NHWC", dtype="uint8"),
    "imagenet": ImageRules(
        resize=(40,),
        center_crop=(32, 32),
        colour="RGB",
        scale=1 / 255,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        layout="NCHW",
        dtype="float32",
    ),
    "letterbox": ImageRules(letterbox=(64, 48), colour="BGR", scale=1.0, layout="NCHW", dtype="float32"),
    "corner": ImageRules(
        letterbox=(30, 90),
        align="corner",
        interpolation="bicubic",
        colour="RGB",
        scale=1.0,
        layout="NHWC",
        dtype="float32",
    ),
    "lanczos": ImageRules(
        resize=(33, 171),
        interpolation="lanczos",
        colour="L",
        scale=0.5,
        mean=(3.0,),
        layout="NHWC",
        dtype="float32",
    ),
    "nearest": ImageRules(
        resize=(77, 31),
        interpolation="nearest",
        colour="RGB",
        scale=1.0,
        mean=(128.0,),
        layout="NHWC",
        dtype="int8",
    ),
    "larger crop": ImageRules(
        resize=(20,), center_crop=(51, 44), colour="RGB", scale=1.0, layout="NHWC", dtype="float32"
    ),
}
SOUNDS = {
    "amplitudes": AudioRules(
        sample_rate=16000, samples=1000, scale=2.0, mean=0.25, channel_axis=None, dtype="float32"
    ),
    "mel": AudioRules(
        sample_rate=16000,
        samples=2000,
        channel_axis=None,
        dtype="float32",
        features=FeatureRules(kind="log-mel", frame=400, hop=160),
    ),
    "mfcc": AudioRules(
        sample_rate=16000,
        samples=2500,
        channel_axis=None,
        dtype="float32",
        is_transposed=True,
        features=FeatureRules(kind="mfcc", frame=480, hop=320, power=2),
    ),
}
TASKS = {
    "softmax": TaskChoice("classification", {"scores": "softmax", "top": 2}),
    "background": TaskChoice("classification", {"scores": "sigmoid", "background": 1, "min_score": 0.5}),
    "scored": TaskChoice("detection", {"layout": "scored", "min_score": 0.3}),
    "objectness": TaskChoice(
        "detection", {"layout": "objectness", "boxes": "corners-yx", "unit": "shares", "scores": "sigmoid"}
    ),
    "grid": TaskChoice("detection", {"layout": "grid", "strides": [8, 16], "min_score": 0.4, "overlap": 0.3}),
}
INPUT = (48, 64)  # height and width of a detector's input
CELLS = 6 * 8 + 3 * 4

PROGRAM = """
fun floats(content: ByteArray): FloatArray {
    val buffer = ByteBuffer.wrap(content).order(LITTLE_ENDIAN).asFloatBuffer()
    return FloatArray(buffer.remaining()).also { buffer.get(it) }
}

fun picture(content: ByteArray, arguments: Array<String>) =
    Picture(arguments[3].toInt(), arguments[4].toInt(), arguments[5].toInt(), content)

fun numbers(entries: List<Entry>): FloatArray =
    entries.flatMap { listOf(it.index.toFloat(), it.score) + (it.box?.toList() ?: listOf()) }.toFloatArray()

fun write(file: File, values: FloatArray) {
    val buffer = ByteBuffer.allocate(values.size * 4).order(LITTLE_ENDIAN)
    buffer.asFloatBuffer().put(values)
    file.writeBytes(buffer.array())
}

fun compute(arguments: Array<String>): FloatArray {
    val content = File(arguments[1]).readBytes()
    return when (arguments[0]) {"""
PROGRAM_END = """        else -> throw IllegalArgumentException(arguments[0])
    }
}

fun main() {
    for (line in generateSequence(::readLine)) {
        val arguments = line.split(",").toTypedArray()
        write(File(arguments[2]), compute(arguments))
        println(arguments[0])
    }
}
"""


@dataclass(frozen=True)
class Compiled:
    """Rules in Kotlin, which `run` calls on a Java machine that all tests share."""

    folder: Path
    machine: "subprocess.Popen[str]"

    def run(self, name: str, values: Array, *numbers: int) -> Array:
        assert self.machine.stdin and self.machine.stdout
        source, target = self.folder / "in.bin", self.folder / "out.bin"
        target.unlink(missing_ok=True)
        source.write_bytes(values.tobytes())
        print(name, source, target, *numbers, sep=",", file=self.machine.stdin, flush=True)
        assert self.machine.stdout.readline() == f"{name}\n", "its traceback is on standard error"
        return np.fromfile(target, "<f4")


def write_cases() -> str:
    """Return Kotlin with all rules, and a program that runs those of a name on a file of bytes or floats."""
    media: Mapping[str, MediaRules] = {**IMAGES, **SOUNDS}
    lines = [
        "package edgekit",
        "",
        "import java.io.File",
        "import java.nio.ByteBuffer",
        "import java.nio.ByteOrder.LITTLE_ENDIAN",
        "",
    ]
    for name, rules in media.items():
        lines += ["object `" + name + "` {", *write_rules("RULES", rules), "}"]
    for name, choice in TASKS.items():
        shape = (1, CELLS, 8) if name == "grid" else (1, 40, 8) if name == "objectness" else (1, 7, 40)
        lines += ["object `" + name + "` {", *write_task(choice, ["y"], [shape]), "}"]
    lines.append(
        "val LABELS = listOf("
        + ", ".join('"' + label.replace('"', '\\"').replace("$", "\\$") + '"' for label in LABELS)
        + ")"
    )
    lines.append(f"val PLACEMENT = Placement(100, 90, {INPUT[1]}, {INPUT[0]}, 0.5, 0.5, 3, -2)")
    lines.append(PROGRAM)
    for names, call in (
        (IMAGES, "`{}`.RULES.prepare(picture(content, arguments)).values"),
        (SOUNDS, "`{}`.RULES.prepare(floats(content))"),
    ):
        lines += [f'        "{name}" -> {call.format(name)}' for name in names]
    for name, choice in TASKS.items():
        place = ", PLACEMENT" if choice.name == "detection" else ""
        lines.append(f'        "{name}" -> numbers(`{name}`.answer(listOf(floats(content)), LABELS{place}))')
    return "\n".join([*lines, PROGRAM_END])


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ai_edge_litert")
    out = tmp_path_factory.mktemp("packages")
    (out / "labels.txt").write_text("off peak\npeak\n")
    outcome = edgekit(
        *("package", TINY / "italy_power_mlp.onnx", "-t", "android", "-o", out, "--name", "power"),
        *("--task", "classification:scores=softmax", "--labels", out / "labels.txt"),
    )
    assert outcome.code == 0, outcome.stderr
    return out / "power-1.0.0-android-arm64.edgepkg"


@pytest.fixture(scope="module")
def exported(packaged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    outcome = edgekit(
        "export", packaged, "--format", "android", "-o", tmp_path_factory.mktemp("app"), "--json"
    )
    assert outcome.code == 0, outcome.stdout
    (root,) = outcome.json["written"]
    return Path(root)


@pytest.fixture(scope="module")
def compiled(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    if shutil.which("kotlinc") is None:
        pytest.skip("kotlinc is not installed (apt-get install kotlin)")
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "Cases.kt").write_text(write_cases())
    (folder / "Guide.kt").write_text(GUIDE.read_text().partition("```kotlin\n")[2].partition("```")[0])
    # The guide's class wants an export with pictures and boxes.
    head, task, _ = (exported / MAIN / "Exported.kt").read_text().partition("\n    val TASK")
    assert task
    detector = [
        *write_rules("PICTURE", IMAGES["letterbox"]),
        *write_task(TASKS["grid"], ["y"], [(1, CELLS, 8)]),
    ]
    (folder / "Exported.kt").write_text("\n".join([head, *detector, "}"]))
    copied = [path for path in exported.rglob("*.kt") if path.name != "Exported.kt"]
    sources = [*copied, *STUBS.glob("*.kt"), *folder.glob("*.kt")]
    result = subprocess.run(
        ["kotlinc", "-nowarn", *map(str, sources), "-d", str(folder / "rules.jar")],
        text=True,
        capture_output=True,
        check=False,
        env=os.environ | SHORT_RUN,
    )
    assert result.returncode == 0, result.stderr
    command = ["kotlin", "-cp", str(folder / "rules.jar"), "edgekit.CasesKt"]
    with subprocess.Popen(
        command, env=os.environ | SHORT_RUN, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as machine:
        yield Compiled(folder, machine)


def draw_picture(width: int, height: int, channels: int) -> Array:
    """Return smooth areas with noise and hard edges, uint8 [height, width, channels]."""
    rng = np.random.default_rng(width)
    rows, columns = np.mgrid[:height, :width]
    smooth = (np.sin(rows / 7)[..., None] * 60 + np.cos(columns / 5)[..., None] * 60 + 128) * (
        0.5 + 0.25 * np.arange(channels)
    )
    picture = smooth + rng.normal(0, 25, (height, width, channels))
    picture[: height // 3, : width // 4] = 255
    pixels: Array = picture.clip(0, 255).astype(np.uint8)
    return pixels


@cases("name", IMAGES)
def test_pixels_are_those_of_the_host(compiled: Compiled, name: str) -> None:
    for width, height, channels in ((97, 61, 3), (40, 123, 1)):
        picture = draw_picture(width, height, channels)
        pixels, _ = IMAGES[name].fit(take_image(picture))
        expected = IMAGES[name].finish(pixels).astype(np.float32).ravel()
        np.testing.assert_array_equal(compiled.run(name, picture, width, height, channels), expected)


@pytest.mark.parametrize("name", SOUNDS)
def test_sound_and_its_features_are_those_of_the_host(compiled: Compiled, name: str) -> None:
    rules = SOUNDS[name]
    for length in (900, 4000):
        sound = np.random.default_rng(length).normal(0, 0.2, length).astype("<f4")
        expected = rules.finish(rules.fit(sound, rules.sample_rate)).ravel()
        np.testing.assert_allclose(compiled.run(name, sound), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_those_of_a_device(compiled: Compiled, name: str) -> None:
    rng = np.random.default_rng(1)
    if TASKS[name].name == "classification":
        outputs = rng.normal(0, 3, (1, 4)).astype("<f4")
    elif name == "scored":
        outputs = np.concatenate(
            [rng.uniform(5, 45, (1, 4, 40)), rng.uniform(0, 1, (1, 3, 40))], axis=1
        ).astype("<f4")
    elif name == "objectness":
        start = rng.uniform(0, 0.5, (1, 40, 2))
        outputs = np.concatenate(
            [start, start + rng.uniform(0.1, 0.4, (1, 40, 2)), rng.normal(0, 3, (1, 40, 4))], axis=2
        ).astype("<f4")
    else:
        outputs = np.concatenate(
            [rng.normal(0.5, 1, (1, CELLS, 4)), rng.uniform(0, 1, (1, CELLS, 4))], axis=2
        ).astype("<f4")
    task, options = read_task(TASKS[name])
    placement = Placement(
        width=100,
        height=90,
        input_width=INPUT[1],
        input_height=INPUT[0],
        scale_x=0.5,
        scale_y=0.5,
        left=3,
        top=-2,
    )
    answer = task.decode({"y": outputs}, options, Context(labels=LABELS, placement=placement))
    entries: Any = answer[task.entries]
    rows = [[entry["index"], entry["score"], *entry.get("box", ())] for entry in entries]
    assert rows
    got = compiled.run(name, outputs).reshape(len(rows), -1)
    np.testing.assert_array_equal(got[:, 0], np.array(rows)[:, 0])
    np.testing.assert_allclose(got, np.array(rows, np.float64), rtol=1e-5, atol=0.051)


def test_guide_names_the_folders_of_the_export(exported: Path) -> None:
    for row in re.findall(r"^\| `(app/[^`]*)`", GUIDE.read_text(), re.MULTILINE):
        assert list(exported.glob(row.rstrip("/"))), row
    assert f'litert:{LITERT}"' in (exported / "app/build.gradle.kts").read_text()
    assert f"LiteRT {LITERT} " in GUIDE.read_text()


def test_folder_holds_model_golden_values_and_labels(exported: Path, packaged: Path) -> None:
    assets = exported / "app/src/main/assets/edgekit"
    assert sorted(path.name for path in assets.iterdir()) == [
        "golden-0.bin",
        "golden-1.bin",
        "labels.txt",
        "model.tflite",
    ]
    assert (assets / "model.tflite").read_bytes() in packaged.read_bytes()
    assert (assets / "labels.txt").read_text() == "off peak\npeak\n"
    source = (exported / MAIN / "Exported.kt").read_text()
    assert "scores = Scores.SOFTMAX" in source and "TASK.answer(outputs[0], labels)" in source


def test_golden_values_are_those_that_the_model_gives(exported: Path) -> None:
    from ai_edge_litert.interpreter import Interpreter

    assets = exported / "app/src/main/assets/edgekit"
    interpreter = Interpreter(str(assets / "model.tflite"))
    interpreter.allocate_tensors()
    (given,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.set_tensor(
        given["index"], np.fromfile(assets / "golden-0.bin", "<f4").reshape(given["shape"])
    )
    interpreter.invoke()
    expected = np.fromfile(assets / "golden-1.bin", "<f4")
    np.testing.assert_allclose(interpreter.get_tensor(result["index"]).ravel(), expected, atol=0.01)


def test_package_without_a_litert_model_is_refused(tmp_path: Path) -> None:
    outcome = edgekit(
        "package",
        TINY / "italy_power_mlp.onnx",
        "-t",
        "x86-64",
        "--backend",
        "ort",
        "-o",
        tmp_path,
        "--name",
        "power",
    )
    assert outcome.code == 0, outcome.stderr
    refusal = edgekit(
        "export", tmp_path / "power-1.0.0-x86-64.edgepkg", "--format", "android", "-o", tmp_path / "app"
    )
    assert refusal.code == ConfigError.exit_code
    assert "has no LiteRT model; package it with --target android" in refusal.stderr
    assert not (tmp_path / "app").exists()
