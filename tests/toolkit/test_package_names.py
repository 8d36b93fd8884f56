"""Foreign names are shown by `edgekit package` and never act: in the terminal, the page and file names."""

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from tests.toolkit.cases import cases
from tests.toolkit.package_run import mlp, model_of, package, saved, stored, tensor

from edgekit_cli.cli import main

pytestmark = pytest.mark.usefixtures("home")


EVIL = "</p><img src=x onerror=alert(1)>[bold red]x[/]\x1b[31m\x07\u202e"


class Terminal(io.StringIO):
    """Takes escape sequences, as a real terminal does."""

    def isatty(self) -> bool:
        return True


def test_hostile_tensor_names_are_only_shown(tmp_path: Path) -> None:
    source = saved(mlp(x=EVIL, y=f"y{EVIL}"), tmp_path / "net.onnx")
    outcome = package(source, tmp_path / "out")
    assert outcome.code == 0
    page = next((tmp_path / "out").glob("*.html")).read_text(encoding="utf-8")
    assert "&lt;img src=x" in page
    for acting in ("<img", "\x1b", "\x07", "\u202e"):
        assert acting not in page + outcome.stdout


def test_hostile_names_in_errors_do_not_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = mlp()
    made.graph.node[1].op_type = f"Frob\n{EVIL}"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    code = main(
        ["package", str(saved(made, tmp_path / "net.onnx")), "--target", "rpi4", "-o", str(tmp_path / "out")]
    )
    assert code == 3
    assert terminal.getvalue().count("\n") == 1
    for acting in ("\x1b", "\x07", "\u202e"):
        assert acting not in terminal.getvalue()


def test_long_tensor_names_do_not_flood_the_terminal(tmp_path: Path) -> None:
    source = saved(mlp(x="x" * 10_000, y="y" * 10_000), tmp_path / "net.onnx")
    assert len(package(source, tmp_path / "out").stdout) < 4000
    data = stored(tmp_path / "e.npz", {"x": np.zeros((4, 9), np.float32)})
    assert len(package(source, tmp_path / "out", "--eval", data).stderr) < 4000


@cases(
    ("file", "name"),
    [
        (f"{EVIL.replace('/', '')}.onnx", "p_img_src_x_onerror_alert_1_bold_red_x_31m"),
        ("a b\nc.onnx", "a_b_c"),
        (".onnx", "onnx"),
        ("..onnx", "model"),
        ("-rf.onnx", "rf"),
        ("$(id);.onnx", "id"),
        ("ü.onnx", "model"),
        ("n" * 200 + ".onnx", "n" * 64),
        (os.fsdecode(b"\xff\xfe.onnx"), "model"),
    ],
)
def test_a_hostile_file_name_makes_a_plain_package_name(file: str, name: str, tmp_path: Path) -> None:
    source = tmp_path / file
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], [tensor("x", [1, 4])], [tensor("y", [1, 4])])
    source.write_bytes(model.SerializeToString())
    outcome = package(source, tmp_path / "out")
    assert outcome.code == 0
    assert {path.name.split("-1.0.0-")[0] for path in (tmp_path / "out").iterdir()} == {name}
    assert "\x1b" not in outcome.stdout
    report = next((tmp_path / "out").glob("*.report.json"))
    assert json.loads(report.read_text(encoding="utf-8"))["name"] == name
