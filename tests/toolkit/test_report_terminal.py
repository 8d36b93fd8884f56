import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.toolkit import report_sample
from tests.toolkit.cases import cases

from edgekit_toolkit.report.terminal import print_summary


def _printed(document: dict[str, Any], width: int = 80, written: tuple[Path, ...] = ()) -> str:
    file = io.StringIO()
    print_summary(document, Console(file=file, width=width), written)
    return file.getvalue()


def _line(text: str, part: str) -> str:
    return next(line for line in text.splitlines() if part in line)


@cases("sample", ["packaged", "refused", "bare"])
@cases("width", [80, 60, 40, 30, 120])
def test_no_line_is_wider_than_the_console(sample: str, width: int) -> None:
    text = _printed(getattr(report_sample, sample)(), width)

    assert max(len(line) for line in text.splitlines()) <= width


def test_without_a_terminal_no_colour_codes_are_printed() -> None:
    assert "\x1b" not in _printed(report_sample.packaged())


def test_packaged_outcome_warnings_and_reason_are_printed() -> None:
    document = report_sample.packaged()
    text = " ".join(_printed(document).split())

    assert "PACKAGED C5, int8 per channel mixed, 3 layers float" in text
    assert document["outcome"]["reason"] in text
    for warning in document["warnings"]:
        assert f"WARNING {warning}" in text


def test_budget_lines_fit_80_columns_each_with_bar_and_origin() -> None:
    text = _printed(report_sample.packaged())

    assert _line(text, "Latency  ").split() == [
        *("ok", "Latency", "24.9", "of", "40.0", "ms", "███████░░░░░", "38", "%", "headroom"),
        *("(estimated,", "rpi5)"),
    ]
    assert _line(text, "Size  ").endswith("(measured, host) ")


@pytest.mark.parametrize("width", [40, 60, 80])
def test_in_any_width_each_limit_and_each_figure_is_whole(width: int) -> None:
    lines = _printed(report_sample.packaged(), width).splitlines()
    text = " ".join(" ".join(lines).split())

    for limit in (
        "5.24 of 10.0 MB",
        "24.9 of 40.0 ms",
        "0.80 of 1.00 points",
        "38 % headroom (estimated, rpi5)",
    ):
        assert any(limit in line for line in lines), limit
    for figure in ("9.36 MB", "!61.8 ms", "88.80 %", "!7.20", "24.9 ms"):
        assert any(figure in line for line in lines), figure
    for candidate in ("x C1 float16 weights", "> C5 int8 per channel mixed, 3", "C6 int8 per channel"):
        assert candidate in text


def test_at_40_columns_each_figure_stands_beside_its_name() -> None:
    text = " ".join(_printed(report_sample.packaged(), 40).split())

    assert "Candidates (Size: measured, host; Latency: estimated, rpi5;" in text
    assert "C3 int8 per tensor Size 4.81 MB, Latency 22.6 ms, Score 81.60 %, Drop !7.20 ±1.1* x C4" in text
    assert "* on the samples held back; scores are on those that choose" in text
    assert "ok Latency 24.9 of 40.0 ms 38 % headroom (estimated, rpi5)" in text


def test_a_budget_too_wide_for_a_table_is_stacked() -> None:
    document = report_sample.packaged()
    for candidate in document["candidates"]:
        candidate["figures"]["latency"]["on"] = "jetson-orin-nano"
    lines = _printed(document, 80).splitlines()

    assert "   38 % headroom (estimated, jetson-orin-nano)" in lines


def test_float_model_pareto_candidates_and_the_mark_of_the_chosen_are_listed() -> None:
    text = _printed(report_sample.packaged())

    rows = [line for line in text.splitlines() if line[3:5] in {f"C{index}" for index in range(9)}]
    assert [row[3:5] for row in rows] == ["C0", "C1", "C2", "C3", "C4", "C5", "C6"]
    assert [row[3:5] for row in rows if row.startswith(">")] == ["C5"]
    assert [row[3:5] for row in rows if row.startswith("x")] == ["C0", "C1", "C2", "C3", "C4"]
    assert "2 dominated not shown" in text


def test_chosen_candidate_is_listed_even_when_dominated() -> None:
    document = report_sample.packaged()
    document["candidates"][5]["pareto"] = False

    assert _line(_printed(document), "C5 int8").startswith(">")


def test_closest_candidate_of_a_refusal_is_listed_even_when_dominated() -> None:
    document = report_sample.refused()
    document["candidates"][5]["pareto"] = False

    assert any(line.startswith("x  C5") for line in _printed(document).splitlines())


def test_common_origin_stands_in_the_heading_and_mixed_ones_in_the_cells() -> None:
    document = report_sample.packaged()
    document["candidates"][4]["figures"]["latency"]["label"] = "modelled"
    text = _printed(document)

    assert "23.1 ms mod." in _line(text, "C4 int8")
    assert "24.9 ms est." in _line(text, "C5 int8")
    assert "est. estimated" in text
    assert _line(text, "see cells").split() == ["Candidate", "host", "see", "cells", "host", "host"]


