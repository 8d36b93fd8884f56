"""The live page in a browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.browser import list_messages, set_view
from tests.runtime.conftest import PackageMaker
from tests.service.answer_parts import draw, write_cell_detector
from tests.service.service_parts import Running, make_config, running
from tests.service.stream_parts import draw_cells, write_video
from tests.service.wiring_parts import load

from edgekit_runtime.protocol.streams import StreamOptions
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.options.rollout import Gates

pytestmark = pytest.mark.usefixtures("imported_opencv")

NAME = "<img src=x onerror=alert(1)>"


MAX_FPS = 10.0
"""Of streams: as many frames as can be read and drawn would take all processors."""


@pytest.fixture(scope="module")
def service(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("live")
    write_cell_detector(maker, folder / "cells.edgepkg", labels=b"<b>red</b>\ngreen\n")
    with running(make_config(folder), PackageFiles([folder / "cells.edgepkg"], maker.trust)) as service:
        yield service


@pytest.fixture
def streams(service: Running, tmp_path: Path) -> Iterator[None]:
    """Two streams that are drawn without hurry, and end with the test."""
    video = write_video(tmp_path / "v.avi", draw_cells(40))
    options = StreamOptions(model="cells", source=str(video), repeat=True, min_score=0.5, max_fps=MAX_FPS)
    names = ("door", NAME)
    streams = service.call(service.service.find_streams).streams
    service.call(lambda: streams.add_all(dict.fromkeys(names, options)))
    yield
    service.call(lambda: [streams.remove(name) for name in names])


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_page_draws_boxes_over_frames(
    service: Running, streams: None, page: Page, width: int, theme: str
) -> None:
    set_view(page, width, theme="dark" if theme == "dark" else "light")
    page.goto(f"http://127.0.0.1:{service.port}/live#door")
    expect(page.locator("#title")).to_have_text("door")
    expect(page.locator("#labels")).to_contain_text("<b>red</b>")
    expect(page.locator("#times")).to_contain_text("infer")
    expect(page.locator("#fps")).to_contain_text(".")
    canvas = page.locator("canvas")
    expect(canvas).to_be_visible()
    # The label's background is green of the palette, or another of its colours; the video has none but red.
    colours = page.evaluate(
        """() => { const canvas = document.querySelector("canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let at = 0; at < data.length; at += 4) count += data[at + 1] + data[at + 2] > 150;
        return count; }"""
    )
    assert colours > 20
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert list_messages(page) == []


@pytest.fixture
def service_with_a_trial(
    request: pytest.FixtureRequest, maker: PackageMaker, tmp_path: Path
) -> Iterator[Running]:
    """A service with a shadow; the parameter says whether the model is isolated."""
    packages = tmp_path / "packages"
    packages.mkdir()
    write_cell_detector(maker, packages / "1.edgepkg")
    options = ModelOptions(isolated=request.param, rollout="shadow", gates=Gates(min_samples=10**9))
    with running(
        make_config(tmp_path, models={"cells": options}), PackageFiles([packages], maker.trust)
    ) as service:
        write_cell_detector(maker, packages / "2.edgepkg", version="2.0.0", shift=8)
        assert load(service, "cells").status == 200
        video = write_video(tmp_path / "v.avi", [draw(128, 128, red=(1, 1), green=(3, 2))] * 30)
        options = StreamOptions(model="cells", source=str(video), repeat=True, min_score=0.5, max_fps=MAX_FPS)
        service.call(lambda: service.service.find_streams().streams.add_all({"door": options}))
        yield service


@pytest.mark.parametrize(
    ("service_with_a_trial", "width", "theme"),
    [(False, 1280, "light"), (True, 390, "dark")],
    indirect=["service_with_a_trial"],
)
def test_switch_draws_the_answers_of_the_version_on_trial_too(
    service_with_a_trial: Running, page: Page, width: int, theme: str
) -> None:
    set_view(page, width, theme="dark" if theme == "dark" else "light")
    page.goto(f"http://127.0.0.1:{service_with_a_trial.port}/live")
    expect(page.locator("#labels tr")).to_have_count(2)
    expect(page.locator("#labels td")).to_have_count(2)
    expect(page.locator("#legend")).to_be_hidden()
    page.get_by_label("with 2.0.0, on trial").check()
    expect(page.locator("#legend")).to_contain_text("1.0.0 in use")
    expect(page.locator("#legend")).to_contain_text("2.0.0 on trial")
    expect(page.locator("#labels td")).to_have_text(["1.0.0", "2.0.0", "1", "1", "1", "1"])
    # White dashes at the left of the red box of 2.0.0, which is 16 pixels beside that of 1.0.0.
    whites = page.evaluate(
        """() => { const canvas = document.querySelector("canvas"), x = Math.round(canvas.width * 48 / 128);
        const { data } = canvas.getContext("2d").getImageData(x, 0, 1, canvas.height);
        let count = 0;
        for (let at = 0; at < data.length; at += 4) count += data[at] + data[at + 1] + data[at + 2] > 700;
        return count; }"""
    )
    assert whites > 10
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    page.get_by_label("with 2.0.0, on trial").uncheck()
    expect(page.locator("#legend")).to_be_hidden()
    assert list_messages(page) == []


def test_other_stream_can_be_chosen_and_its_name_is_text(service: Running, streams: None, page: Page) -> None:
    page.goto(f"http://127.0.0.1:{service.port}/live")
    choice = page.locator("#choice")
    expect(choice).to_be_enabled()
    choice.select_option(NAME)
    expect(page.locator("#title")).to_have_text(NAME)
    expect(page.locator("canvas")).to_be_visible()
    assert list_messages(page) == []


def test_page_without_a_stream_says_how_to_start_one(service: Running, page: Page) -> None:
    page.goto(f"http://127.0.0.1:{service.port}/live")
    expect(page.locator("#message")).to_contain_text("edgekit-device stream")
    expect(page.locator("#meta")).to_have_text("No stream runs.")
    assert list_messages(page) == []
