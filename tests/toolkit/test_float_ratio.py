"""What a report says of a choice that is faster or slower than the float model."""

import json
from pathlib import Path

import pytest
from tests.toolkit.package_run import isolated_home, package, tiny

from edgekit_toolkit.selection.choice import FloatRatio, find_slowdown


def test_choice_that_is_slower_here_is_said_to_be_with_both_figures():
    (note,) = find_slowdown(FloatRatio(0.62, 1.414, 1.19, 1.1), "rpi5")
    assert note.startswith(
        "slower on this machine: it takes 1.19 x float32 and 1.10 x the source model (measured"
    )
    assert "0.62 x float32 as predicted for rpi5, which may be off by 1.4 x" in note


def test_choice_without_a_modelled_figure_says_that_nothing_clearly_faster_keeps_the_limits():
    (note,) = find_slowdown(FloatRatio(None, 1.4, 1.0, 1.2), "x86-64")
    assert note.endswith(
        "it takes 1.20 x the source model (measured here); no form that keeps every limit is clearly faster"
    )


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.03])
def test_choice_that_is_as_fast_needs_no_warning(ratio: float):
    assert find_slowdown(FloatRatio(0.6, 1.4, ratio, ratio), "rpi5") == []


def test_report_and_terminal_state_both_ratios(tmp_path: Path):
    model, data = tiny("digits_cnn")
    with isolated_home(tmp_path / "home"):
        told = package(model, tmp_path / "out", *data, target="rpi5")
    report = json.loads(next((tmp_path / "out").glob("*.report.json")).read_text(encoding="utf-8"))
    outcome = report["outcome"]["latency_to_float"]
    figures = {one["id"]: one["figures"] for one in report["candidates"]}
    chosen, floats = figures[report["outcome"]["chosen"]], figures["C0"]
    assert outcome["modelled"]["value"] == pytest.approx(
        chosen["latency"]["value"] / floats["latency"]["value"]
    )
    assert outcome["measured"]["value"] > 0
    assert (outcome["modelled"]["on"], outcome["measured"]["on"]) == ("rpi5", "host")
    assert "Latency against float32: " in told.stdout
    assert "x measured on this machine" in " ".join(told.stdout.split())
    assert "predicted for the target" in " ".join(told.stdout.split())
