"""The golden ratio, used to select a share of the calls at even intervals."""

from typing import Final

# The fractional part of the golden ratio. The fractional parts of its multiples fill 0..1 evenly, and so does
# every k-th of them. Two clients that take turns thus get the same share of the chosen calls.
GOLDEN: Final = 0.6180339887498949
