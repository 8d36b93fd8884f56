"""The noise by which forms within a limit on transport are told apart."""

from pathlib import Path

import pytest
from tests.toolkit.package_run import mlp, samples, saved, stored

from edgekit_toolkit.evaluation.scoring import split_evaluation
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.pipeline.run import Run
from edgekit_toolkit.pipeline.search import search
from edgekit_toolkit.quantize.sensitivity import Fidelity, decibel
from edgekit_toolkit.selection.budget import parse_budget
from edgekit_toolkit.targets.loader import load_target

pytestmark = pytest.mark.usefixtures("home")
COUNT = 100
MEASURED = 32  # of the samples that choose


def search_within(budget: str, folder: Path) -> Run:
    request = Request(
        model=saved(mlp(batch=1), folder / "net.onnx"),
        target=load_target("rpi4"),
        budget=parse_budget(budget),
        name="net",
        version="1",
        calibration=stored(folder / "c.npz", samples(32, 1)),
        evaluation=stored(folder / "e.npz", samples(COUNT, 2)),
        threads=1,
        search_s=0,
    )
    return search(request, load_signer(), lambda *_: None)


def test_noise_within_a_limit_on_transport_is_measured_on_the_samples_that_choose(tmp_path: Path) -> None:
    run = search_within("transport=1MB", tmp_path)
    choosing = split_evaluation(COUNT, hold_back=True)[0][:MEASURED]
    x = samples(COUNT, 2)["x"]
    fidelity = Fidelity(
        run.quantizer.model,
        [{"x": x[index : index + 1]} for index in choosing],
        threads=1,
        softmax_axes=run.quantizer.softmax_axes(),
    )
    assert len(run.candidates) > 2
    for candidate in run.candidates[1:]:
        expected = decibel(fidelity.noise(candidate.model))
        assert candidate.measured.snr_db == pytest.approx(expected, abs=1e-6), candidate.label
        assert candidate.measured.snr_db != candidate.snr_db


@pytest.mark.parametrize("budget", ["", "transport=1B"])
def test_noise_without_forms_to_tell_apart_is_that_of_the_calibration_samples(
    budget: str, tmp_path: Path
) -> None:
    for candidate in search_within(budget, tmp_path).candidates:
        assert candidate.measured.snr_db == candidate.snr_db
