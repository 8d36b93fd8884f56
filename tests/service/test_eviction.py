import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekit_runtime.service.models.eviction import MemoryCapError, Resident, choose_evictions


def test_what_fits_evicts_nothing() -> None:
    assert choose_evictions([Resident("a", 60, 1.0)], 40, 100) == ()


def test_the_least_recently_used_goes_first() -> None:
    models = [Resident("new", 30, 9.0), Resident("old", 30, 1.0), Resident("middle", 30, 5.0)]
    assert [m.name for m in choose_evictions(models, 30, 100)] == ["old"]
    assert [m.name for m in choose_evictions(models, 60, 100)] == ["old", "middle"]


def test_pinned_and_busy_models_stay() -> None:
    models = [
        Resident("pinned", 30, 1.0, is_pinned=True),
        Resident("busy", 30, 2.0, is_busy=True),
        Resident("idle", 30, 3.0),
    ]
    assert [m.name for m in choose_evictions(models, 30, 100)] == ["idle"]


def test_a_small_old_model_stays_where_a_larger_one_must_go_anyway() -> None:
    models = [Resident("small", 5, 1.0), Resident("large", 60, 2.0)]
    assert [m.name for m in choose_evictions(models, 50, 70)] == ["large"]


def test_busy_models_in_the_way_are_told_to_try_again() -> None:
    models = [Resident("busy", 60, 1.0, is_busy=True)]
    with pytest.raises(MemoryCapError, match="busy, try again") as caught:
        choose_evictions(models, 60, 100, retry_after_s=2.0)
    assert caught.value.retry_after_s == 2.0


def test_pinned_models_in_the_way_are_named() -> None:
    with pytest.raises(MemoryCapError, match=r"20 are missing.*unpin one of \['p'\]") as caught:
        choose_evictions([Resident("p", 60, 1.0, is_pinned=True)], 60, 100)
    assert caught.value.retry_after_s is None


def test_a_model_larger_than_the_cap_is_told_so() -> None:
    with pytest.raises(MemoryCapError, match=r"raise the cap$"):
        choose_evictions([Resident("a", 60, 1.0)], 101, 100)


MODELS = st.lists(
    st.builds(
        Resident,
        st.uuids().map(str),
        st.integers(0, 50),
        st.floats(0, 10),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
)


@given(MODELS, st.integers(0, 100), st.integers(1, 150))
def test_evictions_suffice_touch_no_pinned_or_busy_model_and_hold_none_that_could_stay(
    models: list[Resident], needed: int, cap: int
) -> None:
    total = sum(m.size_bytes for m in models) + needed
    free_bytes = sum(m.size_bytes for m in models if not m.is_pinned and not m.is_busy)
    try:
        chosen = choose_evictions(models, needed, cap)
    except MemoryCapError:
        assert total - free_bytes > cap
        return
    left = total - sum(m.size_bytes for m in chosen)
    assert left <= cap
    assert not any(m.is_pinned or m.is_busy for m in chosen)
    assert all(left + m.size_bytes > cap for m in chosen)
