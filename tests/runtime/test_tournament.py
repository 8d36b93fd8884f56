import importlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")
from tests.runtime.tflite_models import linear

from edgekit_runtime.archive import read_package, write_package
from edgekit_runtime.cli import main
from edgekit_runtime.errors import BackendError
from edgekit_runtime.latency import Latency, LatencyLimits
from edgekit_runtime.manifest import BackendChoice
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.litert import LiteRtSession
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_runtime.sessions.preference import keep_winner, recall_order
from edgekit_runtime.sessions.tournament import hold_tournament, judge, race
from edgekit_runtime.signing import TrustStore
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.sign import find_keys_folder, load_signer

QUICK = LatencyLimits(warmup_rounds=1, min_rounds=10, max_rounds=10)
ORT = BackendChoice("ort", "model.onnx", {"threads": 1})
LITERT = BackendChoice("litert", "model.tflite", {"threads": 1}, ORT)
ABSENT = BackendChoice("absent", "model.onnx", {}, LITERT)
RNG = np.random.default_rng(0)


def noisy(median_s: float, count: int = 100, spread: float = 0.05) -> Latency:
    return Latency(tuple((median_s * RNG.uniform(1 - spread, 1 + spread, count)).tolist()))


def test_the_fastest_wins_wherever_it_stands() -> None:
    verdict = judge({"a": noisy(2.0), "b": noisy(1.0), "c": noisy(1.5)})
    assert (verdict.winner, verdict.tied) == ("b", ("b",))


def test_of_those_that_cannot_be_told_apart_the_preferred_one_wins() -> None:
    verdict = judge({"a": noisy(1.01), "b": noisy(1.0), "c": noisy(1.5)})
    assert (verdict.winner, verdict.tied) == ("a", ("a", "b"))


def test_a_difference_within_chance_is_no_victory() -> None:
    slower = Latency((1.3, 0.8, 1.3, 0.8, 1.3, 0.8, 1.3, 0.8, 1.3))
    assert judge({"a": slower, "b": Latency((1.0,) * 9)}).winner == "a"


def test_a_load_that_strikes_all_alike_hides_no_victory() -> None:
    load = RNG.uniform(1, 20, 100)
    verdict = judge({"a": Latency(tuple(load * 1.1)), "b": Latency(tuple(load))})
    assert verdict.tied == ("b",)


class Clocked:
    """A session that takes the same time always, on a clock of its own."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def __init__(self, name: str, seconds: float, log: list[str], now: list[float]) -> None:
        self.name, self.seconds, self.log, self.now = name, seconds, log, now

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.log.append(self.name)
        self.now[0] += self.seconds
        return {}

    def close(self) -> None:
        pass


def test_turns_of_short_inferences_hold_several_and_are_interleaved() -> None:
    log: list[str] = []
    now = [0.0]
    sessions = {"a": Clocked("a", 2.5e-4, log, now), "b": Clocked("b", 5e-4, log, now)}
    found = race(sessions, {}, QUICK, clock=lambda: now[0])
    assert found["a"].median_s == pytest.approx(2.5e-4)
    assert found["b"].median_s == pytest.approx(5e-4)
    turns = ["".join(log[start : start + 4]) for start in range(4, len(log), 4)]
    assert set(turns) == {"aaaa", "bbbb"}  # of 1 ms and 2 ms
    rounds = [tuple(turns[start : start + 2]) for start in range(0, len(turns), 2)]
    assert all(len(set(order)) == 2 for order in rounds)
    assert len(set(rounds)) == 2  # both orders occur


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


def test_every_engine_that_is_here_takes_part(make: Callable[..., Path]) -> None:
    with read_package(make(ABSENT), TrustStore.from_folder(find_keys_folder())) as package:
        result = hold_tournament(package, limits=QUICK)
    assert [entrant.name for entrant in result.entrants] == [
        "absent model.onnx", "litert model.tflite", "ort model.onnx",
    ]  # fmt: skip
    assert "no backend 'absent'" in str(result.entrants[0].reason)
    assert [entrant.latency is not None for entrant in result.entrants] == [False, True, True]
    assert result.winner is not None
    assert result.winner.choice in {BackendChoice("litert", "model.tflite", {"threads": 1}), ORT}


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
    assert main(["tournament", "--json", str(make(LITERT, wrong))]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["engines"][0]["reason"].startswith("fails the self-test: output 'y'")
    assert document["winner"] == "ort model.onnx"


def test_the_command_prints_a_table_and_keeps_the_winner(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["tournament", "--threads", "1", str(make(LITERT))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "median ms" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["litert", "ort", "kept:"]
    assert list((tmp_path / "cache" / "tournament").glob("*.json"))


def test_a_cache_that_cannot_be_written_does_not_hide_the_table(
    make: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert main(["tournament", str(make(LITERT))]) == 0
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
    assert main(["tournament", "--json", str(path)]) == BackendError.exit_code
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
        result = hold_tournament(package, limits=QUICK)
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
