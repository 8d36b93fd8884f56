import importlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")
from tests.runtime.tflite_models import linear
from tests.waiting import bounded, is_running, wait_for

from edgekit_runtime.autotune import contest, contest_child
from edgekit_runtime.autotune.contest import MeasureOrder, RunSetting
from edgekit_runtime.autotune.tournament import Tournament, hold_tournament
from edgekit_runtime.cli import main
from edgekit_runtime.errors import BackendError, PackageError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.litert.session import LiteRtSession
from edgekit_runtime.sessions.local_results import keep_winner, recall_order
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_runtime.system.child_process import child_environment
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.signing_keys import find_keys_folder, load_signer

pytestmark = pytest.mark.usefixtures("copied_children_of_test")

QUICK_S = 0.1  # one process
QUICK = ["--seconds", str(QUICK_S)]
ORT = BackendChoice("ort", "model.onnx", {"threads": 1})
LITERT = BackendChoice("litert", "model.tflite", {"threads": 1}, ORT)
ABSENT = BackendChoice("absent", "model.onnx", {}, LITERT)


class Processes:
    """Measuring processes that say what they are told to, one list of medians a process."""

    def __init__(self, *medians: Sequence[float | str]) -> None:
        self.medians = medians
        self.orders: list[Sequence[RunSetting]] = []

    def __call__(
        self, settings: Sequence[RunSetting], *, rounds: int, seconds: float, seed: int
    ) -> Sequence[float | str]:
        medians = self.medians[min(len(self.orders), len(self.medians) - 1)]
        self.orders.append(settings)
        return [medians[setting.chain_index] for setting in settings]


def hold(make: Callable[..., Path], measure: Processes, backend: BackendChoice = LITERT) -> Tournament:
    with read_package(make(backend), TrustStore.from_folder(find_keys_folder())) as package:
        return hold_tournament(package, find_keys_folder(), measure=measure)


def winner_of(tournament: Tournament) -> str:
    assert tournament.winner is not None
    return tournament.winner.choice.name


def test_one_that_is_far_ahead_in_every_process_ends_the_tournament_early(make: Callable[..., Path]) -> None:
    processes = Processes([2.0, 1.0])
    result = hold(make, processes)
    assert (winner_of(result), result.as_fast) == ("ort", ("ort model.onnx",))
    assert len(processes.orders) == 3


def test_the_middle_process_decides_where_they_differ(make: Callable[..., Path]) -> None:
    """LiteRT's time has two values from process to process; in the first process it is the slower one."""
    processes = Processes([1.3, 1.0], [0.7, 1.0], [0.7, 1.0], [1.3, 1.0], [0.7, 1.0])
    result = hold(make, processes)
    assert winner_of(result) == "litert"
    assert result.as_fast == ("litert model.tflite", "ort model.onnx")
    assert len(processes.orders) == 7


def test_of_equally_fast_ones_the_preferred_one_wins(make: Callable[..., Path]) -> None:
    assert winner_of(hold(make, Processes([1.01, 1.0]))) == "litert"


def test_of_equally_fast_ones_fewer_threads_win(make: Callable[..., Path]) -> None:
    two = BackendChoice("litert", "model.tflite", {"threads": 2}, ORT)
    assert winner_of(hold(make, Processes([1.0, 1.01]), two)) == "ort"


def test_threads_that_are_faster_by_chance_do_not_win(make: Callable[..., Path]) -> None:
    chain = BackendChoice("ort", "model.onnx", {"threads": 2}, ORT)
    differing = Processes([0.7, 1.0], [0.8, 1.0], [1.1, 1.0])
    winner = hold(make, differing, chain).winner
    assert winner is not None
    assert winner.choice.options == {"threads": 1}


def test_threads_that_are_faster_in_every_process_win(make: Callable[..., Path]) -> None:
    chain = BackendChoice("ort", "model.onnx", {"threads": 2}, ORT)
    winner = hold(make, Processes([0.7, 1.0], [0.8, 1.0], [0.9, 1.0]), chain).winner
    assert winner is not None
    assert winner.choice.options == {"threads": 2}


def test_each_process_has_an_order_of_its_own(make: Callable[..., Path]) -> None:
    processes = Processes([1.0, 1.0])
    hold(make, processes)
    assert len({tuple(order) for order in processes.orders}) == 2


def test_one_that_fails_in_a_later_process_is_out(make: Callable[..., Path]) -> None:
    processes = Processes([0.5, 1.0], ["out of memory", 1.0])
    result = hold(make, processes)
    assert winner_of(result) == "ort"
    assert (result.entrants[0].latency, result.entrants[0].reason) == (None, "out of memory")
    assert len(processes.orders[-1]) == 1


