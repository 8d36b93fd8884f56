"""The golden ratio, used to select a share of the calls at even intervals."""

from typing import Final

# Part of a fraction of the golden ratio: its multiples, less their whole parts, fill 0..1 evenly, and so does
# every k-th of them, so that two clients that take turns get the same share of the chosen calls each.
GOLDEN: Final = 0.6180339887498949
