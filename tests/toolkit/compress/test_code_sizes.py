"""Bytes of codes before a weight is rounded, and the steps for a number of bytes."""

import numpy as np
import pytest
from tests.toolkit.small_models import model_of, node, random_weight

from edgekit_toolkit.compress.code_sizes import MAX_STRENGTH, CodeSizes
from edgekit_toolkit.onnx_graph.layers import find_layers


@pytest.fixture(scope="module")
def sizes() -> CodeSizes:
    weight = random_weight(np.random.default_rng(0), 32, 64)
    nodes = [node("Gemm", ["x", "w"], ["h"], transB=1), node("Relu", ["h"], ["y"])]
    layers = find_layers(model_of(nodes, {"w": weight}, {"x": [1, 64]}))
    return CodeSizes(layers, {"w": weight}, {"h": 0.01}, peak=127)


@pytest.mark.parametrize("max_bytes", [300, 800, 1400])
def test_codes_of_the_strength_take_nearly_all_bytes(sizes: CodeSizes, max_bytes: int) -> None:
    size = sizes.at(sizes.find_strength(max_bytes))
    assert 0.85 * max_bytes <= size <= max_bytes  # all weights are of one layer, whose step is rounded


def test_bytes_that_no_codes_take_have_the_largest_strength(sizes: CodeSizes) -> None:
    assert sizes.find_strength(-1) == MAX_STRENGTH


def test_codes_of_equal_bits_take_less_than_these_bits(sizes: CodeSizes) -> None:
    assert 0.6 * 1024 < sizes.of_peak(7, 7) < 1024 < sizes.of_peak(127, 127) < 2048
