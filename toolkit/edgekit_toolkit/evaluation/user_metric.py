"""A metric of one's own: FILE.py:FUNCTION. The file is the user's code and runs with the user's rights.

It is called with the outputs of each batch and gives a score a sample; with `FUNCTION.whole_set = True` it is
called with lists of all samples' outputs and gives one score.
"""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_toolkit.evaluation.metrics import Labels, Metric, Outputs, Score, SetMetric, SetScore


def load_metric(name: str) -> Metric | SetMetric:
    """Return the metric `FILE.py:FUNCTION`.

    Raises:
        DataError: there is no such file or function, or the file cannot be imported.
    """
    file, _, function = name.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise DataError(f"metric {name!r}: there is no Python file {file}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    found = _import(name, path, function)
    title = f"{path.name}:{function}"
    if getattr(found, "whole_set", False):
        return SetMetric(f"{title} (sha256 {digest[:12]})", title, _set_score(name, path, found))
    return Metric(f"{title} (sha256 {digest[:12]})", title, _score(name, path, found))


def _import(name: str, path: Path, function: str) -> Callable[..., Any]:
    module_name = f"edgekit_metric_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise DataError(f"metric {name!r}: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
        found: Callable[..., Any] = getattr(module, function)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise DataError(f"metric {name!r}: {error!r}{_place(error, path)} while loading {path}") from error
    return found


def _score(name: str, path: Path, function: Callable[..., Any]) -> Score:
    def score(outputs: Outputs, reference: Outputs, labels: Labels) -> NDArray[np.float64]:
        try:
            # Copies: a metric that works in place must not change what the next candidate is held against.
            given = [{key: value.copy() for key, value in one.items()} for one in (outputs, reference)]
            copied = None if labels is None else labels.copy()
            with redirect_stdout(sys.stderr):  # standard output belongs to --json
                scores = np.atleast_1d(np.asarray(function(*given, copied), np.float64))
        except (Exception, SystemExit) as error:  # whatever the user's function raises
            raise DataError(f"metric {name!r} failed: {error!r}{_place(error, path)}") from error
        _check(name, scores, "shape [samples]")
        return scores

    return score


def _set_score(name: str, path: Path, function: Callable[..., Any]) -> SetScore:
    def score(outputs: Sequence[Outputs], reference: Sequence[Outputs], labels: Labels) -> float:
        try:
            copied = None if labels is None else labels.copy()
            with redirect_stdout(sys.stderr):
                scores = np.asarray(function(outputs, reference, copied), np.float64)
        except (Exception, SystemExit) as error:  # whatever the user's function raises
            raise DataError(f"metric {name!r} failed: {error!r}{_place(error, path)}") from error
        if scores.ndim:
            raise DataError(f"metric {name!r} returned shape {list(scores.shape)}; expected one score 0..1")
        _check(name, scores[np.newaxis], "one for the whole set")
        return float(scores)

    return score


def _check(name: str, scores: NDArray[np.float64], expected: str) -> None:
    is_share = scores.size and np.isfinite(scores).all() and scores.min() >= 0 and scores.max() <= 1
    if scores.ndim != 1 or not is_share:
        found = f", values {scores.min()}..{scores.max()}" if scores.size else ""
        raise DataError(
            f"metric {name!r} returned shape {list(scores.shape)}{found}; expected scores 0..1, {expected}"
        )


def _place(error: BaseException, path: Path) -> str:
    """Return file and line of the user's file where an error came from, or nothing."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f" at {path}:{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) in (path, path.absolute())
    ]
    return f" at {path}:{lines[-1]}" if lines else ""
