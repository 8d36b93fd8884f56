import itertools
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.toolkit import report_sample
from tests.toolkit.report_page import Page, classes, text


def _plots(page: Page) -> list[Any]:
    return page.all("svg", "plot")


def _centres(page: Page, plot: Any) -> dict[str, tuple[float, float]]:
    """Return where each candidate's point stands, by the id in its tooltip."""
    found = {}
    for mark in page.all("a", "mark", plot):
        (shape,) = page.all("*", "point", mark)
        if shape.tag == "circle":
            centre = float(shape.get("cx")), float(shape.get("cy"))
        else:
            centre = float(shape.get("x")) + 5, float(shape.get("y")) + 5
        found[mark.find("title").text.partition(":")[0]] = centre
    return found


def _chosen_only(sizes: list[float], scores: list[float], limit: float, drop: float) -> dict[str, Any]:
    document = report_sample.packaged()
    template = document["candidates"][4]
    document["candidates"] = [
        {
            **template,
            "id": f"C{index}",
            "figures": {
                **template["figures"],
                "size": {"value": size, "label": "measured", "on": "host"},
                "score": {"value": score, "label": "measured", "on": "host"},
            },
        }
        for index, (size, score) in enumerate(zip(sizes, scores, strict=True))
    ]
    document["outcome"].update(chosen="C0")
    document["budget"][0]["max"] = limit
    document["budget"][3]["max"] = drop
    return document


def test_both_plots_show_all_candidates_the_chosen_one_ringed(tmp_path: Path) -> None:
    page = Page(report_sample.packaged(), tmp_path)

    assert len(_plots(page)) == 2
    for plot in _plots(page):
        assert set(_centres(page, plot)) == {f"C{index}" for index in range(9)}
        ringed = [mark for mark in page.all("a", "mark", plot) if page.all("circle", "ring", mark)]
        assert [mark.find("title").text.partition(":")[0] for mark in ringed] == ["C5"]


def test_candidates_that_break_a_limit_have_another_shape_not_only_another_colour(tmp_path: Path) -> None:
    page = Page(report_sample.packaged(), tmp_path)

    for mark in page.all("a", "mark", _plots(page)[0]):
        (shape,) = page.all("*", "point", mark)
        assert shape.tag == ("circle" if "meets" in classes(mark) else "rect")


def test_tooltip_holds_figures_with_their_origin(tmp_path: Path) -> None:
    page = Page(report_sample.packaged(), tmp_path)

    titles = [mark.find("title").text for mark in page.all("a", "mark", _plots(page)[1])]
    chosen = next(title for title in titles if title.startswith("C5"))
    assert "Latency: 24.9 ms (estimated, rpi5)" in chosen
    assert "Score: 88.00 % (measured, host)" in chosen


def test_points_lead_to_their_table_rows(tmp_path: Path) -> None:
    page = Page(report_sample.packaged(), tmp_path)

    rows = {row.get("id"): text(row[0]) for row in page.one("table", "candidates").findall("./tbody/tr")}
    for mark in page.all("a", "mark"):
        assert rows[mark.get("href")[1:]] == mark.find("title").text.partition(":")[0]


