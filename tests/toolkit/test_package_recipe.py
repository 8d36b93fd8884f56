"""A recipe gives the same bytes again, or says why it cannot."""

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.package_run import (
    check_refused,
    edgekit,
    environment,
    listing,
    mlp,
    package,
    read_only,
    samples,
    saved,
    stored,
    tiny,
)

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import RecipeError
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.packaging.recipe import Recipe, read_recipe, tool_versions
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.pipeline.publish import evidence_of, publish
from edgekit_toolkit.pipeline.replay import read_earlier
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.pipeline.run import Run
from edgekit_toolkit.pipeline.search import search
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.selection.budget import parse_budget
from edgekit_toolkit.targets.loader import load_target

LABELS, PREPROCESSING = "näh\nfern\n", {"mean": [0.5], "nested": {"b": 1, "a": "é"}}


pytestmark = pytest.mark.usefixtures("home")


@dataclass(frozen=True)
class Made:
    """The files of one candidate."""

    package: Path
    recipe: Path
    label: str


def candidates(run: Run, folder: Path) -> list[Made]:
    """Write every candidate of a run, not only the chosen one."""
    made = []
    for draft in run.candidates:
        place = folder / draft.id
        place.mkdir()
        published = publish(draft.package, draft.recipe, evidence_of({}), place, load_signer())
        made.append(Made(place / published.package, place / published.recipe, draft.label))
    return made


def request(model: Path, target: str, **more: Any) -> Request:
    return Request(
        model=model,
        target=load_target(target),
        budget=parse_budget("drop=5%"),
        name="net",
        version="1.0.0",
        threads=1,
        **{"labels": LABELS, "preprocessing": PREPROCESSING, "search_s": 20.0, **more},
    )


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[Made]:
    """All forms of `digits_cnn`, mixed precision included."""
    source, data = tiny("digits_cnn")
    asked = request(source, "rpi4", calibration=data[1], evaluation=data[3])
    return candidates(search(asked, load_signer(), lambda *_: None), tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def mixed(digits: list[Made]) -> Made:
    """A static int8 form with a layer in float: the recipe with the most in it."""
    return next(made for made in digits if "1 layer in float" in made.label)


def repeated(model: Path, recipe: Path, out: Path) -> bytes:
    outcome = edgekit("package", model, "--recipe", recipe, "-o", out)
    assert (outcome.code, outcome.stderr) == (0, "")
    (path,) = out.glob("*.edgepkg")
    assert path.name in "".join(outcome.stdout.split())
    return path.read_bytes()


def test_every_form_is_repeated_byte_for_byte(digits: list[Made], tmp_path: Path) -> None:
    source, _ = tiny("digits_cnn")
    kinds = set()
    for made in digits:
        out = tmp_path / made.package.parent.name
        assert repeated(source, made.recipe, out) == made.package.read_bytes(), made.label
        assert (out / made.recipe.name).read_bytes() == made.recipe.read_bytes()
        kinds.add(read_recipe(made.recipe).form.kind)
    assert kinds == find_support("ort").kinds


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("jetson", {"batch": 4}),
        ("x86-64", {"batch": 2, "labels": None, "preprocessing": None}),
        ("rpi5", {"dims": {"N": 3}}),
        ("android", {}),
    ],
)
def test_every_option_is_repeated_byte_for_byte(target: str, options: dict[str, Any], tmp_path: Path) -> None:
    source = saved(mlp(), tmp_path / "net.onnx")
    data = {
        "calibration": stored(tmp_path / "c.npz", samples(16, 1)),
        "evaluation": stored(tmp_path / "e.npz", samples(16, 2)),
    }
    run = search(request(source, target, **data, **options), load_signer(), lambda *_: None)
    for made in candidates(run, tmp_path):
        assert repeated(source, made.recipe, made.recipe.parent / "again") == made.package.read_bytes()


def test_a_package_without_data_is_repeated_byte_for_byte(tmp_path: Path) -> None:
    source = saved(mlp(), tmp_path / "net.onnx")
    assert package(source, tmp_path / "out").code == 0
    (recipe,) = (tmp_path / "out").glob("*.recipe.json")
    (first,) = (tmp_path / "out").glob("*.edgepkg")
    assert repeated(source, recipe, tmp_path / "again") == first.read_bytes()


