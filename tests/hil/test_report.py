"""The page of a run: what was seen, escaped, and loading nothing."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest
from tests.hil.evidence_parts import EVIDENCE

from edgekit_hil.report.page import make_page
from edgekit_hil.report.plots import draw_curve, draw_predictions
from edgekit_host.evidence import Curve, Evidence, Figure


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(evidence: Evidence) -> Reader:
    reader = Reader()
    reader.feed(make_page(evidence))
    return reader


def test_page_shows_kind_source_figures_and_tests() -> None:
    reader = read(EVIDENCE)
    text = " ".join(reader.texts)

    for shown in (
        "real",
        "commit aaaaaaaaa",
        "Pi 5",
        "onnxruntime 1.24.4",
        "clock: governor ondemand",
        "1.5 ms",
        "median of 50",
        "it works",
    ):
        assert shown in text
    assert set(reader.links) == {"data:,"}  # an empty icon, so that browsers ask for none


def test_page_plots_predictions_of_each_unit_and_every_curve() -> None:
    figures = [
        Figure(name="latency of a", value=2.0, unit="ms", method="", test="t", predicted=1.8),
        Figure(name="latency of b", value=5.0, unit="ms", method="", test="t", predicted=5.5),
        Figure(name="peak memory of a", value=60.0, unit="MB", method="", test="t", predicted=63.0),
        Figure(name="energy of a", value=3.0, unit="mJ", method="", test="t"),
    ]
    latency = Curve(
        name="latency of a",
        x_label="ms",
        y_label="share of inferences below",
        x=(1.9, 2.0),
        y=(0.1, 0.9),
        test="t",
    )
    power = Curve(
        name="power over an update and a rollback",
        x_label="s",
        y_label="W",
        x=(0.0, 1.0, 2.0),
        y=(5.0, 9.0, 5.1),
        test="t",
    )

    page = make_page(dataclasses.replace(EVIDENCE, figures=tuple(figures), curves=(latency, power)))

    captions = [part.partition("<")[0] for part in page.split("<figcaption>")[1:]]
    assert captions == [
        "predicted against measured, ms",
        "predicted against measured, MB",
        "latency of a",
        "power over an update and a rollback",
    ]
    assert (page.count("<circle"), page.count("<polyline")) == (3, 2)


def test_foreign_text_is_no_markup() -> None:
    facts = dataclasses.replace(EVIDENCE.device, model="<script>alert(1)</script>")
    figure = Figure(name="<b>", value=1.0, unit="<i>", method="</table><img>", test="t", predicted=2.0)
    curve = Curve(name="<svg>", x_label="<x>", y_label="<y>", x=(0.0, 1.0), y=(1.0, 2.0), test="t")

    reader = read(dataclasses.replace(EVIDENCE, device=facts, figures=(figure,), curves=(curve,)))

    assert not {"script", "img", "i", "x", "y"} & set(reader.tags)


@pytest.mark.parametrize(
    ("x", "y"),
    [((0.0,), (0.0,)), ((1.0, 1.0), (5.0, 5.0)), ((0.0, 1e-9), (1e9, 0.0)), ((0.0, 1.0), (-1.0, 2.0))],
)
def test_curve_of_any_values_is_drawn_within_its_frame(x: tuple[float, ...], y: tuple[float, ...]) -> None:
    drawn = draw_curve(Curve(name="c", x_label="s", y_label="W", x=x, y=y, test="t"))

    points = [pair.split(",") for pair in drawn.split('points="')[1].split('"')[0].split()]
    assert len(points) == len(x)
    assert all(58 <= float(at_x) <= 470 and 12 <= float(at_y) <= 214 for at_x, at_y in points)


def test_prediction_that_holds_lies_on_the_line() -> None:
    drawn = draw_predictions([Figure(name="a", value=2.0, unit="ms", method="", test="t", predicted=2.0)])

    x, y = (float(drawn.split(f'c{axis}="')[1].split('"')[0]) for axis in "xy")
    assert (x - 58) / (470 - 58) == pytest.approx((214 - y) / (214 - 30), abs=0.01)


def test_title_of_the_y_axis_stands_above_every_line() -> None:
    plot = draw_curve(
        Curve(
            name="latency",
            x_label="ms",
            y_label="share of inferences below",
            x=(0.0, 1.0),
            y=(0.0, 1.0),
            test="t",
        )
    )
    title_y = float(re.search(r'y="([0-9.]+)" class="axis"[^>]*>share', plot)[1])  # type: ignore[index]
    line = re.search(r'points="([^"]+)"', plot)[1]  # type: ignore[index]
    assert title_y < min(float(point.partition(",")[2]) for point in line.split()) - 8


def test_names_break_behind_their_marks_and_words_do_not_break() -> None:
    page = make_page(EVIDENCE)
    assert "test_<wbr>a" in page
    assert not re.search(r"\btd\b[^{}]*\{[^}]*anywhere", page)
