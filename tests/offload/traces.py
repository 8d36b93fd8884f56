"""Synthetic bandwidth over time: Markov chains with stated statistics and a seed.

There are no recorded traces here: no package has traces that may be redistributed. So these stand for a kind
of link, not for a place: each state draws its bandwidth from a log-normal distribution around its median,
once a second. Video streaming research models measured mobile links by such chains; the figures of the states
here are chosen, not fitted. Label results on them `synthetic trace`.

Source: Yin, Jindal, Sekar, Sinopoli, "A control-theoretic approach for dynamic adaptive video streaming over
HTTP", SIGCOMM 2015, section 7.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from edgekit_runtime.errors import ConfigError

STEP_S: Final = 1.0
_DOWN_FACTOR: Final = 2.0  # mobile links carry more to the device than from it


@dataclass(frozen=True, slots=True)
class TraceState:
    """One state of a link.

    Attributes:
        median_mbit_s: median bandwidth of the upload; 0 is a link that is down.
        spread: standard deviation of the natural logarithm of the bandwidth.
        rtt_ms: round trip of a small message.
        stay_s: mean duration of the state, at least 1 s.
    """

    median_mbit_s: float
    spread: float
    rtt_ms: float
    stay_s: float


@dataclass(frozen=True, slots=True)
class TraceStep:
    """The link during one second.

    Attributes:
        at_s: begin of the second.
        up_mbit_s, down_mbit_s: bandwidths; 0 while the link is down.
        rtt_ms: round trip of a small message.
    """

    at_s: float
    up_mbit_s: float
    down_mbit_s: float
    rtt_ms: float


@dataclass(frozen=True, slots=True)
class TraceKind:
    """A Markov chain of a link: from a state, it moves to each neighbour with the same probability.

    Attributes:
        states: the states; neighbours are next to each other.
    """

    states: tuple[TraceState, ...]


TRACE_KINDS: Final[Mapping[str, TraceKind]] = MappingProxyType(
    {
        "4g": TraceKind(
            (TraceState(2, 0.35, 70, 12), TraceState(8, 0.3, 50, 20), TraceState(20, 0.25, 40, 15))
        ),
        "wifi": TraceKind((TraceState(4, 0.5, 15, 6), TraceState(40, 0.2, 5, 40))),
        "train": TraceKind(
            (TraceState(0, 0, 80, 8), TraceState(1, 0.5, 90, 10), TraceState(10, 0.4, 60, 25))
        ),
    }
)
"""`train` has tunnels, in which the link is down."""


def make_trace(kind: str, seconds: int, *, seed: int) -> tuple[TraceStep, ...]:
    """Return a trace, one step for each second; the same seed makes the same trace.

    Args:
        kind: one of `TRACE_KINDS`.
        seconds: length of the trace.
        seed: seed of the random numbers.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind not in TRACE_KINDS:
        raise ConfigError(f"trace '{kind}' is unknown; expected one of {', '.join(TRACE_KINDS)}")
    states, draws = TRACE_KINDS[kind].states, np.random.default_rng(seed)
    place, steps = len(states) - 1, []
    for second in range(seconds):
        state = states[place]
        up_mbit_s = state.median_mbit_s * float(np.exp(state.spread * draws.standard_normal()))
        steps.append(TraceStep(second * STEP_S, up_mbit_s, up_mbit_s * _DOWN_FACTOR, state.rtt_ms))
        if draws.random() < STEP_S / state.stay_s:
            neighbours = [one for one in (place - 1, place + 1) if 0 <= one < len(states)]
            place = neighbours[int(draws.integers(len(neighbours)))]
    return tuple(steps)


def time_share(kind: str) -> tuple[float, ...]:
    """Return the share of a long trace that each state has.

    The chain only moves between neighbours, so in balance each pair exchanges as much both ways.
    """
    states = TRACE_KINDS[kind].states
    last = len(states) - 1
    # How often a state is left for one given neighbour, in each second that it lasts.
    rates = [1 / state.stay_s / (1 if place in (0, last) else 2) for place, state in enumerate(states)]
    weights = [1.0]
    for place in range(last):
        weights.append(weights[-1] * rates[place] / rates[place + 1])
    return tuple(weight / sum(weights) for weight in weights)
