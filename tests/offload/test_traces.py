"""Synthetic traces of bandwidth: their statistics are those that are stated."""

import numpy as np
import pytest
from tests.offload.traces import TRACE_KINDS, make_trace, time_share

from edgekit_runtime.errors import ConfigError


@pytest.mark.parametrize("kind", TRACE_KINDS)
def test_long_trace_has_the_stated_statistics(kind: str) -> None:
    trace = make_trace(kind, 40_000, seed=1)
    for state, share in zip(TRACE_KINDS[kind].states, time_share(kind), strict=True):
        steps = [step.up_mbit_s for step in trace if step.rtt_ms == state.rtt_ms]
        # 40,000 s hold over 1,000 visits of each state: the shares are good to about 3 %.
        assert len(steps) / len(trace) == pytest.approx(share, rel=0.1)
        assert np.median(steps) == pytest.approx(state.median_mbit_s, rel=0.03)
        if state.median_mbit_s:
            assert np.std(np.log(steps)) == pytest.approx(state.spread, rel=0.05)


def test_same_seed_makes_the_same_trace() -> None:
    assert make_trace("4g", 60, seed=3) == make_trace("4g", 60, seed=3)
    assert make_trace("4g", 60, seed=3) != make_trace("4g", 60, seed=4)


def test_train_goes_through_tunnels() -> None:
    assert 0 < sum(step.up_mbit_s == 0 for step in make_trace("train", 600, seed=0)) < 600


def test_unknown_trace_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="expected one of 4g, wifi, train"):
        make_trace("5g", 10, seed=0)
