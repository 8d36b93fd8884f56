"""The course of a rollout's gates: the evidence of each after each answer, and how near a stop it is.

A gate bets that a mean lies above its limit (`edgekit_fleet.rollouts.betting`). At each moment there is a
largest limit that the answers refute: with a certainty of 1 - alpha the mean lies above it, at all moments
together. The rollout stops when that line reaches the gate's own limit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_fleet.rollouts.betting import find_refuted_limits
from edgekit_fleet.rollouts.gate_table import Gate, Sample
from edgekit_fleet.rollouts.gates import (
    GateTest,
    SampleGroup,
    describe,
    find_needed,
    list_groups,
    list_tests,
    read_evidence,
    weigh,
)

_POINTS: Final = 48
_STEPS: Final = 24  # of the limits that are tried
_LEAST_LIMIT: Final = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The evidence of one gate over time.

    Attributes:
        where: ` of class NAME` if the evidence against the release is strongest for one class of devices;
            empty if it is strongest for all devices.
        of_model: ` of MODEL`, the model with the strongest evidence; empty if the release has one model.
        counts: numbers of devices, rising.
        estimates: mean over the first `counts` devices; an improvement is shown as no change.
        lows: lower bound of that mean; 0 where there is none yet.
        limit: limit at which the rollout stops. Estimates, lows and limit are in the gate's unit of evidence.
        leaning: strength of the evidence, 0 to 1; at 1 the gate stops the rollout.
        sentence: the gate's present statement.
    """

    gate: Gate
    where: str
    of_model: str
    counts: tuple[int, ...]
    estimates: tuple[float, ...]
    lows: tuple[float, ...]
    limit: float
    leaning: float
    sentence: str

    @property
    def is_stop(self) -> bool:
        """Return whether the gate stops the rollout."""
        return self.leaning >= 1.0


def find_courses(
    samples: Sequence[Sample], limits: Mapping[str, float], models: Sequence[str]
) -> list[Course]:
    """Return the course of each gate that has answers.

    Of all groups of devices and all models, a course shows the strongest evidence against the release.

    Args:
        samples: samples in the order in which their devices first answered, then those without an answer.
        limits: limits of the rollout, by name.
        models: names of the models of the release.
    """
    groups = list_groups(samples)
    worst: dict[str, tuple[float, GateTest, SampleGroup, NDArray[np.float64]]] = {}
    for test, evidence in read_evidence(samples, list_tests(limits, models)):
        for group in groups:
            values = group.choose(evidence)
            if len(values):
                leaning = min(weigh(test, group, values), 1.0)
                name = test.gate.name
                if name not in worst or leaning > worst[name][0]:  # if equal, all devices stay
                    worst[name] = leaning, test, group, values
    return [_follow(*course) for course in worst.values()]


def _follow(leaning: float, test: GateTest, group: SampleGroup, values: NDArray[np.float64]) -> Course:
    counts, gate = _choose_counts(len(values)), test.gate
    counted = np.clip(values, gate.least, gate.most)
    estimates = np.maximum(counted.cumsum()[np.array(counts) - 1] / counts, 0.0)
    # The gate's own limit is one of the tried ones, so the line crosses it exactly when the gate stops.
    limits = [*np.geomspace(test.limit / 50, test.limit, _STEPS // 2)]
    scaled = test.scale(np.array([*limits, *np.linspace(test.limit, gate.most, _STEPS // 2)])).tolist()
    tried = sorted({limit for limit in scaled if limit >= _LEAST_LIMIT})
    refuted = find_refuted_limits(test.scale(values), counts, tried, find_needed(test, group))
    lows = np.maximum(gate.least + refuted * (gate.most - gate.least), 0.0)
    return Course(
        gate=gate,
        where=group.where,
        of_model=test.of_model,
        counts=counts,
        estimates=tuple(estimates.tolist()),
        lows=tuple(lows.tolist()),
        limit=test.limit,
        leaning=leaning,
        sentence=describe(test, values, group.where).sentence,
    )


def _choose_counts(most: int) -> tuple[int, ...]:
    """Return up to 48 numbers from 1 to `most`, closer at the beginning."""
    if most <= _POINTS:
        return tuple(range(1, most + 1))
    return tuple(sorted({round(math.exp(exponent)) for exponent in np.linspace(0, math.log(most), _POINTS)}))
