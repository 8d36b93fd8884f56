"""scripts/graph_health.py: what it counts, on a checkout with one fault of each kind."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "graph_health.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "toolkit" / "edgekit_toolkit" / "room"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    return tmp_path


def check(checkout: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SCRIPT, checkout], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def write(checkout: Path, name: str, text: str) -> None:
    (checkout / "toolkit" / "edgekit_toolkit" / "room" / name).write_text(text)


def test_sound_graph_passes_with_one_line(checkout: Path) -> None:
    write(checkout, "low.py", "class Low: ...\n")
    write(checkout, "high.py", "from edgekit_toolkit.room.low import Low\n")
    code, printed = check(checkout)
    assert code == 0
    assert printed.count("\n") == 1
    assert "largest folder edgekit_toolkit.room (2 files)" in printed
    assert "highest fan-out edgekit_toolkit.room.high (1)" in printed


@pytest.mark.parametrize(
    "text",
    [
        'def pick(name): return name == "swift"\n',
        'def pick(name): return name in ("other", "swift")\n',
        'TITLES = {"swift": "Swift"}\n',
        'def pick(name):\n    match name:\n        case "swift":\n            return 1\n',
    ],
)
def test_case_for_an_engine_outside_its_record_fails(checkout: Path, text: str) -> None:
    records = checkout / "device_runtime" / "edgekit_runtime" / "engines"
    records.mkdir(parents=True)
    (records / "swift.py").write_text('SWIFT = Engine(name="swift", file_format="onnx")\n')
    write(checkout, "low.py", 'SWIFT = "swift"\n')
    assert check(checkout)[0] == 0
    write(checkout, "low.py", text)
    code, printed = check(checkout)
    assert code == 1
    assert "has a case for the engine 'swift'" in printed


@pytest.mark.parametrize(
    ("kind", "table", "records", "other"),
    [
        (
            "gate",
            "fleet/edgekit_fleet/rollouts/gate_table.py",
            'GATES = (Gate(name="swift", sentence="."),)\n',
            "fleet/edgekit_fleet/console/pages.py",
        ),
        (
            "objective",
            "device_runtime/edgekit_runtime/offload/objectives.py",
            'OBJECTIVES = {"swift": Objective(goal=".", stages=())}\n',
            "offload/edgekit_offload/planning/compare.py",
        ),
    ],
)
def test_case_for_a_record_fails_in_the_rooms_of_its_table(
    checkout: Path, kind: str, table: str, records: str, other: str
) -> None:
    for name, text in ((table, records), (other, 'IS_SWIFT = "" == "swift"\n')):
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).write_text(text)
    write(checkout, "low.py", 'IS_SWIFT = "" == "swift"\n')
    code, printed = check(checkout)
    assert code == 1
    assert f":1 has a case for the {kind} 'swift'" in printed
    assert "edgekit_toolkit" not in printed.partition("\n")[2]


def test_ring_through_typing_and_function_imports_fails(checkout: Path) -> None:
    write(
        checkout,
        "low.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from edgekit_toolkit.room import high\n",
    )
    write(checkout, "high.py", "def run():\n    from edgekit_toolkit.room.low import Low\n")
    code, printed = check(checkout)
    assert code == 1
    assert "1 rings (2 files)" in printed


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("class Twin: ...\n", "class Twin stands in"),
        ("def _tell_all(): ...\n", "is named '_tell_all'"),
        ("class SparingLog: ...\n", "is named 'SparingLog'"),
        ("for pace in (): ...\n", "is named 'pace'"),
        ('x = import_module("edgekit_toolkit.room.two")\n', "imports 'edgekit_toolkit.room.two' by a text"),
        ("import " + ", ".join(f"edgekit_toolkit.m{n}" for n in range(25)), "imports 25 modules"),
    ],
)
def test_fault_is_named_with_its_place(checkout: Path, text: str, fault: str) -> None:
    write(checkout, "one.py", text)
    write(checkout, "two.py", "class Twin: ...\nlayout = 1\n")
    for number in range(25):
        (checkout / "toolkit" / "edgekit_toolkit" / f"m{number}.py").touch()
    code, printed = check(checkout)
    assert code == 1
    assert fault in printed
    assert "layout" not in printed


def test_full_folder_fails(checkout: Path) -> None:
    for number in range(21):
        write(checkout, f"m{number}.py", "")
    code, printed = check(checkout)
    assert code == 1
    assert "edgekit_toolkit.room holds 21 files, expected 20 at most" in printed


@pytest.mark.parametrize(("arguments", "code"), [('low, "_ROOM"', 1), ('"low._ROOM"', 1), ('low, "ROOM"', 0)])
def test_private_name_that_a_test_patches_fails(checkout: Path, arguments: str, code: int) -> None:
    write(checkout, "low.py", "")
    (checkout / "tests").mkdir()
    (checkout / "tests" / "test_low.py").write_text(
        f"def test(monkeypatch): monkeypatch.setattr({arguments}, 1)\n"
    )
    assert check(checkout)[0] == code
