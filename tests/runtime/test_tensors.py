import numpy as np
import pytest

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import DTYPES, TensorSpec

SPEC = TensorSpec("x", "float32", ("N", 4))


@pytest.mark.parametrize("batch", [0, 1, 7])
def test_any_size_of_a_named_dimension_fits(batch: int) -> None:
    assert SPEC.check(np.zeros((batch, 4), np.float32)) is None


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((1, 4), np.float64), "float64|<f8"),
        (np.zeros((1, 4), ">f4"), ">f4"),
        (np.zeros((1, 5), np.float32), r"\[1, 5\]"),
        (np.zeros(4, np.float32), r"\[4\]"),
        (np.zeros((1, 1, 4), np.float32), r"\[1, 1, 4\]"),
        ([[0.0, 0.0, 0.0, 0.0]], "list"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_with_what_it_is(array: object, reason: str) -> None:
    with pytest.raises(DataError, match=f"'x'.*({reason})"):
        SPEC.check(array)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "reason"),
    [
        ("", "float32", (1,), "name is ''"),
        (7, "float32", (1,), "name is 7"),
        ("x", "float31", (1,), "dtype is 'float31'"),
        ("x", ["float32"], (1,), "dtype is \\['float32'\\]"),
        ("x", "float32", [1], "shape must be a tuple"),
        ("x", "float32", (1,) * 33, "at most 32 dimensions"),
        ("x", "float32", (-1,), "has dimension -1"),
        ("x", "float32", (True,), "has dimension True"),
        ("x", "float32", (1.0,), "has dimension 1.0"),
        ("x", "float32", ("",), "has dimension ''"),
    ],
)
def test_a_malformed_spec_is_refused_with_what_is_wrong(
    name: object, dtype: object, shape: object, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        TensorSpec(name, dtype, shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_spec_survives_json_with_its_unknown_fields(dtype: str) -> None:
    json = {"name": "x", "dtype": dtype, "shape": ["N", 3], "layout": "NHWC"}
    assert TensorSpec.from_json(json).to_json() == json


def test_a_json_spec_without_a_dtype_names_the_field() -> None:
    with pytest.raises(DataError, match="here: field 'dtype' is missing"):
        TensorSpec.from_json({"name": "x", "shape": []}, "here", DataError)


def test_size_is_known_only_without_free_dimensions() -> None:
    assert (SPEC.size_bytes, TensorSpec("x", "int64", (2, 3)).size_bytes) == (None, 48)
