"""Streams of models that keep states: each window goes on where the one before it ended."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import PackageMaker
from tests.runtime.test_sound import make_wav
from tests.service.service_parts import Running, ask, make_config, post_bytes, running
from tests.service.stream_parts import read_lines, write_loudness
from tests.service.wiring_parts import load

from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.model import Isolation, ModelOptions

Serve = Callable[..., "contextlib.AbstractContextManager[Running]"]


@pytest.fixture
def serve(maker: PackageMaker, tmp_path: Path) -> Serve:
    packages = tmp_path / "packages"
    packages.mkdir()
    write_loudness(maker, packages / "1.edgepkg")

    def start(**options: Any) -> "contextlib.AbstractContextManager[Running]":
        config = make_config(tmp_path, models={"loudness": ModelOptions(**options)})
        return running(config, PackageFiles([packages], maker.trust))

    return start


@pytest.fixture
def order(tmp_path: Path) -> dict[str, Any]:
    """A stream of a recording of 0.35 s: the n-th window has the loudness n, the last ends in silence."""
    levels = np.repeat(np.arange(1, 5, dtype=np.float32), 100)[:350]
    (tmp_path / "s.wav").write_bytes(make_wav(levels, 1000))
    return {"model": "loudness", "source": str(tmp_path / "s.wav"), "window_s": 0.1}


def sums(lines: Iterator[dict[str, Any]]) -> Iterator[float]:
    """Return the answers; an error of the model fails the test."""
    for line in lines:
        assert "error" not in line, line
        if "frame" in line:
            (value,) = line["values"]
            yield round(value["value"], 3)


@pytest.mark.parametrize("options", [{}, {"isolated": True, "isolation": Isolation(processes=1)}])
def test_states_go_on_from_window_to_window(
    serve: Serve, order: dict[str, Any], options: dict[str, Any]
) -> None:
    with serve(**options) as service:
        for _ in range(2):  # the second stream begins with zeros, as the first one
            assert list(sums(read_lines(service, order))) == [1, 3, 6, 8]


def test_streams_have_states_of_their_own(serve: Serve, order: dict[str, Any]) -> None:
    with serve() as service:
        lines = [sums(read_lines(service, {**order, "name": name})) for name in "ab"]
        assert [next(values) for _ in range(4) for values in lines] == [1, 1, 3, 3, 6, 6, 8, 8]


def test_a_file_that_begins_again_begins_with_zeros(serve: Serve, order: dict[str, Any]) -> None:
    with serve() as service, contextlib.closing(read_lines(service, {**order, "repeat": True})) as lines:
        values = sums(lines)
        assert [next(values) for _ in range(9)] == [1, 3, 6, 8, 1, 3, 6, 8, 1]


@pytest.mark.parametrize("is_isolated", [False, pytest.param(True, marks=pytest.mark.long)])
def test_another_version_begins_with_zeros(
    maker: PackageMaker, serve: Serve, order: dict[str, Any], tmp_path: Path, *, is_isolated: bool
) -> None:
    (tmp_path / "s.wav").write_bytes(make_wav(np.ones(3_000_000, np.float32), 1000))
    order |= {"sinks": [f"file:{tmp_path}/sums"], "max_queued": 1 << 20}
    with serve(isolated=is_isolated) as service, contextlib.closing(read_lines(service, order)) as lines:
        next(sums(lines))
        write_loudness(maker, tmp_path / "packages" / "2.edgepkg", version="2.0.0", first=0.5)
        assert load(service, "loudness").status == 200
        while next(sums(lines)) % 1 == 0:
            pass
    values = list(sums(map(json.loads, (tmp_path / "sums").read_text().splitlines())))
    count = sum(value % 1 == 0 for value in values)
    assert values == [*range(1, count + 1), *(number + 1.5 for number in range(len(values) - count))]


def test_windows_that_overlap_are_refused(serve: Serve, order: dict[str, Any]) -> None:
    with serve() as service:
        reply = ask(service, post_bytes("/v2/streams", json.dumps({**order, "hop_s": 0.05}).encode()))
        assert (reply.status, "must not overlap" in reply.json["error"]) == (400, True), reply.json
        assert list(sums(read_lines(service, {**order, "hop_s": 0.1}))) == [1, 3, 6, 8]
