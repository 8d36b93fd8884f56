import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.sessions.litert.quantized import CODE_DTYPES, Quantization

SCALES = st.floats(2**-20, 2**10, width=32)


@st.composite
def quantizations(draw: st.DrawFn) -> Quantization:
    dtype = draw(st.sampled_from(CODE_DTYPES))
    limits = np.iinfo(dtype)
    return Quantization("x", dtype, draw(SCALES), draw(st.integers(limits.min, limits.max)))


@given(quantizations())
def test_every_code_survives_the_round_trip(quantization: Quantization) -> None:
    limits = np.iinfo(quantization.dtype)
    codes = np.arange(limits.min, limits.max + 1).astype(quantization.dtype)
    np.testing.assert_array_equal(quantization.encode(quantization.decode(codes)), codes)


@given(quantizations(), st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_every_value_gets_a_nearest_code(quantization: Quantization, values: list[float]) -> None:
    given_values = np.array(values, np.float32)
    limits = np.iinfo(quantization.dtype)
    low, high = quantization.decode(np.array([limits.min, limits.max], quantization.dtype))
    error = np.abs(quantization.decode(quantization.encode(given_values)) - np.clip(given_values, low, high))
    # Half a step, and what float32 loses where values are large against a step.
    assert (error <= quantization.scale * 0.5 + np.maximum(abs(low), abs(high)) * 2**-22).all()


@given(quantizations(), st.integers(0, 4))
def test_nan_is_refused_wherever_it_stands(quantization: Quantization, place: int) -> None:
    values = np.array([0, np.inf, -np.inf, 1, 2], np.float32)
    values[place] = np.nan
    with pytest.raises(DataError, match="holds NaN"):
        quantization.encode(values)


def test_arrays_without_axes_and_without_values_are_converted() -> None:
    quantization = Quantization("x", "int8", 0.5, 1)
    assert quantization.encode(np.array(2, np.float32)) == np.array(5, np.int8)
    assert quantization.encode(np.array(2, np.float32)).shape == ()
    assert quantization.decode(quantization.encode(np.zeros((0, 3), np.float32))).shape == (0, 3)


def test_the_callers_array_stays_as_it_is() -> None:
    values = np.array([0.3, 7.0], np.float32)
    Quantization("x", "int8", 0.5, 1).encode(values)
    np.testing.assert_array_equal(values, np.array([0.3, 7.0], np.float32))


@pytest.mark.parametrize(
    ("dtype", "scale", "zero_point"),
    [
        ("int32", 1, 0),
        ("int8", 0, 0),
        ("int8", -1, 0),
        ("int8", np.inf, 0),
        ("int8", 1, 128),
        ("uint8", 1, -1),
    ],
)
def test_what_nothing_can_be_computed_with_is_refused(dtype: str, scale: float, zero_point: int) -> None:
    with pytest.raises(BackendError, match="tensor 'x'"):
        Quantization("x", dtype, float(scale), zero_point)
