"""The watts that hold a temperature limit."""

from edgekit_runtime.power.governor.budget import Heat


def step(heat: Heat, temperature_c: float, most_w: float, at_s: float) -> Heat:
    return heat.step(70.0, temperature_c, (1.0, most_w), at_s, 1.0)


def test_cool_device_may_draw_all_that_its_settings_can_however_the_load_moves() -> None:
    heat = Heat()
    for second, most_w in enumerate((1.0, 2.0, 500.0, 2.0, 3.0, 40.0, 2.0)):
        heat = step(heat, 40.0, most_w, float(second))
        assert heat.budget_w == most_w


def test_hot_device_may_draw_the_least_and_a_device_at_its_limit_something_between() -> None:
    hot, warm = Heat(), Heat()
    for second in range(60):
        hot, warm = step(hot, 95.0, 8.0, float(second)), step(warm, 71.0, 8.0, float(second))
    assert hot.budget_w == 1.0
    assert warm.budget_w is not None and 1.0 < warm.budget_w < 8.0