def test_collapsed_candidate_does_not_flatten_the_others(tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["candidates"][3]["figures"]["score"]["value"] = 0.013
    page = Page(document, tmp_path)

    plot = _plots(page)[0]
    heights = {name: y for name, (_, y) in _centres(page, plot).items()}
    assert heights["C4"] - heights["C5"] > 20
    assert heights["C3"] == max(heights.values())
    assert "C3 ↓ 1.3 %" in text(plot)


def test_candidate_without_a_figure_is_left_out_and_named(tmp_path: Path) -> None:
    document = report_sample.packaged()
    document["candidates"][2]["figures"]["latency"]["value"] = None
    page = Page(document, tmp_path)

    size, latency = _plots(page)
    assert "C2" in _centres(page, size)
    assert "C2" not in _centres(page, latency)
    assert "Not in this plot, for want of a figure: C2." in text(page.section("candidates"))


def test_without_target_latency_the_host_latency_is_plotted_and_called_so(tmp_path: Path) -> None:
    document = report_sample.packaged()
    for candidate in document["candidates"]:
        candidate["figures"]["latency"]["value"] = None
    page = Page(document, tmp_path)

    caption = text(page.all("figcaption", under=page.section("candidates"))[1])
    assert "Host latency and score" in caption
    assert "host latency measured · host" in caption
    # The limit is for the target: it must not be drawn on the host's axis.
    assert "max" not in text(_plots(page)[1])


def test_without_any_score_no_plot_is_drawn(tmp_path: Path) -> None:
    assert _plots(Page(report_sample.bare(), tmp_path)) == []


def test_single_candidate_is_plotted(tmp_path: Path) -> None:
    page = Page(_chosen_only([5e6], [0.88], 10e6, 1.0), tmp_path)

    assert list(_centres(page, _plots(page)[0])) == ["C0"]
    assert page.all("path", "front") == []


def test_far_limit_is_named_with_an_arrow_and_hatches_nothing(tmp_path: Path) -> None:
    page = Page(_chosen_only([5e6, 5.2e6], [0.88, 0.885], 4e9, 1.0), tmp_path)

    plot = _plots(page)[0]
    assert "max 4.00 GB →" in text(plot)
    assert len(page.all("rect", "infeasible", plot)) == 1


def test_scores_have_their_intervals(tmp_path: Path) -> None:
    document = _chosen_only([5e6, 5.2e6], [0.88, 0.885], 10e6, 1.0)
    for one, interval in zip(document["candidates"], ([-0.5, 2.1], [-1.2, 1.8]), strict=True):
        one["drop"] = {"interval": interval, "confidence": 0.95, "samples": 500, "held_back": True}
    page = Page(document, tmp_path)
    bars = page.all("line", "reach", _plots(page)[0])
    assert len(bars) == 2
    lengths = [float(bar.attrib["y1"]) - float(bar.attrib["y2"]) for bar in bars]
    assert lengths[1] / lengths[0] == pytest.approx(3.0 / 2.6, rel=0.02)
    for one in document["candidates"]:
        one["drop"] = None
    assert page.all("line", "reach", _plots(Page(document, tmp_path))[0]) == []


def test_minimum_below_the_axis_is_named_with_an_arrow(tmp_path: Path) -> None:
    page = Page(_chosen_only([5e6, 5.2e6], [0.88, 0.885], 10e6, 80.0), tmp_path)
    assert "min 8.80 % ↓" in text(_plots(page)[0])
    near = Page(_chosen_only([5e6, 5.2e6], [0.88, 0.885], 10e6, 1.0), tmp_path)
    assert "min 87.80 % ↓" not in text(_plots(near)[0])


def test_wide_spread_of_sizes_uses_a_log_axis_and_says_so(tmp_path: Path) -> None:
    page = Page(_chosen_only([1e5, 1e6, 1e7], [0.86, 0.88, 0.885], 5e6, 1.0), tmp_path)

    plot = _plots(page)[0]
    assert "Size (MB, log scale)" in text(plot)
    xs = [x for x, _ in _centres(page, plot).values()]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.1)


def test_front_is_a_rising_staircase_through_the_unbeaten_points(tmp_path: Path) -> None:
    page = Page(_chosen_only([4e6, 5e6, 6e6, 7e6], [0.880, 0.885, 0.882, 0.887], 10e6, 1.0), tmp_path)

    plot = _plots(page)[0]
    centres = _centres(page, plot)
    path = page.one("path", "front", plot).get("d")
    steps = [(float(x), float(y)) for x, y in re.findall(r"[MH]([\d.]+)[ V]([\d.]+)", path)]
    expected = [centres[name] for name in ("C0", "C1", "C3")]
    assert steps == [pytest.approx(point, abs=0.06) for point in expected]


@settings(max_examples=40)
@given(
    points=st.lists(st.tuples(st.floats(1e3, 5e8), st.floats(0.0, 1.0)), min_size=1, max_size=12),
    limit=st.floats(1e3, 5e8),
    drop=st.floats(0.0, 30.0),
)
def test_points_keep_their_side_of_the_limits(
    points: list[tuple[float, float]], limit: float, drop: float
) -> None:
    sizes, scores = [size for size, _ in points], [score for _, score in points]
    with tempfile.TemporaryDirectory() as folder:
        page = Page(_chosen_only(sizes, scores, limit, drop), Path(folder))
    plot = _plots(page)[0]
    centres = list(_centres(page, plot).values())
    by_name = _centres(page, plot)

    assert len(centres) == len(points)
    for x, y in centres:
        assert 58 <= x <= 546
        assert 28 <= y <= 330
    for line in page.all("line", "limit", plot):
        x1, x2, y1 = (float(line.get(name)) for name in ("x1", "x2", "y1"))
        for index, (size, score) in enumerate(points):
            px, py = by_name[f"C{index}"]
            # Coordinates are written with two decimals.
            if x1 == x2:
                assert (px <= x1 + 0.02) if size <= limit else (px >= x1 - 0.02)
            else:
                meets = 100 * score >= 100 * report_sample.BASELINE - drop
                assert (py <= y1 + 0.02) if meets else (py >= y1 - 0.02)


def _boxes(page: Page, plot: Any) -> list[tuple[float, float, float, float]]:
    labels = page.all("text", "point-label", plot)
    return [
        (
            float(t.get("x")),
            float(t.get("y")) - 10,
            float(t.get("x")) + 6.6 * len(t.text),
            float(t.get("y")) + 2,
        )
        for t in labels
    ]


def test_labels_of_crowded_points_do_not_cover_each_other(tmp_path: Path) -> None:
    count = 14
    sizes = [5e6 + 2_000 * index for index in range(count)] + [18e6]
    scores = [0.88 + 0.0001 * (index % 5) for index in range(count)] + [0.888]
    page = Page(_chosen_only(sizes, scores, 10e6, 1.0), tmp_path)

    boxes = _boxes(page, _plots(page)[0])
    assert len(boxes) == count + 1
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
