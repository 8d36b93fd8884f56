"""Positions the texts of a plot so that they do not overlap. This module only computes."""

import math
from dataclasses import dataclass, field

# Size of the plot's font, rather too large; and the free space on either side of a text.
_CHAR_WIDTH, _LINE_HEIGHT, _GAP = 7.2, 14.0, 2.0
_Box = tuple[float, float, float, float]
# Places of a label relative to its point, best first: beside it, then on wider and wider rings.
_NEAR = (
    (13.0, 4.0),
    (-13.0, 4.0),
    (11.0, -9.0),
    (-11.0, -9.0),
    (11.0, 17.0),
    (-11.0, 17.0),
    (0.0, -15.0),
    (0.0, 23.0),
)
_RINGS = tuple(
    (radius * math.cos(math.pi * step / 8), 4 - 0.8 * radius * math.sin(math.pi * step / 8))
    for radius in (28, 44, 62, 82, 104, 128)
    for step in range(16)
)
_ABOVE, _BELOW = -5.0, 14.0


@dataclass(frozen=True, slots=True)
class Spot:
    """The left end of a text's baseline. If `near` is False, the text needs a line to its point."""

    x: float
    y: float
    near: bool = True


@dataclass(slots=True)
class Room:
    """A frame with the boxes that are occupied in it, each as (left, top, right, bottom)."""

    left: float
    right: float
    top: float
    bottom: float
    occupied: list[_Box] = field(default_factory=list)

    def take_point(self, x: float, y: float, reach: float) -> None:
        """Occupy the box around a point, which extends `reach` to each side."""
        self.occupied.append((x - reach, y - reach, x + reach, y + reach))

    def place_label(self, text: str, px: float, py: float) -> Spot | None:
        """Find and occupy a position for the label of the point (px, py). Return None if none is free."""
        for dx, dy in (*_NEAR, *_RINGS):
            box = _box(px + dx, py + dy, text, dx)
            if self._is_free(box):
                self.occupied.append(box)
                return Spot(box[0] + _GAP, py + dy, near=(dx, dy) in _NEAR)
        return None

    def place_line_text(self, text: str, y: float, *, below: bool) -> Spot:
        """Find and occupy a position for the text of a horizontal line, below or above the line.

        `below` says which side to try first. If no position is free, the text goes to the left end on this
        side.
        """
        sides = (_BELOW, _ABOVE) if below else (_ABOVE, _BELOW)
        ends = ((self.left + 5, 2.0), (self.right - 5, -2.0), ((self.left + self.right) / 2, 0.0))
        boxes = [(_box(x, y + dy, text, dx), dy) for x, dx in ends for dy in sides]
        box, dy = next((candidate for candidate in boxes if self._is_free(candidate[0])), boxes[0])
        self.occupied.append(box)
        return Spot(box[0] + _GAP, y + dy)

    def _is_free(self, box: _Box) -> bool:
        inside = self.left <= box[0] and box[2] <= self.right + 6
        inside = inside and self.top - 12 <= box[1] and box[3] <= self.bottom
        return inside and not any(_overlap(box, other) for other in self.occupied)


def _box(x: float, y: float, text: str, dx: float) -> _Box:
    """Return the box of a text to the right of `x` (dx over 1), to the left (dx under -1) or centred."""
    width = _CHAR_WIDTH * len(text)
    left_edge = x if dx > 1 else x - width if dx < -1 else x - width / 2
    return left_edge - _GAP, y - _LINE_HEIGHT + 3, left_edge + width + _GAP, y + 3


def _overlap(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
