"""The progress of a long command: what a log of CI gets of it."""

import io

import pytest
from rich.console import Console

from edgekit_cli import progress
from edgekit_cli.progress import ProgressBar


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, as its only item."""
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_lines_come_at_intervals(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar(Console(file=io.StringIO())) as bar:
        for second in range(35):
            clock[0] = 100.0 + second
            bar.show("calibrating", second, 40)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "   10 s  calibrating 10 of 40",
        "   20 s  calibrating 20 of 40",
        "   30 s  calibrating 30 of 40",
    ]


def test_short_command_prints_no_line(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(Console(file=io.StringIO())) as bar:
        bar.show("import")
        clock[0] += 9
        bar.show("judge")
    assert capsys.readouterr().err == ""


def test_terminal_gets_the_bar_and_no_lines(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    with ProgressBar(Console(file=screen, force_terminal=True)) as bar:
        clock[0] += 30
        bar.show("judge", 1, 2)
    assert capsys.readouterr().err == ""
    assert "judge" in screen.getvalue()
