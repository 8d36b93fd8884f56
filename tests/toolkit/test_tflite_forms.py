"""Forms: the same elements in another order of axes, checked with numpy."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.toolkit.cases import cases

from edgekit_toolkit.tflite.layout.forms import (
    NEW,
    Form,
    Shape,
    broadcast_form,
    channels_last,
    complete,
    conversion_cost,
    core,
    held_shape,
    plain,
    reshaped,
    without_axes,
)

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def held(value: np.ndarray[Shape, np.dtype[np.int64]], form: Form) -> np.ndarray[Shape, np.dtype[np.int64]]:
    """An array as it is held in a form."""
    return value.transpose([axis for axis in form if axis != NEW]).reshape(held_shape(form, value.shape))


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[Shape, Shape, Form]:
    """A shape, one with as many elements, and a form of the first."""
    pieces = draw(SIZES)
    before, after = [list(pieces), list(pieces)]
    for shape in (before, after):
        for _ in range(draw(st.integers(0, 2))):
            if len(shape) > 1:
                place = draw(st.integers(0, len(shape) - 2))
                shape[place : place + 2] = [shape[place] * shape[place + 1]]
    form = draw(st.permutations(range(len(before))))
    return tuple(before), tuple(after), tuple(form)


@given(reshapes())
def test_a_reshaped_form_holds_the_same_bytes(case: tuple[Shape, Shape, Form]) -> None:
    before, after, form = case
    result = reshaped(form, before, after)
    assume(result is not None)  # hypothesis complains where that leaves too few
    value = np.arange(int(np.prod(before))).reshape(before)
    expected = held(value, form).reshape(-1)
    np.testing.assert_array_equal(held(value.reshape(after), result).reshape(-1), expected)


@given(reshapes())
def test_the_form_of_onnx_can_always_be_reshaped(case: tuple[Shape, Shape, Form]) -> None:
    before, after, _ = case
    assert reshaped(plain(len(before)), before, after) is not None


@given(SIZES, st.data())
def test_equal_cores_are_equal_bytes(sizes: list[int], data: st.DataObject) -> None:
    shape = tuple(sizes)
    first, second = (tuple(data.draw(st.permutations(range(len(shape))))) for _ in range(2))
    value = np.arange(int(np.prod(shape))).reshape(shape)
    alike = np.array_equal(held(value, first).reshape(-1), held(value, second).reshape(-1))
    assert alike == (core(first, shape) == core(second, shape))


def test_costs_rank_nothing_under_a_reshape_under_a_transposition() -> None:
    shape = (2, 6, 7, 5)
    assert conversion_cost(plain(4), plain(4), shape) == 0
    reshape = conversion_cost((0, NEW, 1), (0, 1), (2, 6))
    assert 0 < reshape < conversion_cost((0, 1), (1, 0), (2, 6))


@cases(
    ("form", "rank", "expected"),
    [
        ((0, 2, 3, 1), 4, (0, 2, 3, 1)),
        ((0, 2, 3, 1), 3, (1, 2, 0)),
        ((0, 2, 3, 1), 1, (0, NEW)),
        ((0, 2, 3, 1), 0, ()),
        ((0, NEW, 2, 1), 2, (1, 0)),
    ],
)
def test_smaller_operands_take_the_axes_that_onnx_aligns(form: Form, rank: int, expected: Form) -> None:
    assert broadcast_form(form, rank) == expected


def test_axes_that_go_renumber_those_that_stay() -> None:
    assert without_axes((0, 2, 3, 1), (2, 3)) == (0, 1)
    assert without_axes((0, NEW, 2, 1), (1,)) == (0, NEW, 1)


def test_missing_axes_are_put_behind_their_predecessors() -> None:
    assert complete((2, 0), 4) == (2, 3, 0, 1)
    assert channels_last(3) == (0, NEW, 2, 1)
    assert channels_last(5) == (0, 2, 3, 4, 1)