class Crashing(Processes):
    """Processes that die where a setting of `places` takes part, or more settings than `most` at once."""

    def __init__(self, *places: int, most: int = 9) -> None:
        super().__init__([2.0, 1.0])
        self.places, self.most = places, most

    def __call__(
        self, settings: Sequence[RunSetting], *, rounds: int, seconds: float, seed: int
    ) -> Sequence[float | str]:
        if len(settings) > self.most or any(setting.chain_index in self.places for setting in settings):
            raise BackendError("the measuring process ended by SIGKILL: it printed no message")
        return super().__call__(settings, rounds=rounds, seconds=seconds, seed=seed)


def test_one_whose_process_dies_is_named_and_the_others_go_on(make: Callable[..., Path]) -> None:
    result = hold(make, Crashing(0))
    assert winner_of(result) == "ort"
    assert result.entrants[0].reason == "the measuring process ended by SIGKILL: it printed no message"
    assert result.entrants[1].latency is not None


def test_where_each_process_dies_each_has_its_reason(make: Callable[..., Path]) -> None:
    result = hold(make, Crashing(0, 1))
    assert (result.winner, [entrant.latency for entrant in result.entrants]) == (None, [None, None])


def test_processes_that_die_of_all_together_are_said_with_what_to_do(make: Callable[..., Path]) -> None:
    with pytest.raises(BackendError, match=r"each of its 2 settings runs alone: .* so free some"):
        hold(make, Crashing(most=1))


@pytest.mark.parametrize(
    ("rogue", "reason"),
    [
        ("crash", "ended by SIGSEGV: engine: \ufffd\ufffd"),
        ("hang", "it was silent for 4 s"),
    ],
)
def test_an_engine_that_crashes_or_hangs_leaves_the_tournament_to_the_others(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, rogue: str, reason: str
) -> None:
    monkeypatch.setenv("ROGUE", rogue)
    monkeypatch.setattr(contest, "MODULE", "tests.runtime.rogue_contest")
    with read_package(make(LITERT), TrustStore.from_folder(find_keys_folder())) as package:
        result = hold_tournament(package, find_keys_folder(), seconds=QUICK_S)
    assert winner_of(result) == "ort"
    assert reason in str(result.entrants[0].reason)


