import json
from pathlib import Path

import pytest
from tests.toolkit.command_run import invoker

from edgekit_cli.targets import command
from edgekit_runtime.errors import TargetError
from edgekit_toolkit.targets.loader import load_target


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


invoke = invoker(command)


def test_without_name_lists_every_target() -> None:
    output = invoke().output
    for name in ("jetson-orin-nano", "= jetson", "jetson-agx-orin", "rpi5", "rpi4", "rpi-zero-2w", "x86-64"):
        assert name in output


def test_name_shows_each_figure_with_status_and_source() -> None:
    result = invoke("rpi5")
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    row = next(row for row in rows if "power.idle" in row)
    assert [cell for cell in row if cell != "│"] == ["power.idle", "2.4", "W", "published", "sbc-reviews"]
    for source in load_target("rpi5").sources:
        assert source.key in result.output


def test_json_lists_every_target_with_units() -> None:
    documents = json.loads(invoke("--json").output)
    assert {document["name"] for document in documents} >= {"jetson-orin-nano", "rpi5", "x86-64"}
    assert documents[0]["memory"]["total"].keys() == {"value", "unit", "status", "source"}


def test_json_of_one_target_is_an_object() -> None:
    document = json.loads(invoke("jetson", "--json").output)
    assert document["name"] == "jetson-orin-nano"
    assert document["costs"]["int8"]["unit"] == "MAC/s"


def test_users_file_is_listed_and_its_markup_is_shown_as_it_is(empty_home: Path) -> None:
    folder = empty_home / "targets"
    folder.mkdir()
    ours = Path(load_target.__code__.co_filename).with_name("rpi5.toml").read_text()
    text = ours.replace('name = "rpi5"', 'name = "mine"').replace("Raspberry Pi 5 (4 GB)", "[red]Mine[/red]")
    (folder / "mine.toml").write_text(text)
    assert "[red]Mine[/red]" in invoke().output


def test_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(TargetError, match="did you mean jetson"):
        invoke("jetsn")


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("arguments", [(), ("rpi5",), ("x86-64",)])
def test_narrow_terminal_gets_whole_words_within_its_width(
    arguments: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = invoke(*arguments).output.splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line]
    words = " ".join(" ".join(lines).split())
    for name in ("rpi5",) if arguments == ("rpi5",) else ("x86-64",):
        assert load_target(name).title in words
