"""A number as an option of a command."""

import math
from typing import Any

import click


class NumberRange(click.FloatRange):
    """A finite number within a range. click's own type accepts NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number that an option states.

        Raises:
            click.BadParameter: the value is no finite number, or out of range.
        """
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number
