"""Golden rows take both branches of an `If` where generated inputs do; else the report says so."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto
from tests.toolkit.control_flow_models import graph, model, node, value
from tests.toolkit.package_run import edgekit, package, read_only, saved

from edgekit_runtime.package.golden import resample
from edgekit_runtime.sessions.selftest import read_golden_inputs
from edgekit_toolkit.packaging.golden_rows import choose_seeds

pytestmark = pytest.mark.usefixtures("home")


def branching(limit: float, *, inner: bool = False) -> onnx.ModelProto:
    """y [1, 8] = x @ w where the mean of x [1, 8] exceeds a limit, else -x; a branch may branch again."""
    choice: list[NodeProto] = [node("MatMul", ["x", "w"], ["product"])]
    if inner:
        relu = graph([node("Relu", ["x"], ["a"])], [], [value("a", [1, 8])])
        same = graph([node("Abs", ["x"], ["b"])], [], [value("b", [1, 8])])
        choice = [
            node("ReduceMax", ["x"], ["top"], keepdims=0),
            node("Greater", ["top", "limit"], ["is_top"]),
            node("If", ["is_top"], ["product"], name="peak", then_branch=relu, else_branch=same),
        ]
    nodes = [
        node("ReduceMean", ["x"], ["mean"], keepdims=0),
        node("Greater", ["mean", "limit"], ["is_loud"]),
        node(
            "If",
            ["is_loud"],
            ["y"],
            name="gate",
            then_branch=graph(choice, [], [value("product", [1, 8])]),
            else_branch=graph([node("Neg", ["x"], ["negative"])], [], [value("negative", [1, 8])]),
        ),
    ]
    weights = {"w": np.eye(8, dtype=np.float32) * 3, "limit": np.float32(limit)}
    return model(nodes, [value("x", [1, 8])], [value("y", [1, 8])], weights)


def about_branches(folder: Path, whole: onnx.ModelProto, *options: object) -> list[str]:
    made = package(saved(whole, folder / "model.onnx"), folder / "out", "--json", *options)
    assert made.code == 0, made.stderr
    return [text for text in made.json["warnings"] if "branch" in text]


def test_golden_rows_take_both_branches_without_a_warning(tmp_path: Path) -> None:
    assert about_branches(tmp_path, branching(0.3)) == []
    with read_only(tmp_path / "out") as opened:
        assert opened.manifest.golden.rows is not None
        first = read_golden_inputs(opened)
        rows = [first, *(resample(first, seed) for seed in opened.manifest.golden.rows.seeds)]
    assert {bool(row["x"].mean() > 0.3) for row in rows} == {True, False}


def test_branch_that_no_row_takes_is_named_in_the_report(tmp_path: Path) -> None:
    (warning,) = about_branches(tmp_path, branching(100.0))
    assert warning.startswith("no golden input takes the then branch of If 'gate'")
    (page,) = (tmp_path / "out").glob("*.html")
    assert "no golden input takes the then branch of If" in page.read_text()


def test_engine_with_one_row_names_the_branch_that_it_does_not_take(tmp_path: Path) -> None:
    source = saved(branching(0.3), tmp_path / "model.onnx")
    made = edgekit("package", source, "--target", "jetson", "-o", tmp_path / "out", "--search-seconds", 0)
    assert made.code == 0, made.stderr
    assert "branch of If 'gate'" in made.stdout + made.stderr


def test_branches_inside_a_branch_are_named_as_not_followed(tmp_path: Path) -> None:
    (warning,) = about_branches(tmp_path, branching(0.3, inner=True))
    assert "whether golden inputs take both branches of If 'peak' is not known" in warning


def test_row_of_the_other_branch_comes_first() -> None:
    first = {"x": np.linspace(-1, 1, 64, dtype=np.float32)[None]}
    seldom = [seed for seed in range(100) if resample(first, seed)["x"].mean() > 0.8]
    assert 0 < len(seldom) < 10

    seeds = choose_seeds(
        lambda feeds: [feeds["x"] * 2],
        first,
        macs=1e4,
        conditions=lambda feeds: {"gate": bool(feeds["x"].mean() > 0.8)},
    )
    assert seeds[0] in seldom
