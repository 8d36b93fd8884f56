"""`edgekit package` refuses what it cannot use: an exit code, one line, and nothing left behind."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.cases import cases
from tests.toolkit.control_flow_models import loop_by_data
from tests.toolkit.package_run import (
    check_refused,
    edgekit,
    listing,
    mlp,
    model_of,
    package,
    samples,
    saved,
    stored,
    tensor,
)

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(mlp(), tmp_path / "net.onnx")


def bad_model(kind: str, folder: Path) -> Path:
    path, made = folder / "net.onnx", mlp()
    content = made.SerializeToString()
    nothing = [tensor("x", [1, 8])], [tensor("y", [1, 8])]
    match kind:
        case "text":
            path.write_text("hello\n")
        case "empty":
            path.touch()
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "folder":
            path.mkdir()
        case "custom domain":
            saved(model_of([helper.make_node("Relu", ["x"], ["y"], domain="my.ops")], *nothing), path)
        case "unknown operator":
            saved(model_of([helper.make_node("Frobnicate", ["x"], ["y"])], *nothing), path)
        case "new opset":
            made.opset_import[0].version = 999
            saved(made, path)
        case "old opset":
            made.opset_import[0].version = 5
            saved(made, path)
        case "other output shape":  # [1, 16, 4], by arithmetic that no shape inference follows
            nodes = [
                helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
                helper.make_node("Mul", ["sum", "zero"], ["nothing"]),
                helper.make_node("Cast", ["nothing"], ["none"], to=TensorProto.INT64),
                helper.make_node("Add", ["none", "sizes"], ["shape"]),
                helper.make_node("Reshape", ["x", "shape"], ["y"]),
            ]
            weights = {"zero": np.float32(0), "sizes": np.array([1, 16, 4])}
            saved(model_of(nodes, [tensor("x", [1, 64])], [tensor("y", [1, 1, 4])], weights), path)
        case "NaN weight":
            weight = numpy_helper.to_array(made.graph.initializer[0]).copy()
            weight[0, 0] = np.nan
            made.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "a"))
            saved(made, path)
        case "external data missing" | "external data outside":
            onnx.save(made, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
            (folder / "weights.bin").unlink()
            if kind == "external data outside":
                (folder.parent / "secret").write_bytes(bytes(4096))
                path.write_bytes(path.read_bytes().replace(b"weights.bin", b"../secret.."[:11]))
    return path


@cases(
    ("kind", "message"),
    [
        ("missing", "no such file"),
        ("text", "is text that begins with 'hello"),
        ("empty", "is empty"),
        ("truncated", "is truncated"),
        ("folder", "is a folder"),
        ("custom domain", "custom domain 'my.ops'"),
        ("unknown operator", "operator 'Frobnicate' .* is not in ai.onnx opset 17"),
        ("new opset", "opset 999 is too new"),
        ("old opset", "opset 5 is too old"),
        (
            "other output shape",
            r"'y': got shape \[1, 16, 4\], expected \[1, 1, 4\]; export it with the right",
        ),
        ("NaN weight", r"weight 'a' \[8, 32\] has 1 NaN"),
        ("external data missing", "stored in 'weights.bin', and there is no such file"),
        ("external data outside", "outside the model's folder"),
    ],
)
def test_a_bad_model_is_refused(kind: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = bad_model(kind, tmp_path / "in")
    check_refused(lambda *more: package(path, tmp_path / "out", *more), 3, message)
    assert not (tmp_path / "out").exists()


DATA = {
    "missing": (None, "no such file or folder"),
    "wrong name": ({"image": np.zeros((4, 8), np.float32), "other": np.zeros(4)}, "'x'"),
    "wrong shape": ({"x": np.zeros((4, 9), np.float32)}, r"has shape \[4, 9\], but input 'x' takes \[N, 8\]"),
    "wrong dtype": ({"x": np.zeros((4, 8))}, "has dtype float64, but input 'x' takes float32"),
    "no samples": ({"x": np.zeros((0, 8), np.float32)}, "holds no samples"),
    "NaN": ({"x": np.full((4, 8), np.nan, np.float32)}, "sample 0: 8 values of 'x' are NaN"),
}


@cases("option", ["--calibration", "--eval"])
@cases("kind", DATA)
def test_bad_samples_are_refused(kind: str, option: str, model: Path, tmp_path: Path) -> None:
    arrays, message = DATA[kind]
    data = tmp_path / "data.npz"
    if arrays is not None:
        stored(data, arrays)  # type: ignore[arg-type]  # the values are arrays
    check_refused(lambda *more: package(model, tmp_path / "out", option, data, *more), 4, message)
    assert not (tmp_path / "out").exists()


def test_a_label_outside_the_classes_is_refused(model: Path, tmp_path: Path) -> None:
    data = stored(tmp_path / "e.npz", samples(8, 1, y=np.full(8, 4)))
    check_refused(
        lambda *more: package(model, tmp_path / "out", "--eval", data, *more),
        4,
        "label 4 is outside .* 4 classes",
    )


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("best", "expected auto, top1"),
        ("top1", "needs labels"),
        ("nowhere.py:f", "there is no Python file nowhere.py"),
        ("{}:missing", "no attribute 'missing'"),
        ("{}:fails", "RuntimeError"),
        ("{}:leaves", "SystemExit"),
        ("{}:large", "expected scores 0..1"),
        ("{}:empty", "expected scores 0..1"),
        ("{}:nothing", "expected scores 0..1"),
    ],
)
def test_a_bad_metric_is_refused(metric: str, message: str, model: Path, tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "import sys\n"
        "def fails(o, r, y): raise RuntimeError('no\\nno')\n"
        "def leaves(o, r, y): sys.exit(0)\n"
        "def large(o, r, y): return 5\n"
        "def empty(o, r, y): return []\n"
        "def nothing(o, r, y): return None\n"
    )
    metric = metric.format(code)
    check_refused(lambda *more: package(model, tmp_path / "out", "--metric", metric, *more), 4, message)


@cases(
    "text", ["{", "[1]", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a":' * 3000 + "1" + "}" * 3000]
)
def test_preprocessing_that_is_no_json_object_is_refused(text: str, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "pre.json"
    file.write_text(text)
    check_refused(
        lambda *more: package(model, tmp_path / "out", "--preprocessing", file, *more),
        4,
        "expected a JSON object",
    )


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\n"])
def test_labels_that_are_no_text_are_refused(content: bytes, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_bytes(content)
    check_refused(
        lambda *more: package(model, tmp_path / "out", "--labels", file, *more), 4, "one class a line"
    )


def test_an_unknown_target_is_refused_with_near_names(model: Path, tmp_path: Path) -> None:
    check_refused(
        lambda *more: package(model, tmp_path / "out", *more, target="jetsn"), 6, "did you mean jetson.*rpi5"
    )


@pytest.mark.parametrize(
    "options",
    [
        *(("--budget", text) for text in ("foo=1", "size", "size=abc", "size=1MB,size=2MB", "size=1XB", "=")),
        *(("--budget", text) for text in ("size=1e999MB", "latency=-1ms", "size=nan")),
        *(("--dim", text) for text in ("N", "N=-1", "=3", "N=99999999999", f"N={'9' * 5000}")),
        ("--dim", "N=2", "--dim", "N=3"),
        ("--batch", "0"), ("--threads", "0"), ("--name", "../x"), ("--name", "n" * 65), ("--version", "a/b"),
        ("--labels", "/nowhere"), ("--nonsense",),
    ],
    ids=lambda options: " ".join(options)[:40],
)  # fmt: skip
def test_a_wrong_command_line_is_a_usage_error(options: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    assert package(model, tmp_path / "out", *options).code == 2
    assert package(model, tmp_path / "out", *options, "--json").error["exit_code"] == 2
    assert not (tmp_path / "out").exists()


def test_no_target_is_a_usage_error(model: Path, tmp_path: Path) -> None:
    outcome = edgekit("package", model, "-o", tmp_path / "out")
    assert outcome.code == 2
    assert "edgekit targets" in outcome.stderr


def test_inputs_larger_than_memory_are_refused(tmp_path: Path) -> None:
    shape = ["N", 1 << 12, 1 << 12]  # petabytes with the batch below
    relu = helper.make_node("Relu", ["x"], ["y"])
    model = saved(model_of([relu], [tensor("x", shape)], [tensor("y", shape)]), tmp_path / "net.onnx")
    check_refused(
        lambda *more: package(model, tmp_path / "out", "--batch", 2**31 - 1, *more), 1, "smaller --batch"
    )
    assert not (tmp_path / "out").exists()


def test_an_impossible_budget_is_refused_with_a_report(model: Path, tmp_path: Path) -> None:
    options = ("--eval", stored(tmp_path / "e.npz", samples(16, 1)), "--budget", "size=1kB")
    plain = package(model, tmp_path / "out", *options)
    assert plain.code == 5
    assert sorted(listing(tmp_path / "out")) == [
        f"net-1.0.0-x86-64.report.{ending}" for ending in ("html", "json")
    ]
    for words in (plain.stdout, plain.stderr):
        text = " ".join(words.split())
        assert re.search(
            r"binding: size \(size at most 1kB, the least with the other limits kept is \d", text
        )
        assert re.search(r"allow size=[\d.]+kB for .* \(C\d\)", text)
    error = package(model, tmp_path / "out", *options, "--json").error
    assert error["binding"] == ["size"]
    assert error["report"] == str(tmp_path / "out" / "net-1.0.0-x86-64.report.json")
    assert error["needed"].startswith("allow size=")
    assert re.fullmatch(r"C\d", error["closest"])


def test_what_is_needed_is_enough(model: Path, tmp_path: Path) -> None:
    data = ("--eval", stored(tmp_path / "e.npz", samples(16, 1)))
    needed = package(model, tmp_path / "out", *data, "--budget", "size=1kB", "--json").error["needed"]
    match = re.search(r"allow (\S+)", needed)
    assert match is not None
    assert package(model, tmp_path / "out", *data, "--budget", match[1]).code == 0


def test_a_limit_on_a_figure_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    source = saved(loop_by_data(), tmp_path / "loop.onnx")
    outcome = package(source, tmp_path / "out", "--budget", "energy=1mJ", target="rpi5")
    assert outcome.code == 5
    assert "energy" in outcome.stderr
    assert "inf" not in outcome.stderr


def test_a_refusal_keeps_an_earlier_package(model: Path, tmp_path: Path) -> None:
    assert package(model, tmp_path).code == 0
    before = listing(tmp_path)
    assert package(model, tmp_path, "--budget", "size=1kB").code == 5
    assert {name: content for name, content in listing(tmp_path).items() if "report" not in name} == {
        name: content for name, content in before.items() if "report" not in name
    }


def test_output_that_is_nan_is_refused_without_talk_of_samples_that_were_not_given(tmp_path: Path) -> None:
    logarithm = helper.make_node("Log", ["x"], ["y"])
    model = model_of([logarithm], [tensor("x", [1, 8])], [tensor("y", [1, 8])])
    refused = package(saved(model, tmp_path / "log.onnx"), tmp_path / "out")
    assert "'y' is NaN for generated inputs" in refused.stderr
    assert "range of the calibration samples" not in refused.stderr