def test_a_setting_that_fails_the_self_test_is_closed_and_not_opened_again(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    class Wrong:
        def run(self, inputs: Any) -> Any:
            return {"y": inputs["x"][:, :2] + 7}

        def close(self) -> None:
            opened.append("closed")

    def open_wrong(*_: object) -> Any:
        opened.append("opened")
        return Wrong()

    monkeypatch.setattr(contest_child, "open_choice", open_wrong)
    path, keys = make(ORT), find_keys_folder()
    settings = (RunSetting(), RunSetting(batch=4), RunSetting(batch=16))
    with read_package(path, TrustStore.from_folder(keys)) as package:
        order = MeasureOrder(
            package=str(path),
            manifest_sha256="",
            keys=str(keys),
            settings=settings,
            threads=None,
            rounds=1,
            end_s=0.0,
            seed=0,
        )
        answers = contest_child.measure(package, order, lambda _: None)
    assert [str(answer).startswith("fails the self-test") for answer in answers] == [True] * 3
    assert opened == ["opened", "closed"]


def test_a_package_that_changes_ends_the_tournament(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(LITERT)
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        path.write_bytes(b"another file")
        with pytest.raises(PackageError, match=r"x\.edgepkg"):
            hold_tournament(package, find_keys_folder())


_HOLDS_A_TOURNAMENT = """
import sys
from pathlib import Path
from edgekit_runtime.autotune import contest
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.autotune.tournament import hold_tournament
from edgekit_runtime.trust.trust_store import TrustStore
contest.MODULE = "tests.runtime.rogue_contest"
path, keys = map(Path, sys.argv[1:])
with read_package(path, TrustStore.from_folder(keys)) as package:
    hold_tournament(package, keys)
"""


def test_a_measuring_process_ends_with_who_waits_for_it(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROGUE", "stay")
    command = [sys.executable, "-c", _HOLDS_A_TOURNAMENT, str(make(LITERT)), str(find_keys_folder())]
    started = subprocess.Popen(command, env=child_environment(), cwd="/")
    with bounded(started) as waiting:
        pid = wait_for(lambda: find_rogue(waiting.pid), "the engine that hangs")
        os.kill(pid, signal.SIGSTOP)  # one that could not even notice
        waiting.kill()
        wait_for(lambda: not is_running(pid), "the end of the measuring process")


def find_rogue(parent: int) -> int | None:
    """Return the measuring process of `parent`, once its engine has spoken."""
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"engine" in Path(f"/proc/{pid}/fd/2").read_bytes():
            return int(pid)
    return None


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def make(maker: Any, tmp_path: Path) -> Callable[..., Path]:
    def make(backend: BackendChoice, tflite: bytes | None = None) -> Path:
        path = tmp_path / "x.edgepkg"
        artifacts = {**maker.artifacts, "model.tflite": linear() if tflite is None else tflite}
        maker.roles["model.tflite"] = "model"
        write_package(path, maker.manifest(artifacts, backend=backend), artifacts, load_signer())
        return path

    return make


def test_an_engine_that_computes_something_else_takes_no_part(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    import tests.runtime.tflite_models as models

    wrong = models.write(
        [
            models.Tensor("x", (1, 4), signature=(-1, 4)),
            models.Tensor("w", (2, 4), values=models.WEIGHT.T * 2),
            models.Tensor("y", (1, 2), signature=(-1, 2)),
        ],
        [models.Node("FULLY_CONNECTED", (0, 1, -1), (2,), models.schema.FullyConnectedOptionsT())],
        (0,),
        (2,),
    )
    assert main(["tournament", "--json", *QUICK, str(make(LITERT, wrong))]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["engines"][0]["reason"].startswith("fails the self-test: output 'y'")
    assert document["winner"] == "ort model.onnx"


def test_the_command_prints_a_table_of_every_engine_and_keeps_the_winner(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["tournament", "--threads", "1", *QUICK, str(make(ABSENT))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "median ms" in lines[0]
    assert [line.split()[:2] for line in lines[1:4]] == [
        *(["absent", "model.onnx"], ["litert", "model.tflite"], ["ort", "model.onnx"]),
    ]
    assert "no backend 'absent'" in lines[1]
    assert [bool(re.search(r"\d\.\d", line)) for line in lines[1:4]] == [False, True, True]
    assert lines[4].split()[0] == "kept:"
    (kept,) = (tmp_path / "cache" / "tournament").glob("*.json")
    assert json.loads(kept.read_text())["place"] in (1, 2)


def test_a_cache_that_cannot_be_written_does_not_hide_the_table(
    make: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert main(["tournament", *QUICK, str(make(LITERT))]) == 0
    assert "not kept: " in capsys.readouterr().out
    assert "set EDGEKIT_CACHE to another folder" in caplog.text


@pytest.mark.parametrize(("place", "kind"), [(0, LiteRtSession), (1, OrtSession)])
def test_a_kept_winner_is_opened_first(place: int, kind: type, make: Callable[..., Path]) -> None:
    path = make(LITERT)
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        keep_winner(package.manifest, "default", place)
    assert isinstance(open_session(path), kind)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"variant": "default"}',
        b'{"variant": "default", "place": null}',
        b'{"variant": "default", "place": 2}',
        b'{"variant": "default", "place": 1.0}',
        b'{"variant": "default", "place": true}',
        b'{"variant": "default", "place": -1}',
        b'{"variant": "other", "place": 1}',
        b'{"variant": [], "place": 1}',
    ],
)
def test_a_preference_that_names_nobody_counts_for_nothing(content: bytes, make: Callable[..., Path]) -> None:
    path = make(LITERT)
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        keep_winner(package.manifest, "default", 1).write_bytes(content)
    assert isinstance(open_session(path), LiteRtSession)


def test_a_winner_whose_engine_has_gone_gives_way_to_the_others(
    make: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = make(BackendChoice("ort", "model.onnx", {}, BackendChoice("absent", "model.onnx")))
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        keep_winner(package.manifest, "default", 1)
    with caplog.at_level(logging.WARNING):
        assert isinstance(open_session(path), OrtSession)
    assert "using the fallback 'ort'" in caplog.text


def test_where_no_engine_runs_the_command_fails_with_every_reason(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(BackendChoice("absent", "model.onnx", {}, BackendChoice("litert", "model.tflite")), b"broken")
    assert main(["tournament", "--json", *QUICK, str(path)]) == BackendError.exit_code
    output = capsys.readouterr()
    error = json.loads(output.out)["error"]
    assert error["type"] == "BackendError"
    assert "no backend 'absent'" in error["message"]
    assert "refused the model" in error["message"]
    assert output.err.startswith("edgekit-device: ")


def test_a_user_without_a_home_gets_the_order_of_the_package(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    path = make(LITERT)
    for name in ("EDGEKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        assert recall_order(package.manifest) == package.manifest.all_variants


def test_choices_that_differ_in_options_only_are_told_apart(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []

    def note(package: object, choice: BackendChoice, threads: int | None) -> None:
        opened.append(choice.options["threads"])

    path = make(BackendChoice("ort", "model.onnx", {"threads": 2}, ORT))
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        result = hold_tournament(package, find_keys_folder(), measure=Processes([1.0, 1.0]))
        assert [entrant.name for entrant in result.entrants] == ["ort model.onnx", "ort model.onnx (2)"]
        assert all(entrant.latency is not None for entrant in result.entrants)
        keep_winner(package.manifest, "default", 1)
        # By import, as sessions do: a test that hides onnxruntime leaves another module behind.
        monkeypatch.setattr(importlib.import_module("edgekit_runtime.sessions.ort"), "open_ort", note)
        open_session(package)
    assert opened == [1]


def test_an_untrusted_package_is_refused(maker: Any, package_path: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["tournament", str(package_path), "--keys", str(tmp_path / "empty")]) == 8


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["tournament"],
        ["tournament", "x", "--threads", "0"],
        ["tournament", "x", "--threads", "two"],
    ],
)
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
