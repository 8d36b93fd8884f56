"""Judges models alike, whatever made them: same samples, same scores, latencies in one interleaved run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import metrics
from edgekit_runtime.sessions import Session
from edgekit_runtime.sessions.latency import Latency, LatencyLimits, measure_latency
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

Arrays = Mapping[str, NDArray[Any]]
Outputs = dict[str, NDArray[Any]]
Open = Callable[[int], Session]  # takes the number of threads
THREADS = 2


def open_model(path: Path, threads: int = THREADS) -> Session:
    """A session with onnxruntime's default optimisations.

    Threads do not spin: they would take a core from the session whose turn is next.
    """
    return OrtSession(path, OrtOptions(threads=threads))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path) as data:
        return dict(data)


class Judge:
    """Knows the samples of one work and what the fp32 source answers to them."""

    def __init__(self, evaluation: Arrays, metric: str, source: Session) -> None:
        self._labels: NDArray[np.int64] | None = evaluation.get("y")
        self._inputs: Arrays = {name: array for name, array in evaluation.items() if name != "y"}
        self._score = getattr(metrics, metric)
        self._reference = [source.run(feed) for feed in self.feeds()]

    def feeds(self) -> Iterator[Outputs]:
        """Each sample alone: also models with a fixed batch of 1 take it."""
        for index in range(len(next(iter(self._inputs.values())))):
            yield {name: array[index : index + 1] for name, array in self._inputs.items()}

    def score_outputs(self, outputs: Outputs) -> float:
        """Return the score of the outputs of all samples, in the source's order of outputs."""
        reference = {
            name: np.concatenate([sample[name] for sample in self._reference]) for name in self._reference[0]
        }
        named = {
            name: array.reshape(reference[name].shape)
            for name, array in zip(reference, outputs.values(), strict=True)
        }
        return float(self._score(named, reference, self._labels).mean())

    def score(self, session: Session) -> float:
        scores = []
        for index, (feed, reference) in enumerate(zip(self.feeds(), self._reference, strict=True)):
            labels = None if self._labels is None else self._labels[index : index + 1]
            scores.append(self._score(session.run(feed), reference, labels))
        return float(np.concatenate(scores).mean())

    def time(self, models: Sequence[Open], limits: LatencyLimits, threads: int) -> list[Latency]:
        """Latency of one sample in each model, in one run in which they take turns."""
        feed = next(self.feeds())
        sessions = [model(threads) for model in models]
        calls = {
            str(index): lambda session=session: session.run(feed) for index, session in enumerate(sessions)
        }
        return list(measure_latency(calls, limits).values())
