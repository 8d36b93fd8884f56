import base64
import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.toolkit import report_sample
from tests.toolkit.report_page import Page, classes, text

EVIL = "<script>alert(1)</script>\"'><img src=http://evil.test/x onerror=alert(2)>]]>--> &amp; {{x}}"
LABELS = ("measured", "calibrated", "modelled", "estimated")
# Strings with a fixed set of values in the schema; all others may hold anything.
FIXED = {
    "schema",
    "created",
    "unit",
    "label",
    "limit",
    "kind",
    "chosen",
    "closest",
    "binding",
    "violations",
    "id",
}


def _with_evil(value: Any, key: str = "", parent: str = "") -> Any:
    """Put hostile text behind every free string and into every free key."""
    if isinstance(value, dict):
        free_keys = key in {"tools", "seconds", "precision"}
        return {f"{k}{EVIL}" if free_keys else k: _with_evil(item, k, key) for k, item in value.items()}
    if isinstance(value, list):
        return [_with_evil(item, key, parent) for item in value]
    free_label = key == "label" and parent in {"candidates", "variants"}
    return f"{value}{EVIL}" if isinstance(value, str) and (key not in FIXED or free_label) else value


@pytest.mark.parametrize("sample", ["packaged", "refused", "bare"])
def test_hostile_text_everywhere_is_shown_and_never_becomes_markup(sample: str, tmp_path: Path) -> None:
    page = Page(_with_evil(getattr(report_sample, sample)()), tmp_path)

    tags = {element.tag for element in page.body.iter()}
    assert not tags & {"script", "img", "iframe", "object", "embed", "link", "form", "base"}
    attributes = [(name, value) for element in page.body.iter() for name, value in element.attrib.items()]
    assert not [name for name, _ in attributes if name.startswith("on") or name in {"src", "style", "action"}]
    assert all(value.startswith("#") for name, value in attributes if name == "href")
    assert "<script>alert(1)</script>" in text(page.one("h1"))
    assert page.html.count("<script") == 0


def test_first_plot_shows_transport_where_it_is_limited(tmp_path: Path) -> None:
    document = report_sample.packaged()
    for candidate in document["candidates"]:
        candidate["figures"]["transport"] = {**candidate["figures"]["size"], "value": 1e5}
    (plot,) = (item for item in Page(document, tmp_path).all("figcaption") if "Transport" in text(item))
    assert "Transport and score" in text(plot)


