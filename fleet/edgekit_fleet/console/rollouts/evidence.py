"""The course of a rollout's gates: their evidence after each answer, and how close they are to a stop.

A gate tests whether a mean is above a limit (see `edgekit_fleet.rollouts.betting`). The largest limit that
the answers refute is a lower bound of the mean. With a confidence of 1 - alpha, the bound is correct during
the whole rollout. The rollout stops when the bound reaches the gate's own limit.
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
        where: The text ` of class NAME` if the evidence against the release is strongest for one device
            class, or an empty text if it is strongest for all devices together.
        of_model: The text ` of MODEL` with the model for which the evidence is strongest, or an empty text if
            there is only one model.
        counts: The x values of the curves, which are numbers of devices in rising order.
        estimates: The mean over the first devices, for each number in `counts`. An improvement is shown as no
            change.
        lows: The lower bound of each mean, or 0 if there is no bound yet.
        limit: The limit at which the rollout stops. It has the same unit as `estimates` and `lows`.
        leaning: The strength of the evidence, from 0 to 1. At 1, the gate stops the rollout.
        sentence: The current result of the gate, in words.
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
        """Whether the gate stops the rollout."""
        return self.leaning >= 1.0


def find_courses(
    samples: Sequence[Sample], limits: Mapping[str, float], models: Sequence[str]
) -> list[Course]:
    """Return the course of each gate that has answers.

    For each gate, the device group and model with the strongest evidence against the release are used.

    Args:
        samples: The samples, in the order of the devices' first answers. Samples without an answer follow.
        limits: The limits of the rollout, by name.
        models: The names of the models of the release.
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
