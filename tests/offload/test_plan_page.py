"""The page and the terminal chart of a plan: what they show, and that foreign text stays text."""

import itertools
import re
import unicodedata
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from tests.offload import planning_sample
from tests.offload.planning_sample import HOSTILE
from tests.toolkit.cases import cases

from edgekit_offload.planning.result import Candidate, PlanningResult, WinRange
from edgekit_offload.report.decision import decide
from edgekit_offload.report.plan_page import render_plan_page
from edgekit_offload.report.terminal_chart import render_terminal

SAMPLES = ["sample", "hostile", "without_candidates", "only_local"]


def body_of(html: str) -> ElementTree.Element:
    """Parse the body, which fails where an element is left open or a character is not escaped."""
    text = html[html.index("<body>") : html.index("</body>") + len("</body>")]
    return ElementTree.fromstring(text)  # noqa: S314 - our own output, no entities


def text_of(element: ElementTree.Element) -> str:
    return re.sub(r"\s+", " ", " ".join(element.itertext()))


def section_of(body: ElementTree.Element, key: str) -> ElementTree.Element:
    (found,) = [s for s in body.iter("section") if any(h.get("id") == key for h in s.iter("h2"))]
    return found


def make(name: str) -> PlanningResult:
    result: PlanningResult = getattr(planning_sample, name)()
    return result


@pytest.mark.parametrize("name", SAMPLES)
def test_page_is_well_formed_and_asks_for_nothing(name: str) -> None:
    html = render_plan_page(make(name))
    tags = {element.tag for element in body_of(html).iter()}

    assert not tags & {"script", "img", "link", "iframe", "object", "form", "a"}
    assert not re.search(r"https?://|@import|url\((?!#)", html)
    assert 'content="default-src &#x27;none&#x27;; style-src' in html
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(set(ids)) == len(ids)


def test_hostile_names_stay_text() -> None:
    html = render_plan_page(planning_sample.hostile())

    assert "<script" not in html
    assert "\u202e" not in html
    assert "\x1b" not in html
    assert "</script><script>alert('1')</script>" in text_of(body_of(html))
    assert HOSTILE[-12:] in html


def test_every_colour_of_a_curve_stands_in_the_style_sheet() -> None:
    html = render_plan_page(planning_sample.hostile())
    style, _, body = html.partition("</style>")
    classes = set(re.findall(r'class="(?:line|tag|reach|swatch) (\w+)"', body))
    assert {name for name in classes if f".{name} " not in style} == set()
    assert "curve1" in classes


def test_every_way_has_a_line_a_row_and_local_and_jpeg_are_among_them() -> None:
    result = planning_sample.sample()
    body = body_of(render_plan_page(result))

    charts = [svg for svg in body.iter("svg") if svg.get("class") == "plot"]
    assert len(charts) == len(result.rtts_ms)
    for chart in charts:
        assert len(list(chart.iter("polyline"))) == len(result.candidates)
    rows = [text_of(row) for row in section_of(body, "candidates").iter("tr")]
    for candidate in result.candidates:
        assert any(candidate.name in row for row in rows)
    assert any("local" in row for row in rows)
    assert any("jpeg:90" in row and "0.15 % changed" in row and "the input itself" in row for row in rows)


def test_cut_shows_what_is_sent_leakage_as_lower_bound_accuracy_and_proof() -> None:
    cuts = section_of(body_of(render_plan_page(planning_sample.sample())), "cuts")
    card = text_of(next(iter(cuts.iter("article"))))

    for words in ("relu_3 as int8", "602 kB", "2 kB", "≥ 20 dB from 800 known inputs", "none changed"):
        assert words in card
    assert "all 4,120 placements tried: no placement costs less in the model of costs" in card
    assert "with int8 tensors, at 12 Mbit/s and 5 ms" in card
    assert "11 device, 16 server" in card


def test_decision_names_the_winners_in_order_of_bandwidth() -> None:
    result = planning_sample.sample()
    words = text_of(section_of(body_of(render_plan_page(result)), "verdict"))

    order = [result.best(mbit_s, 5.0).name for mbit_s in result.bandwidths_mbit_s]
    names = [name for name in dict.fromkeys(order) if name != "local"]
    assert len(names) >= 2
    assert [words.index(f"({name})") for name in names] == sorted(words.index(f"({name})") for name in names)
    assert "Splitting pays up to" in words


