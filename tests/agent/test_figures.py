"""Figures for the gates, from the page of metrics that the service itself writes."""

from types import SimpleNamespace

import numpy as np
import pytest
from tests.service.test_drift import looked, new_drift

from edgekit_runtime.agent.documents import ModelFigures
from edgekit_runtime.agent.figures import read_figures
from edgekit_runtime.service.api.metrics_page import write_metrics
from edgekit_runtime.service.observability.metrics import LaneMetrics, ServiceMetrics
from edgekit_runtime.service.observability.prometheus import MetricFamily


def make_page(drift):
    lane, service = LaneMetrics("kws", "2.0.0"), ServiceMetrics()
    service.request_energy_j["kws", "2.0.0"] = 0.004
    manifest = SimpleNamespace(name="kws")
    served = SimpleNamespace(
        version="2.0.0",
        metrics=lane,
        trial=None,
        loaded=SimpleNamespace(manifest=manifest),
        to_json=lambda: {"drift": drift},
    )
    restarts = MetricFamily(
        "edgekit_worker_restarts_total",
        "counter",
        "Restarts.",
        (({"model": "kws", "version": "2.0.0"}, 3.0),),
    )
    return write_metrics([served], service, 0, {}, [restarts])


def test_page_of_the_service_becomes_figures():
    (found,) = read_figures(make_page(looked(new_drift(), 50, scale=255.0)))
    assert (found.model, found.version, found.requests, found.restarts) == ("kws", "2.0.0", 0, 3)
    assert found.energy_mj == pytest.approx(4.0)
    assert found.p50_ms is None
    assert found.drift is not None
    assert found.drift > 1.0


def test_version_without_a_reference_has_no_drift():
    (found,) = read_figures(make_page(None))
    assert found.drift is None


def test_answers_with_nan_to_finite_inputs_are_counted():
    drift = new_drift()
    looked(drift, 5)
    for inputs, outputs in ((0.5, np.nan), (np.nan, np.nan), (0.5, np.inf), (0.5, 1.0)):
        image = np.full((1, 3, 32, 32), inputs, np.float32)
        scores = np.full((1, 4), outputs, np.float32)
        picked = drift.pick_inputs({"image": image})
        drift.judge({"image": image}, {"logits": scores})
        drift.add(picked, {"logits": scores})
    (found,) = read_figures(make_page(drift.to_json()))
    assert (found.not_finite, found.looked_at) == (2, 9)


def test_agreement_of_a_trial_is_kept_after_it():
    tried = ModelFigures(model="kws", version="2.0.0", agreement=0.9, compared=50)
    other = ModelFigures(model="kws", version="1.0.0", agreement=0.8, compared=50)
    (found,) = read_figures(make_page(None), (other, tried))
    assert (found.agreement, found.compared) == (0.9, 50)