def test_a_package_for_a_target_of_ones_own_is_repeated_without_its_file(tmp_path: Path) -> None:
    builtin = resources.files("edgekit_toolkit.targets").joinpath("rpi5.toml").read_text(encoding="utf-8")
    target = tmp_path / "board.toml"
    target.write_text(builtin.replace('name = "rpi5"', 'name = "board"', 1), encoding="utf-8")
    source = saved(mlp(), tmp_path / "net.onnx")
    assert package(source, tmp_path / "out", target=str(target)).code == 0
    target.unlink()
    (recipe,) = (tmp_path / "out").glob("*.recipe.json")
    (first,) = (tmp_path / "out").glob("net-1.0.0-board.edgepkg")
    assert repeated(source, recipe, tmp_path / "again") == first.read_bytes()


def test_another_process_with_another_hash_seed_gives_the_same_bytes(mixed: Made, tmp_path: Path) -> None:
    source, _ = tiny("digits_cnn")
    command = ["package", source, "--recipe", mixed.recipe, "-o", tmp_path]
    subprocess.run(
        [sys.executable, "-m", "edgekit_cli", *map(str, command)],
        env={**environment(), "PYTHONHASHSEED": "4711"},
        check=True,
        capture_output=True,
    )
    assert (tmp_path / mixed.package.name).read_bytes() == mixed.package.read_bytes()


def test_a_renamed_model_and_recipe_give_the_same_bytes(mixed: Made, tmp_path: Path) -> None:
    source, _ = tiny("digits_cnn")
    (tmp_path / "other.onnx").write_bytes(source.read_bytes())
    (tmp_path / "other.json").write_bytes(mixed.recipe.read_bytes())
    content = repeated(tmp_path / "other.onnx", tmp_path / "other.json", tmp_path / "out")
    assert content == mixed.package.read_bytes()


def test_another_key_changes_only_the_signature(mixed: Made, tmp_path: Path) -> None:
    source, _ = tiny("digits_cnn")
    assert edgekit("keys", "generate", "second").code == 0
    outcome = edgekit(
        "package", source, "--recipe", mixed.recipe, "-o", tmp_path / "out", "--key", "second", "--json"
    )
    assert outcome.code == 0
    with read_only(mixed.package.parent) as first, read_only(tmp_path / "out") as second:
        assert first.key_id != second.key_id == outcome.json["key_id"]
        assert first.manifest == second.manifest
        for artifact in first.manifest.artifacts:
            assert bytes(first.read(artifact.path)) == bytes(second.read(artifact.path))