def test_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    page = Page(report_sample.packaged(), tmp_path)

    style = re.search(r"<style>(.*)</style>", page.html, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    targets = re.findall(r'\s(?:href|src|srcset|data|action)="([^"]*)"', page.html)
    assert {target.partition("#")[0] for target in targets} == {"", "data:,"}


def test_content_security_policy_allows_exactly_the_page_own_style(tmp_path: Path) -> None:
    html = Page(report_sample.packaged(), tmp_path).html

    style = re.search(r"<style>(.*)</style>", html, re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert style is not None
    assert policy is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    rules = policy[1].replace("&#x27;", "'")
    assert rules.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert "unsafe" not in rules
    assert "script-src" not in rules


@pytest.mark.parametrize("sample", ["packaged", "refused"])
def test_every_figure_of_a_candidate_carries_label_and_place(sample: str, tmp_path: Path) -> None:
    document = getattr(report_sample, sample)()
    # Two origins in one column: each cell must then carry its own.
    document["candidates"][2]["figures"]["latency"].update(label="measured", on="host")
    page = Page(document, tmp_path)

    table = page.one("table", "candidates")
    heads = table.findall("./thead/tr/th")
    for row in table.findall("./tbody/tr"):
        for head, cell in zip(heads, row, strict=True):
            if re.search(r"\d (MB|ms|%|points)", text(cell)):
                badges = page.all("span", "badge", head) + page.all("span", "badge", cell)
                assert len(badges) == 1, text(cell)
                assert re.match(r"(measured|modelled|estimated) · (host|rpi5)$", text(badges[0]))


def test_mixed_origins_show_each_candidates_own_label(tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["candidates"][2]["figures"]["latency"].update(label="modelled", on="rpi5")
    page = Page(document, tmp_path)

    rows = page.one("table", "candidates").findall("./tbody/tr")
    badges = [[text(badge) for badge in page.all("span", "badge", row)] for row in rows]
    assert badges[2] == ["modelled · rpi5"]
    assert badges[3] == ["estimated · rpi5"]
    captions = [text(caption) for caption in page.all("figcaption", under=page.section("candidates"))]
    assert "estimated and modelled · see table" in captions[1]


def test_every_budget_tile_with_a_value_carries_label_and_place(tmp_path: Path) -> None:
    page = Page(report_sample.packaged(), tmp_path)

    shown = {text(tile.find("h3")): text(tile) for tile in page.all("div", "tile")}
    assert "24.9 ms estimated · rpi5" in shown["Latency"]
    assert "15.0 MB modelled · rpi5" in shown["Peak memory"]
    assert "5.24 MB measured · host" in shown["Size"]
    assert not any(label in shown["Energy"] for label in LABELS)


def test_source_of_measured_costs_stands_on_the_tile_of_latency_alone(tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["budget"] = []
    for candidate in document["candidates"]:
        figures = candidate["figures"]
        figures["latency"] = {**figures["latency"], "value": 24.9, "label": "calibrated"}
        figures["energy"] = {**figures["energy"], "value": 3.0, "label": "modelled"}
    page = Page(document, tmp_path)

    shown = {text(tile.find("h3")): text(tile) for tile in page.all("div", "tile")}
    assert "modelled" in shown["Energy"]
    assert [name for name, words in shown.items() if "costs:" in words] == ["Latency"]


def test_warnings_stand_above_the_decision(tmp_path: Path) -> None:
    document = report_sample.packaged()
    page = Page(document, tmp_path)

    sections = page.all("section")
    assert classes(sections[0]) == ["warnings"]
    assert [text(item) for item in sections[0].iter("li")] == document["warnings"]
    assert "verdict" in classes(sections[1])


def test_no_warnings_gives_no_warning_box(tmp_path: Path) -> None:
    assert Page(report_sample.bare(), tmp_path).all("section", "warnings") == []


def test_packaged_outcome_names_choice_reason_and_file(tmp_path: Path) -> None:
    document = report_sample.packaged()
    verdict = text(Page(document, tmp_path).one("section", "verdict"))

    assert "Packaged: C5, int8 per channel mixed, 3 layers float" in verdict
    assert document["outcome"]["reason"] in verdict
    assert "efficientnet-lite0-1.2.0-rpi5.edgepkg · 5,243,010 bytes" in verdict


def test_refused_outcome_names_binding_limit_closest_candidate_and_need(tmp_path: Path) -> None:
    document = report_sample.refused()
    page = Page(document, tmp_path)

    verdict = page.one("section", "verdict")
    assert "Refused: no package was written" in text(verdict)
    terms = [text(term) for term in verdict.iter("dt")]
    facts = dict(zip(terms, [text(fact) for fact in verdict.iter("dd")], strict=True))
    assert facts["Binding limit"] == "size"
    assert facts["Closest candidate"] == "C5, int8 per channel mixed, 3 layers float"
    assert facts["What would be needed"] == document["outcome"]["needed"]
    rows = {text(row[0]): text(row) for row in page.one("table", None, verdict).findall("./tbody/tr")}
    assert "▲ 5.24 MB" in rows["Size"]
    assert "4.81 MB (C3)" in rows["Size"]
    assert rows["Size"].endswith("yes")
    assert "✔ Packaged" not in text(page.body)


def test_refused_limit_out_of_every_candidates_reach_says_so(tmp_path: Path) -> None:
    document = report_sample.refused()
    document["budget"][1]["max"] = 20
    rows = Page(document, tmp_path).one("section", "verdict").findall(".//tbody/tr")

    assert text(rows[1]).endswith("no")


def test_steps_without_a_change_are_folded_away(tmp_path: Path) -> None:
    document = report_sample.packaged()
    idle = {**document["steps"][0], "name": "fuse_nothing", "applied": False, "reason": "nothing to change"}
    document["steps"].append(idle)
    section = Page(document, tmp_path).section("steps")
    folded = section.find(".//details")
    assert folded is not None
    assert "1 step had nothing to change" in text(folded)
    assert "fuse_nothing" in text(folded)
    assert text(section).count("fuse_nothing") == 1


def test_dropped_steps_are_shown_with_their_reasons(tmp_path: Path) -> None:
    page = Page(report_sample.packaged(), tmp_path)

    rows = [text(row) for row in page.section("steps").findall(".//tbody/tr") if "off" in classes(row)]
    assert len(rows) == 2
    assert "fuse-hardswish ✖ dropped outputs differ by 4.2e-2" in rows[0]
    assert "prune-channels ✖ dropped not offered: no channel under the threshold n/a" in rows[1]


def test_broken_limits_are_marked_in_their_cells(tmp_path: Path) -> None:
    page = Page(report_sample.packaged(), tmp_path)

    marked = [text(cell) for cell in page.all("td", "broken", page.one("table", "candidates"))]
    assert marked[0] == "▲ 18.6 MB"
    assert "▲ 7.20 points 6.30 to 8.30" in marked
    assert len(marked) == sum(len(c["violations"]) for c in report_sample.packaged()["candidates"])


@pytest.mark.parametrize(
    ("maximum", "value", "words"),
    [
        (10e6, 9_999_000, "<0.1 % headroom"),
        (10e6, 10_004_000, "<0.1 % over"),
        (10e6, 10_500_000, "5.0 % over"),
        (10e6, 10e6, "0.0 % headroom"),
        (10e6, None, "no figure to hold against it"),
    ],
)
def test_headroom_is_told_in_words(maximum: float, value: float | None, words: str, tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["budget"][0].update(
        max=maximum, value=value, state="ok" if value is not None and value <= maximum else "over"
    )
    tile = Page(document, tmp_path).all("div", "tile")[0]

    assert words in text(tile)


def test_value_just_over_a_limit_is_not_rounded_to_the_limit(tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["budget"][0].update(value=10_004_000, state="over")
    page = Page(document, tmp_path)

    assert text(page.all("p", "value")[0]) == "10.004 MB"


@pytest.mark.parametrize(("value", "ok"), [(0.0, True), (-0.4, True), (0.2, False)])
def test_drop_limit_of_zero_is_handled(value: float, ok: bool, tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["budget"][3].update(max=0, value=value, state="ok" if ok else "over")
    tile = text(Page(document, tmp_path).all("div", "tile")[-1])

    assert ("kept" if ok else "over by 0.20 points") in tile


def test_budget_bar_reaches_its_limit_tick_only_when_the_limit_is_used_up(tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["budget"][0].update(value=10e6)
    document["budget"][1].update(value=44, state="over")
    page = Page(document, tmp_path)

    bars = page.all("svg", "budget")
    assert float(page.one("rect", "ok", bars[0]).get("width")) == pytest.approx(80)
    assert float(page.one("rect", "over", bars[1]).get("width")) == pytest.approx(88)
    assert float(page.one("rect", "ok", bars[2]).get("width")) < 80
    assert bars[1].find("title").text == "10 % over, limit 40.0 ms"


@pytest.mark.parametrize("count", [1, 30, 31, 500])
def test_layer_bars_stop_at_thirty_and_sum_up_the_rest(count: int, tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["layers"] = report_sample.layers(count)
    page = Page(document, tmp_path)

    _, sizes = page.all("table", "bars", page.section("layers"))
    assert len(page.all("svg", "pair", sizes)) == min(count, 30)
    sums = [text(row) for row in page.all("tr", "sum", sizes)]
    assert len(sums) == (2 if count > 30 else 1)
    assert sums[-1].startswith(f"All {count} layers")
    if count > 30:
        assert sums[0].startswith(f"{count - 30} other layers")
    everything = page.one("details").findall(".//tbody/tr")
    assert len(everything) == count


def test_sensitivity_bars_are_sorted_and_proportional(tmp_path: Path) -> None:
    document = report_sample.packaged()
    page = Page(document, tmp_path)

    table, _ = page.all("table", "bars", page.section("layers"))
    widths = [float(bar.get("width")) for bar in page.all("rect", "noise", table)]
    measured = [layer["noise_share"] for layer in document["layers"] if layer["noise_share"] is not None]
    expected = sorted(measured, reverse=True)[:30]
    # Attributes are written with two decimals.
    assert widths == pytest.approx([100 * value / expected[0] for value in expected], abs=0.005)


def test_noise_shares_are_shown_in_percent(tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["layers"] = document["layers"][:3]
    for layer, share in zip(document["layers"], (0.0625, 0.9375, None), strict=True):
        layer["noise_share"] = share
    section = Page(document, tmp_path).section("layers")

    assert (
        "it alone is quantized, measured on 16 calibration samples. Top 2 of 2 measured (3 layers)."
        in text(section)
    )
    rows = section.find(".//table[@class='bars']").findall(".//tbody/tr")
    assert [text(row).split()[-2:] for row in rows] == [["93.75", "%"], ["6.25", "%"]]
    everything = section.find(".//details").findall(".//tbody/tr")
    assert [text(row.findall("td")[-1]) for row in everything] == ["6.25 %", "93.75 %", "n/a"]


def test_unmeasured_sensitivity_is_said_and_not_drawn(tmp_path: Path) -> None:
    document = report_sample.packaged()
    for layer in document["layers"]:
        layer["noise_share"] = None
    page = Page(document, tmp_path)

    assert "Not measured in this run." in text(page.section("layers"))
    assert page.all("rect", "noise") == []


def test_no_layers_is_said(tmp_path: Path) -> None:
    assert "No layers were recorded." in text(Page(report_sample.bare(), tmp_path).section("layers"))


def test_long_layer_name_is_cut_but_kept_in_the_tooltip(tmp_path: Path) -> None:
    document = report_sample.packaged()
    name = "/".join(f"block_{index}" for index in range(60))
    document["layers"][0].update(name=name, noise_share=0.9)
    page = Page(document, tmp_path)

    cells = [cell for cell in page.all("th", "name") if cell.get("title") == name]
    assert len(cells) >= 2
    assert all(len(cell.text) <= 70 and cell.text.endswith("block_59") for cell in cells)


def test_missing_values_are_shown_as_missing(tmp_path: Path) -> None:
    page = Page(report_sample.bare(), tmp_path)

    assert "No candidate has a figure for: latency, host latency, peak memory, energy, score" in text(
        page.body
    )
    assert "None" not in text(page.body)
    assert "null" not in text(page.body)


def test_not_finite_values_become_missing_with_a_warning(tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["layers"][1]["noise_share"] = float("inf")
    document["candidates"][2]["figures"]["latency"]["value"] = float("nan")
    page = Page(document, tmp_path)

    warning = text(page.one("section", "warnings"))
    assert "candidates[2].figures.latency.value" in warning
    assert "layers[1].noise_share" in warning
    assert not re.search(r"\b(nan|inf)\b", page.html, re.IGNORECASE)
    stored = json.loads((tmp_path / "sample-1.0-rpi5.report.json").read_text(), parse_constant=pytest.fail)
    assert stored["layers"][1]["noise_share"] is None
    assert len(stored["warnings"]) == len(document["warnings"]) + 1


def test_the_document_given_is_left_as_it_was(tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["layers"][1]["noise_share"] = float("inf")
    before = copy.deepcopy(document)
    Page(document, tmp_path)

    assert document == before


def test_undecodable_and_control_characters_are_replaced(tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["source"]["file"] = "mo\udcffdel\x00\x1b[31m\u202egpj.onnx"
    page = Page(document, tmp_path)

    assert "mo\ufffddel\ufffd\ufffd[31m\ufffdgpj.onnx" in text(page.section("source"))


def test_provenance_names_files_keys_tools_and_command(tmp_path: Path) -> None:
    document = report_sample.packaged()
    shown = text(Page(document, tmp_path).section("provenance"))

    package = document["package"]
    for expected in (package["sha256"], package["key_id"], document["recipe"], document["evidence"]):
        assert expected in shown
    assert "onnxruntime 1.31.0" in shown
    assert document["command"] in shown
    assert "173.9 s" in shown


def _luminance(colour: str) -> float:
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _palettes(html: str) -> list[dict[str, str]]:
    blocks = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    palettes = [dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block)) for block in blocks]
    return [{**palettes[0], **palette} for palette in palettes]  # dark and print change the light one


def test_text_has_contrast_in_light_dark_and_print(tmp_path: Path) -> None:
    """4.5 to 1 for text. Source: WCAG 2.2, success criterion 1.4.3."""
    palettes = _palettes(Page(report_sample.bare(), tmp_path).html)

    assert len(palettes) == 3
    pairs = [(ink, "card") for ink in ("text", "soft", "blue", "green", "red", "amber")]
    pairs += [("text", "page"), ("soft", "page"), ("soft", "faint"), ("text", "faint")]
    pairs += [("green", "green-wash"), ("text", "green-wash"), ("red", "red-wash"), ("soft", "red-wash")]
    pairs += [("amber", "amber-wash"), ("text", "amber-wash"), ("text", "blue-wash")]
    for palette in palettes:
        for ink, paper in pairs:
            light, dark = sorted((_luminance(palette[ink]), _luminance(palette[paper])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, paper, palette)


def test_drawings_have_a_name_for_screen_readers_or_are_hidden_from_them(tmp_path: Path) -> None:
    page = Page(report_sample.packaged(), tmp_path)

    drawings = page.all("svg")
    assert len(drawings) > 60
    for drawing in drawings:
        assert drawing.get("aria-hidden") == "true" or drawing.find("title") is not None


def test_ids_are_unique(tmp_path: Path) -> None:
    ids = [
        element.get("id")
        for element in Page(report_sample.packaged(), tmp_path).body.iter()
        if element.get("id")
    ]

    assert len(ids) == len(set(ids))


def test_forms_that_were_set_aside_are_a_note_and_no_warning(tmp_path: Path) -> None:
    document = report_sample.packaged()
    page = Page(document, tmp_path)

    note = f"Tried and set aside: {document['set_aside'][0]}."
    assert note in text(page.section("candidates"))
    assert "set aside" not in text(page.section("warnings"))