def test_decision_goes_by_what_is_minimised_and_says_where_no_way_keeps_the_limits() -> None:
    plain = make("sample")
    others = plain.bandwidths_mbit_s[1:]
    never = 1e15

    def limited(candidate: Candidate) -> Candidate:
        """Only the first cut keeps the limits, and not at the lowest bandwidth."""
        keeps = candidate.name == "cut3-int8"
        row = (never, *(2.0 if keeps else never for _ in others))
        wins = tuple(WinRange(rtt_ms, others[0], others[-1]) for rtt_ms in plain.rtts_ms) if keeps else ()
        return replace(candidate, score=(row,) * len(plain.rtts_ms), wins=wins)

    candidates = tuple(limited(candidate) for candidate in plain.candidates)
    words = decide(replace(plain, candidates=candidates, objective="energy", unit="mJ"))
    assert re.search(
        r"below [\d.]+ Mbit/s no candidate keeps the limits, above [\d.]+ Mbit/s split", words[0]
    )
    assert words[1].startswith("Splitting keeps the limits where no whole-model candidate does")
    candidates = tuple(replace(candidate, wins=()) for candidate in candidates)
    assert (
        "no candidate keeps the limits at any bandwidth" in decide(replace(plain, candidates=candidates))[0]
    )


def test_ribbon_covers_the_whole_axis_without_gaps() -> None:
    body = body_of(render_plan_page(planning_sample.sample()))
    for chart in [svg for svg in body.iter("svg") if svg.get("class") == "plot"]:
        parts = [g[1] for g in chart.iter("g") if (g.get("class") or "").startswith("reach")]
        ends = [(float(r.get("x", "")), float(r.get("x", "")) + float(r.get("width", ""))) for r in parts]
        assert ends[0][0] == pytest.approx(64, abs=0.1)
        assert ends[-1][1] == pytest.approx(628, abs=0.1)
        for (_, right), (left, _) in itertools.pairwise(ends):
            assert right == pytest.approx(left, abs=0.02)  # two decimals are written


def test_refusals_and_labels_are_shown_with_their_reasons() -> None:
    body = body_of(render_plan_page(planning_sample.sample()))

    assert "opus the input is no audio" in text_of(section_of(body, "refusals"))
    origin = text_of(section_of(body, "origin"))
    for label in ("measured", "emulated", "modelled"):
        assert label in origin


def test_nothing_measured_is_said_plainly() -> None:
    html = render_plan_page(planning_sample.without_candidates())

    assert "Nothing was measured" in html
    assert "the model cannot be cut" in html
    assert render_terminal(planning_sample.without_candidates(), rtt_ms=20) == "no candidate was measured"


@cases("name", ["sample", "hostile", "only_local"])
@cases("width", [1, 40, 100])
def test_terminal_chart_keeps_its_width_and_shows_no_acting_characters(name: str, width: int) -> None:
    shown = render_terminal(make(name), rtt_ms=20, width=width, ascii_only=True)

    assert shown.isascii()
    chart = shown.split("\n\n")[0].splitlines()
    assert all(len(line) <= max(width, 60) for line in chart)
    assert not [char for char in shown if char != "\n" and unicodedata.category(char) == "Cc"]


def test_terminal_chart_has_a_sign_and_a_line_for_each_way_and_the_ribbon() -> None:
    result = planning_sample.sample()
    shown = render_terminal(result, rtt_ms=20)

    for number, candidate in enumerate(result.candidates):
        assert f"  {number + 1}  {candidate.name}" in shown
    (ribbon,) = [line for line in shown.splitlines() if "best" in line]
    assert "█" in ribbon
    for mbit_s in (1.0, 100.0):
        assert (
            str([candidate.name for candidate in result.candidates].index(result.best(mbit_s, 20.0).name) + 1)
            in ribbon
        )


def test_way_that_loses_too_much_accuracy_is_shown_with_its_loss_and_marked() -> None:
    plain = make("sample")
    candidates = tuple(
        replace(candidate, is_over_loss=True, expected_loss=0.0123, loss_error=0.002, in_table=False, wins=())
        if candidate.name == "cut5-int4"
        else candidate
        for candidate in plain.candidates
    )
    result = replace(plain, candidates=candidates, max_loss=0.001)
    text = text_of(body_of(render_plan_page(result)))
    assert "not offered: above --max-loss 0.1 %" in text
    assert "1.2 ± 0.2 % wrong" in text
    assert "cut5-int4 (above --max-loss)" in render_terminal(result, rtt_ms=20.0)
    few = tuple(replace(candidate, samples_needed=100 * candidate.is_over_loss) for candidate in candidates)
    text = text_of(body_of(render_plan_page(replace(result, candidates=few))))
    assert "not offered: it is not known to keep --max-loss 0.1 %" in text
    shown = render_terminal(replace(result, candidates=few), rtt_ms=20.0)
    assert "cut5-int4 (not known to keep --max-loss)" in shown
