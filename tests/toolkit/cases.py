"""Many cases of one test as one item: an item costs pytest 3 to 5 ms, most cases less."""

import copy
import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

Test = Callable[..., None]
_OF_ONE_TEST = {"capfd", "caplog", "capsys", "monkeypatch", "recwarn"}
"""Fixtures in which a case would find what the one before it left."""


def cases(
    names: str | Sequence[str], rows: Iterable[Any], *, ids: Iterable[str] | None = None
) -> Callable[[Test], Test]:
    """Run a test for each row, as `pytest.mark.parametrize` does, but as one item that names what fails.

    Each row has an empty `tmp_path`, and generators, dicts and lists as the fixtures made them; other
    fixtures are shared. Where a row skips, the others run, and then the item counts as skipped.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [dict(zip(arguments, row if len(arguments) > 1 else [row], strict=True)) for row in rows]
    labels = [f"{row}"[:200] for row in table] if ids is None else list(ids)
    assert len(labels) == len(table) > 0, f"{len(table)} cases, {len(labels)} names of them"

    def decorate(test: Test) -> Test:
        def find_failure(number: int, fixtures: Mapping[str, Any], skipped: list[str]) -> str:
            try:
                test(**_renew(fixtures, number), **table[number])
            except pytest.skip.Exception as skip:
                skipped.append(f"{labels[number]}: {skip}")
            except (Exception, pytest.fail.Exception) as error:
                traceback.print_exc()
                return f"{labels[number]}: {type(error).__name__}: {error}"
            return ""

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            skipped: list[str] = []
            failures = [find_failure(number, fixtures, skipped) for number in range(len(table))]
            assert not any(failures), "\n".join(filter(None, failures))
            if skipped:
                pytest.skip("\n".join(skipped))

        signature = inspect.signature(test)
        fixtures = [value for name, value in signature.parameters.items() if name not in arguments]
        carried = _OF_ONE_TEST & signature.parameters.keys()
        assert not carried, f"{test.__name__}: {carried} would carry over from case to case"
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def _renew(fixtures: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the fixtures of one case."""
    own: dict[str, Any] = {
        name: copy.deepcopy(value) if isinstance(value, (np.random.Generator, dict, list)) else value
        for name, value in fixtures.items()
    }
    if "tmp_path" in own:
        own["tmp_path"] /= str(number)
        own["tmp_path"].mkdir()
    return own
