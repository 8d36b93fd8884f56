"""A linear attacker rebuilds all of what is sent as it is, nothing of noise, and less behind later cuts."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from tests.toolkit.cases import cases

from edgekit_offload.planning.leakage import MAX_DB, MAX_FEATURES, measure_leakage
from edgekit_runtime.errors import CutError

SEED = 7
TINY = Path(__file__).parents[2] / "models/tiny"


def signals(count: int = 400, values: int = 64) -> NDArray[np.float32]:
    """Sums of a few waves: float32 [samples, values], so that a value says something about the others."""
    rng = np.random.default_rng(SEED)
    waves = np.sin(np.outer(np.arange(1, 9), np.arange(values)) / 10)
    return (rng.standard_normal((count, 8)) @ waves).astype(np.float32)


def test_input_sent_as_it_is_leaks_everything() -> None:
    inputs = np.random.default_rng(SEED).standard_normal((60, 16, 16, 3)).astype(np.float32)
    assert measure_leakage(inputs, [inputs]).lower_bound_db == MAX_DB


def test_permuted_and_scaled_input_leaks_everything_although_few_samples_are_known() -> None:
    inputs = np.random.default_rng(SEED).standard_normal((200, 512)).astype(np.float32)
    sent = 3 * inputs[:, np.random.default_rng(1).permutation(512)] + 5
    assert measure_leakage(inputs, [sent]).lower_bound_db > 90


def test_mixed_input_leaks_everything_where_enough_samples_are_known() -> None:
    inputs = signals()
    mixed = inputs @ np.random.default_rng(1).standard_normal((64, 64))
    found = measure_leakage(inputs, [mixed[:, :30], mixed[:, 30:] * 1e6])
    assert found.lower_bound_db > 50
    assert found.mean_db < 25


@pytest.mark.parametrize("kind", ["constant", "noise"])
def test_what_does_not_depend_on_the_input_leaks_nothing(kind: str) -> None:
    rng = np.random.default_rng(1)
    sent = np.full((400, 30), 2.5) if kind == "constant" else rng.standard_normal((400, 30))
    found = measure_leakage(signals(), [sent])
    # 0.5 dB: what a fit to 320 samples of noise may move the figure by, in either direction.
    assert found.lower_bound_db == pytest.approx(found.mean_db, abs=0.5)


def test_coarser_coding_leaks_less() -> None:
    inputs = signals()
    figures = [
        measure_leakage(inputs, [np.round(inputs / step) * step]).lower_bound_db for step in (0.01, 0.3, 3.0)
    ]
    assert figures[0] > figures[1] + 5 > figures[2] + 10


def test_wide_tensor_is_grouped_and_still_found() -> None:
    inputs = signals(count=200)
    wide = np.random.default_rng(1).standard_normal((64, 2 * MAX_FEATURES + 100))
    found = measure_leakage(inputs, [(inputs @ wide).astype(np.float32)])
    assert found.lower_bound_db > found.mean_db + 10
    assert (found.known_samples, found.held_out_samples) == (160, 40)


def test_figure_does_not_depend_on_the_unit_and_repeats() -> None:
    inputs = signals()
    sent = np.maximum(inputs @ np.random.default_rng(1).standard_normal((64, 20)), 0)
    first = measure_leakage(inputs, [sent])
    assert measure_leakage(inputs, [sent]) == first
    scaled = measure_leakage(inputs * 255 + 9, [sent * 1e-3])
    assert scaled.lower_bound_db == pytest.approx(first.lower_bound_db, abs=0.1)


def test_later_cuts_of_a_real_model_leak_less() -> None:
    model = onnx.load(TINY / "digits_cnn.onnx")
    with np.load(TINY / "digits_cnn.eval.npz") as samples:
        images = samples[model.graph.input[0].name].astype(np.float32)
    cuts = [node.output[0] for node in model.graph.node if node.op_type == "Relu"]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(cut) for cut in cuts)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    tensors = session.run(cuts, {model.graph.input[0].name: images})
    found = [measure_leakage(images, [tensor]) for tensor in tensors]
    assert found[0].lower_bound_db > found[-1].lower_bound_db + 3
    assert all(cut.lower_bound_db >= cut.mean_db for cut in found)


@cases(
    ("inputs", "sent", "message"),
    [
        (np.zeros((19, 4)), [np.zeros((19, 4))], "19 inputs"),
        (np.zeros((40, 4)), [np.zeros((39, 4))], "39 per sent tensor"),
        (np.zeros((40, 4)), [], "no tensors"),
        (np.ones((40, 4)), [np.ones((40, 4))], "all inputs are 1"),
        (np.arange(40.0).reshape(40, 1), [np.full((40, 1), np.nan)], "NaN"),
        (np.array([["a"]] * 40), [np.ones((40, 1))], "real numbers"),
    ],
)
def test_what_cannot_be_attacked_is_refused(
    inputs: NDArray[np.generic], sent: list[NDArray[np.generic]], message: str
) -> None:
    with pytest.raises(CutError, match=message):
        measure_leakage(inputs, sent)