def test_json_names_package_key_and_recipe(mixed: Made, tmp_path: Path) -> None:
    source, _ = tiny("digits_cnn")
    found = edgekit("package", source, "--recipe", mixed.recipe, "-o", tmp_path, "--json").json
    path = Path(found["package"])
    assert path.parent == tmp_path
    assert found["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found["recipe_sha256"] == read_recipe(mixed.recipe).sha256


def check_recipe_refused(content: bytes, message: str, tmp_path: Path, model: Path | None = None) -> None:
    recipe = tmp_path / "edited.json"
    recipe.write_bytes(content)
    source = model or tiny("digits_cnn")[0]
    check_refused(
        lambda *more: edgekit("package", source, "--recipe", recipe, "-o", tmp_path / "out", *more),
        11,
        message,
    )
    assert not (tmp_path / "out").exists()


def test_another_model_is_refused(mixed: Made, tmp_path: Path) -> None:
    other = saved(mlp(), tmp_path / "net.onnx")
    check_recipe_refused(
        mixed.recipe.read_bytes(), "is for a model with sha256 .* but .*net.onnx has", tmp_path, other
    )


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """`digits_cnn`, trained further."""
    model = onnx.load(tiny("digits_cnn")[0])
    draw = np.random.default_rng(0)
    for weight in model.graph.initializer:
        values = onnx.numpy_helper.to_array(weight)
        if values.dtype == np.float32 and values.size > 100:
            moved = values + 0.05 * values.std() * draw.standard_normal(values.shape).astype(np.float32)
            weight.CopyFrom(onnx.numpy_helper.from_array(moved, weight.name))
    return saved(model, tmp_path / "tuned.onnx")


LIKE = ("--budget", "drop=5%", "--name", "net", "--version", "1.1.0", "--like")


def test_model_that_was_trained_further_keeps_the_form_of_its_package(
    tuned: Path, mixed: Made, tmp_path: Path
) -> None:
    _, data = tiny("digits_cnn")
    outcome = package(tuned, tmp_path / "out", *data, *LIKE, mixed.recipe, target="rpi4")
    assert outcome.code == 0, outcome.stderr
    before, after = read_recipe(mixed.recipe), read_recipe(next((tmp_path / "out").glob("*.recipe.json")))
    assert after.form.to_json() == {**before.form.to_json(), "earlier": before.model_sha256}
    assert (after.source_sha256, after.model_sha256) != (before.source_sha256, before.model_sha256)


def test_update_repeats_only_beside_its_earlier_package(tuned: Path, mixed: Made, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    assert package(tuned, first, *tiny("digits_cnn")[1], *LIKE, mixed.recipe, target="rpi4").code == 0
    recipe = next(first.glob("*.recipe.json"))
    outcome = edgekit("package", tuned, "--recipe", recipe, "-o", again)
    assert outcome.code == RecipeError.exit_code and "--like" in outcome.stderr
    outcome = edgekit("package", tuned, "--recipe", recipe, "--like", mixed.recipe, "-o", again)
    assert outcome.code == 0, outcome.stderr
    made = [next(folder.glob("*.edgepkg")).read_bytes() for folder in (first, again)]
    assert made[0] == made[1]


def test_update_that_misses_a_limit_near_its_earlier_version_is_rounded_as_usual(
    tuned: Path, mixed: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wreck(model: onnx.ModelProto, _: onnx.ModelProto) -> onnx.ModelProto:
        for tensor in model.graph.initializer:
            if tensor.data_type == onnx.TensorProto.INT8:
                tensor.raw_data = bytes(len(tensor.raw_data))
        return model

    monkeypatch.setattr(forms, "bring_near", wreck)
    recipe, earlier = read_earlier(mixed.recipe)
    data = tiny("digits_cnn")[1]
    like = dataclasses.replace(recipe.form, earlier=earlier)
    asked = request(tuned, "rpi4", calibration=data[1], evaluation=data[3], like=like)
    run = search(asked, load_signer(), lambda *_: None)
    chosen = next(one for one in run.candidates if one.id == run.choice.chosen)
    assert (chosen.label, chosen.recipe.form.earlier) == ("as before", None)


def test_recipe_without_its_package_is_nothing_to_be_like(tuned: Path, mixed: Made, tmp_path: Path) -> None:
    alone = tmp_path / mixed.recipe.name
    alone.write_bytes(mixed.recipe.read_bytes())
    check_refused(
        lambda *extra: package(tuned, tmp_path / "out", "--like", alone, *extra, target="rpi4"),
        RecipeError.exit_code,
        "the package beside the recipe, cannot be read",
    )


def test_form_of_another_model_is_refused(mixed: Made, tmp_path: Path) -> None:
    other = saved(mlp(), tmp_path / "net.onnx")
    check_refused(
        lambda *extra: package(other, tmp_path / "out", "--like", mixed.recipe, *extra, target="rpi4"),
        RecipeError.exit_code,
        "--like: the earlier package's form fits no layer of this model",
    )
    assert not list((tmp_path / "out").glob("*.edgepkg"))


# A recipe without variants or disabled rewrites has no such field; test_package_variants.py,
# test_wrong_rewrites.py and test_package_sequences.py have those that do.
OPTIONAL = {"variants", "disabled_optimizers", "fixed", "states", "written_out", "threads"}
FIELDS = [field.name for field in dataclasses.fields(Recipe) if field.name not in OPTIONAL]


@cases("change", ["removed", "changed"])
@cases("name", [*FIELDS, "sha256"])
def test_an_edited_field_is_refused(name: str, change: str, mixed: Made, tmp_path: Path) -> None:
    value = json.loads(mixed.recipe.read_bytes())
    old = value.pop(name)
    if change == "changed":
        value[name] = (
            f"{old}x" if isinstance(old, str) else 7 if not isinstance(old, dict) else {**old, "x": 1}
        )
    check_recipe_refused(json.dumps(value).encode(), "it was edited or damaged", tmp_path)


def test_an_added_field_is_refused(mixed: Made, tmp_path: Path) -> None:
    value = {**json.loads(mixed.recipe.read_bytes()), "note": "mine"}
    check_recipe_refused(json.dumps(value).encode(), "it was edited or damaged", tmp_path)


def forged(recipe: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A changed recipe whose digest is right."""
    value = json.loads(recipe.read_bytes())
    del value["sha256"]
    change(value)
    return json.dumps({**value, "sha256": hashlib.sha256(encode_json(value)).hexdigest()}).encode()


@cases(
    ("name", "value", "message"),
    [
        ("name", "../x", "name is '../x'"),
        ("name", 5, "name is 5, expected a string"),
        ("target", "a/b", "target is 'a/b'"),
        ("backend", "nope", "backend is 'nope', expected one of litert, openvino, ort, tensorrt"),
        ("batch", 0, "batch is 0, expected 1 to"),
        ("batch", True, "batch is True, expected a whole number"),
        ("batch", 3, "makes a model with sha256"),
        ("dims", {"N": 0}, "dims: N is 0, expected 1 to"),
        ("dims", [], "dims: expected a table, got a list"),
        ("steps", [["nonsense", 0]], "there is no pass 'nonsense'"),
        ("steps", [["fix_batch", 99]], "there is no pass 'fix_batch' with form 99"),
        ("steps", 5, "steps: expected a list, got a number"),
        ("form", {"kind": "magic"}, "form.kind is 'magic'"),
        ("form", None, "form is None, expected an object"),
        ("form", {"kind": "float32"}, "makes a model with sha256"),
        ("model_sha256", "0" * 64, "it states 0000"),
        ("golden_seed", -1, "golden_seed is -1, expected 0 to"),
        ("golden_seed", 0.5, "golden_seed is 0.5, expected a whole number"),
        ("golden_ranges", {"image": [1.0, 0.0]}, "1.0..0.0 is not a range"),
        ("golden_ranges", {"image": [0]}, "golden_ranges.image: expected a list of 2 values"),
        ("budget", {"size": "much"}, "budget: size is 'much', expected a number"),
        ("figures", [], "figures: expected a table, got a list"),
        ("labels", 5, "labels is 5, expected a string"),
        ("preprocessing", [1], "preprocessing: expected a table, got a list"),
        ("tools", {"onnx": 1}, "tools: onnx is 1, expected a string"),
        ("note", "mine", "unknown setting 'note'"),
    ],
)
def test_a_forged_field_that_cannot_be_is_refused(
    name: str, value: Any, message: str, mixed: Made, tmp_path: Path
) -> None:
    check_recipe_refused(forged(mixed.recipe, lambda recipe: recipe.update({name: value})), message, tmp_path)


def test_a_recipe_of_other_tools_that_make_another_model_names_them(mixed: Made, tmp_path: Path) -> None:
    def change(recipe: dict[str, Any]) -> None:
        recipe["tools"]["onnxruntime"] = "0.0.1"
        recipe["model_sha256"] = "0" * 64

    here = re.escape(tool_versions("ort")["onnxruntime"])
    check_recipe_refused(
        forged(mixed.recipe, change), rf"made with onnxruntime 0\.0\.1 \(here {here}\)", tmp_path
    )


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_a_truncated_recipe_is_refused(share: float, mixed: Made, tmp_path: Path) -> None:
    content = mixed.recipe.read_bytes()
    check_recipe_refused(content[: int(share * len(content))], "is not JSON", tmp_path)


@cases(
    ("content", "message"),
    [
        (b"\xff\xfe", "is not JSON"),
        (b"null", "format is 'NoneType'"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"format": "https://edgekit.dev/recipe/v2"}', "expected 'https://edgekit.dev/recipe/v1'"),
        (b'{"format": "https://edgekit.dev/recipe/v1", "a": NaN}', "holds what JSON in UTF-8 cannot"),
        (b'{"format": "https://edgekit.dev/recipe/v1", "a": "\\ud800"}', "holds what JSON in UTF-8 cannot"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    check_recipe_refused(content, message, tmp_path)


@pytest.mark.parametrize("place", ["missing", "."])
def test_a_recipe_that_cannot_be_read_is_refused(place: str, tmp_path: Path) -> None:
    source, _ = tiny("digits_cnn")
    check_refused(
        lambda *more: edgekit("package", source, "--recipe", tmp_path / place, "-o", tmp_path / "out", *more),
        11,
        "cannot be read",
    )


@pytest.mark.parametrize(
    "option",
    [
        ("--budget", "size=1MB"),
        ("--version", "2"),
        ("--metric", "top1"),
        ("--dim", "N=1"),
    ],
    ids=lambda option: option[0],
)
def test_options_that_the_recipe_holds_are_a_usage_error(
    option: tuple[str, str], mixed: Made, tmp_path: Path
) -> None:
    source, _ = tiny("digits_cnn")
    outcome = edgekit("package", source, "--recipe", mixed.recipe, "-o", tmp_path / "out", *option)
    assert outcome.code == 2
    assert option[0] in outcome.stderr


@pytest.mark.parametrize("target", ["jetson-orin-nano", "jetson"])
def test_the_target_of_the_recipe_or_its_alias_may_be_given_too(target: str, tmp_path: Path) -> None:
    source = saved(mlp(), tmp_path / "net.onnx")
    assert package(source, tmp_path / "out", target="jetson").code == 0
    (recipe,) = (tmp_path / "out").glob("*.recipe.json")
    (first,) = (tmp_path / "out").glob("*.edgepkg")
    again = ("--recipe", recipe, "-o", tmp_path / "again", "--target", target)
    assert edgekit("package", source, *again).code == 0
    assert (tmp_path / "again" / first.name).read_bytes() == first.read_bytes()


def test_another_target_than_that_of_the_recipe_is_a_usage_error(mixed: Made, tmp_path: Path) -> None:
    source, _ = tiny("digits_cnn")
    again = ("--recipe", mixed.recipe, "-o", tmp_path / "out")
    outcome = edgekit("package", source, *again, "--target", "jetson")
    assert outcome.code == 2
    assert f"for target {read_recipe(mixed.recipe).target}, --target jetson is jetson-orin-nano" in " ".join(
        outcome.stderr.split()
    )
    assert edgekit("package", source, *again, "--target", "jetsn").code == 6
    assert not (tmp_path / "out").exists()


def test_a_repeat_says_what_was_packaged_and_why_there_is_no_report(mixed: Made, tmp_path: Path) -> None:
    source, _ = tiny("digits_cnn")
    outcome = edgekit("package", source, "--recipe", mixed.recipe, "-o", tmp_path / "out")
    recipe, text = read_recipe(mixed.recipe), " ".join(outcome.stdout.split())
    assert (
        f"repeated {recipe.name} {recipe.version} for {recipe.target} ({recipe.backend}, static-int8)" in text
    )
    score: Any = recipe.figures["score"]
    assert f"{score['metric']} {score['value']}, source {score['source_value']}" in text
    assert "no report: nothing was searched or judged again" in text
    assert not list((tmp_path / "out").glob("*report*"))


def test_a_failed_repeat_keeps_what_is_there(mixed: Made, tmp_path: Path) -> None:
    source, _ = tiny("digits_cnn")
    repeated(source, mixed.recipe, tmp_path / "out")
    before = listing(tmp_path / "out")
    wrong = tmp_path / "wrong.json"
    wrong.write_bytes(forged(mixed.recipe, lambda recipe: recipe.update(model_sha256="0" * 64)))
    assert edgekit("package", source, "--recipe", wrong, "-o", tmp_path / "out").code == 11
    assert listing(tmp_path / "out") == before