def test_forms_that_were_set_aside_are_a_note_below_the_candidates() -> None:
    document = report_sample.packaged()
    lines = " ".join(_printed(document).split())

    assert f"2 dominated not shown tried and set aside: {document['set_aside'][0]}" in lines


def test_refused_outcome_names_binding_limit_closest_candidate_and_need() -> None:
    document = report_sample.refused()
    text = " ".join(_printed(document).split())

    assert f"REFUSED {document['outcome']['reason']}" in text
    assert "Binding limit: size" in text
    assert "Closest candidate: C5, int8 per channel mixed" in text
    assert f"Needed: {document['outcome']['needed']}" in text
    assert "OVER Size 5.24 of 5.00 MB ████████████▶ 4.9 % over (measured, host)" in text
    assert "edgepkg" not in text


def test_files_written_are_listed() -> None:
    text = _printed(
        report_sample.packaged(), written=(Path("out/net.report.html"), Path("out/net.report.json"))
    )

    assert "efficientnet-lite0-1.2.0-rpi5.edgepkg (5,243,010 bytes" in text
    assert "efficientnet-lite0-1.2.0-rpi5.recipe.json" in text
    assert "Report   out/net.report.html\nReport   out/net.report.json\n" in text


@pytest.mark.parametrize("sample", ["packaged", "refused", "bare"])
def test_ascii_console_gets_ascii_only(sample: str) -> None:
    document = getattr(report_sample, sample)()
    document["candidates"][0]["label"] = "größe → klein"
    document["warnings"] = ["größe"]
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    print_summary(document, Console(file=file, width=80))
    file.flush()

    assert "gr??e" in raw.getvalue().decode("ascii")


def test_brackets_in_names_are_text_and_control_characters_are_not_passed_on() -> None:
    document = report_sample.packaged()
    document["name"] = "[bold]net[/bold]\x1b[31m\x07"
    document["candidates"][5]["label"] = "[link=http://evil.test]x[/link]\x1b]0;title\x07\nC9 forged line"
    document["warnings"] = ["[/]\x1b[2J"]
    document["command"] = document["recipe"] = "\x1b[2J"
    text = _printed(document)

    assert "[bold]net[/bold]\ufffd[31m\ufffd" in text
    assert "[/]\ufffd[2J" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert not any(line.startswith("C9") for line in text.splitlines())


def test_drop_that_is_not_resolved_is_the_headline_and_never_ok() -> None:
    text = " ".join(_printed(report_sample.packaged()).split())

    assert (
        "NOT RESOLVED top-1 accuracy 88.00 %, source 88.80 %: drop 0.80 points (95 % interval -0.10 to 1.90,"
        " 250 samples that chose nothing). A limit of 1.00 points needs at least 15,100 evaluation samples"
        in text
    )
    assert "? Drop 0.80 of 1.00 points ???????????? not resolved (measured, host)" in text


def test_without_data_the_limit_on_the_drop_is_not_checked() -> None:
    document = report_sample.packaged()
    document["budget"][3].update(value=None, state="not checked")
    document["accuracy"].update(state="not checked", score=None, baseline=None, drop_points=None, drop=None)
    text = " ".join(_printed(document).split())

    assert "NOT CHECKED the drop in accuracy, no data: give --eval with labelled samples" in text
    assert "? Drop not checked: no data" in text


def test_drop_that_only_its_interval_takes_over_the_limit_has_no_headroom() -> None:
    document = report_sample.packaged()
    document["budget"][3].update(value=0.0, high=4.81, state="over")
    text = " ".join(_printed(document).split())

    assert "OVER Drop 0.00 of 1.00 points ████████████▶ up to 4.81" in text


def test_drop_that_is_kept_is_stated_with_its_interval() -> None:
    document = report_sample.packaged()
    document["budget"][3].update(value=-0.4, high=0.7, state="ok")
    drop = {"interval": [-0.9, 0.7], "confidence": 0.95, "samples": 250, "held_back": True, "resolved": True}
    document["accuracy"].update(state="ok", drop_points=-0.4, drop=drop)
    text = " ".join(_printed(document).split())

    assert "drop -0.40 points (95 % interval -0.90 to 0.70, 250 samples that chose nothing)" in text
    assert "ok Drop -0.40 of 1.00 points ████████░░░░ 30 % headroom" in text  # from the upper end


def test_full_bar_only_when_the_limit_is_used_up() -> None:
    document = report_sample.packaged()
    document["budget"][0]["value"] = 9_999_999
    document["budget"][1]["value"] = 40
    document["budget"][2]["value"] = 1
    text = _printed(document)

    assert "███████████░" in _line(text, "Size  ")
    assert "████████████ " in _line(text, "Latency  ")
    assert "█░░░░░░░░░░░" in _line(text, "Memory  ")


def test_further_variants_are_printed_with_their_figures() -> None:
    text = " ".join(_printed(report_sample.packaged()).split())

    assert "Further variants in the package ort-static-int8 25.6 ms, 5.31 MB alone, drop 0.60 points" in text
    assert "Further variants" not in _printed(report_sample.bare())
