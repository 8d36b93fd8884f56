import math
from typing import Any

import numpy as np
import pytest
from tests.service.scheduling_parts import Bench

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.service.cache import ResponseCache
from edgekit_runtime.service.call import Call


class Cached:
    def __init__(self, max_bytes: int = 1000, **limits: Any) -> None:
        self.bench = Bench(**limits)
        self.cache = ResponseCache(self.bench.lane, max_bytes, self.bench.metrics)

    def ask(self, x: Any) -> Any:
        answers: list[Any] = []
        self.cache.submit(Call({"x": x}, answers.append))
        self.bench.finish()
        (answer,) = answers
        return answer

    @property
    def runs(self) -> int:
        return len(self.bench.session.runs)


def row(value: float) -> Any:
    return np.full((1, 2), value, np.float32)


def test_equal_inputs_run_once() -> None:
    cached = Cached()
    first, second = cached.ask(row(1)), cached.ask(row(1))
    assert np.array_equal(first["y"], second["y"])
    assert cached.runs == 1
    assert (cached.bench.metrics.cache_hits, cached.bench.metrics.cache_misses) == (1, 1)


@pytest.mark.parametrize(
    "other", [row(2), row(1).reshape(2, 1), row(-0.0), row(math.nan), np.ones((2, 2), np.float32)]
)
def test_other_inputs_run(other: Any) -> None:
    cached = Cached()
    cached.ask(row(1))
    cached.ask(row(0))
    cached.ask(other)
    assert cached.runs == 3


def test_errors_are_not_kept() -> None:
    cached = Cached()
    for _ in range(2):
        assert isinstance(cached.ask(row(-1)), EdgekitError)
    assert cached.runs == 2


def test_the_least_recently_used_answer_is_forgotten() -> None:
    cached = Cached(max_bytes=16)  # two answers
    for value in (1, 2, 1, 3):
        cached.ask(row(value))
    assert cached.runs == 3
    cached.ask(row(1))
    assert cached.runs == 3
    cached.ask(row(2))
    assert cached.runs == 4


def test_an_answer_larger_than_the_cache_is_not_kept() -> None:
    cached = Cached(max_bytes=7)
    cached.ask(row(1))
    cached.ask(row(1))
    assert cached.runs == 2


def test_an_input_that_changes_before_it_runs_poisons_nothing() -> None:
    cached = Cached()
    answers: list[Any] = []
    shared = row(1)
    cached.bench.submit(50)  # so that the next one waits
    cached.cache.submit(Call({"x": shared}, answers.append))
    shared[:] = 7
    cached.bench.finish()
    assert cached.ask(row(1))["y"].tolist() == [[2, 2]]


def test_a_kept_answer_cannot_be_changed_by_who_gets_it() -> None:
    cached = Cached()
    answer = cached.ask(row(1))
    with pytest.raises(ValueError, match="read-only"):
        answer["y"][0, 0] = 5


def test_answers_of_a_batch_are_kept_without_the_rest_of_it() -> None:
    cached = Cached(max_batch=8)
    answers: list[Any] = []
    for value in range(4):
        cached.cache.submit(Call({"x": row(value)}, answers.append))
    cached.bench.finish()
    assert [answer["y"].base for answer in answers] == [None] * 4
