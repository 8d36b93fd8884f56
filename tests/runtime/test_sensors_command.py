import json
from pathlib import Path

import pytest
from tests.runtime.power_tree import Tree

from edgekit_runtime import cli
from edgekit_runtime.commands import sensors


def test_sensors_as_json_have_values_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = Tree(tmp_path)
    tree.rail(1, "VDD_IN", 5000, 1000)
    tree.write("devices/platform/soc/soc:firmware/get_throttled", "5")
    assert cli.main(["sensors", "--period", "0.001", "--json", "--sysfs", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["power_w"] == pytest.approx(5.0)
    assert document["power_of"] == "the whole board"
    assert document["throttled"] == ["under-voltage", "throttled"]
    assert "virtual machines" in document["missing"]["thermal"]


def test_sensors_for_people_name_the_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = Tree(tmp_path)
    tree.rail(1, "VDD_IN", 5000, -1000)
    assert cli.main(["sensors", "--period", "0.001", "--sysfs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "ina3221/VDD_IN" in shown
    assert "no reading: -5 power_w, expected 0 to 2000" in shown
    assert "power unknown" in shown


def test_watch_ends_with_an_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Tree(tmp_path).zone(0, "cpu-thermal", 50_000)
    naps = iter([None, None, None])

    def nap(_seconds: float) -> None:
        if next(naps, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr(sensors.time, "sleep", nap)
    assert cli.main(["sensors", "--watch", "--json", "--sysfs", str(tmp_path)]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["temperature_c"] for line in lines if line] == [50.0, 50.0, 50.0]
