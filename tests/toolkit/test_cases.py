"""Cases of one item are as separate as items, and none fails unseen."""

from pathlib import Path

import numpy as np
import pytest
from tests.toolkit.cases import cases


def test_each_case_runs_and_each_that_fails_is_named() -> None:
    seen = []

    @cases("letter", "ab")
    @cases(("number", "text"), [(1, "x"), (2, "y"), (3, "z")])
    def run(number: int, text: str, letter: str) -> None:
        seen.append((letter, number, text))
        assert number == 2
        if letter == "b":
            pytest.fail("not b")

    with pytest.raises(AssertionError) as failure:
        run()
    assert seen == [(letter, *pair) for letter in "ab" for pair in ((1, "x"), (2, "y"), (3, "z"))]
    assert [str(failure.value).count(f"'number': {number}") for number in (1, 2, 3)] == [2, 1, 2]
    assert "Failed: not b" in str(failure.value)


def test_cases_after_one_that_skips_run_and_may_fail() -> None:
    @cases("number", range(3))
    def run(number: int, wrong: int) -> None:
        if number == 0:
            pytest.skip("nothing here")
        assert number != wrong

    with pytest.raises(pytest.skip.Exception, match="nothing here"):
        run(wrong=9)
    with pytest.raises(AssertionError, match="'number': 2"):
        run(wrong=2)


def test_interrupt_ends_all_cases() -> None:
    seen = []

    @cases("number", range(3))
    def run(number: int) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert seen == [0]


def test_each_case_has_an_empty_folder_and_the_first_numbers_of_a_generator(tmp_path: Path) -> None:
    drawn = []

    @cases("number", range(3))
    def run(number: int, tmp_path: Path, rng: np.random.Generator) -> None:
        assert list(tmp_path.iterdir()) == []
        (tmp_path / str(number)).touch()
        drawn.append(rng.random())

    run(tmp_path=tmp_path, rng=np.random.default_rng(0))
    assert len(drawn) == 3 and len(set(drawn)) == 1


def test_table_without_cases_or_with_other_names_and_fixtures_that_carry_over_are_refused() -> None:
    with pytest.raises(AssertionError, match="0 cases"):
        cases("number", [])
    with pytest.raises(AssertionError, match="2 cases, 1 names"):
        cases("number", [1, 2], ids=["one"])
    with pytest.raises(ValueError, match="shorter"):
        cases(("number", "text"), [(1,)])

    def patched(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        del number, monkeypatch

    with pytest.raises(AssertionError, match="monkeypatch"):
        cases("number", [1])(patched)
