"""What a race decides: engine, threads, and that nothing slower than float32 wins unforced."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions.latency import Latency
from edgekit_toolkit.pipeline.engine_race import Contender, decide, describe_faster, packaged_threads


def contender(engine: str, label: str, ms: float | None, threads: int = 2, **attributes: Any) -> Contender:
    """A contender with three processes that agree to 1 %."""
    candidate: Any = SimpleNamespace(id=label, label=label)
    latency = None if ms is None else Latency((ms * 0.995, ms, ms * 1.005))
    usual = attributes.pop("usual", threads == 2)
    return Contender(
        engine=engine, candidate=candidate, threads=threads, usual=usual, latency=latency, **attributes
    )


def floats(engine: str, ms: float, **attributes: Any) -> Contender:
    return contender(engine, "float32", ms, is_float=True, **attributes)


@cases(("alone_ms", "threads"), [(5.0, 1), (8.5, 1), (9.5, 2), (12.0, 2)])
def test_one_thread_is_taken_where_it_is_clearly_faster_than_the_usual_ones(
    alone_ms: float, threads: int
) -> None:
    result = decide([contender("ort", "int8", alone_ms, threads=1), contender("ort", "int8", 10.0)])
    assert result.best["ort"].threads == threads


def test_threads_whose_usual_number_fails_are_those_that_run() -> None:
    failing = replace(contender("ort", "int8", None), reason="hung")
    assert decide([contender("ort", "int8", 9.0, threads=1), failing]).best["ort"].threads == 1


@pytest.mark.parametrize(
    ("usual", "threads", "cores", "stated"), [(True, 2, 4, None), (False, 1, 4, 1), (False, 2, 4, 4)]
)
def test_package_states_threads_only_where_they_are_not_the_usual_ones(
    usual: bool, threads: int, cores: int, stated: int | None
) -> None:
    assert packaged_threads(contender("ort", "int8", 1.0, threads=threads, usual=usual), cores) == stated


def test_fastest_engine_wins_and_of_equals_the_one_with_fewer_threads() -> None:
    slow, fast = contender("ort", "int8", 10.0), contender("openvino", "int8", 7.0)
    assert decide([slow, fast]).winner == "openvino"
    assert decide([fast, contender("litert", "int8", 7.05, threads=1)]).winner == "litert"


def test_form_slower_than_float32_gives_way_to_the_first_that_is_not() -> None:
    entering = [contender("ort", "int8", 12.0), contender("ort", "float16", 10.0), floats("ort", 10.0)]
    result = decide(entering)
    assert result.best["ort"].candidate.label == "float16"
    assert result.faster_float is None


def test_form_slower_than_float32_stays_where_float32_breaks_a_limit_and_says_so() -> None:
    result = decide([contender("ort", "int8", 12.0), floats("ort", 10.0, is_eligible=False)])
    assert result.best["ort"].candidate.label == "int8"
    assert describe_faster(result) == "1.20 x float32 on onnxruntime"


def test_float32_of_another_engine_is_said_too() -> None:
    entering = [
        contender("ort", "int8", 12.0),
        floats("ort", 14.0),
        contender("openvino", "int8", None, is_eligible=False),
        floats("openvino", 8.0, is_eligible=False),
    ]
    result = decide(entering)
    assert (result.winner, [*result.best]) == ("ort", ["ort"])
    assert describe_faster(result) == "1.50 x float32 on OpenVINO"


@pytest.mark.parametrize(
    ("rival_ms", "label"), [(9.5, "static int8"), (9.8, "dynamic int8"), (11.0, "dynamic int8")]
)
def test_form_gives_way_to_another_that_is_clearly_faster_alone(rival_ms: float, label: str) -> None:
    entering = [
        contender("litert", "dynamic int8", 10.0),
        contender("litert", "static int8", rival_ms),
        floats("litert", 20.0),
    ]
    assert decide(entering).best["litert"].candidate.label == label


def test_faster_form_that_breaks_a_limit_is_not_taken() -> None:
    entering = [contender("ort", "int8", 10.0), contender("ort", "static int8", 5.0, is_eligible=False)]
    assert decide(entering).best["ort"].candidate.label == "int8"


def test_form_as_fast_as_float32_by_chance_is_kept() -> None:
    result = decide([contender("ort", "int8", 10.1), floats("ort", 10.0)])
    assert result.best["ort"].candidate.label == "int8"


def test_race_in_which_nothing_runs_says_why() -> None:
    with pytest.raises(BackendError, match="ort: hung; choose one by --backend"):
        decide([replace(contender("ort", "int8", None), reason="hung")])
