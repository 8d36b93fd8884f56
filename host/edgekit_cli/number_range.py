"""An option type for numbers."""

import math
from typing import Any

import click


class NumberRange(click.FloatRange):
    """A finite number within a range. Unlike click's own type, it refuses NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the number.

        Raises:
            click.BadParameter: The value is not a finite number, or out of range.
        """
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number
