"""Synthetic images of text for PP-OCR's detector: seeded, drawn by Pillow with the font inside Pillow.

The pixels depend on Pillow's version (its font and rasteriser), so compare figures of one version only.
"""

import string
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

SIDE = 640
LETTERS = [*string.ascii_letters, *string.digits, *"    ,.-"]


def text_images(seeds: Iterable[int]) -> NDArray[np.float32]:
    """One image for each seed: float32 [images, 3, 640, 640], range -1..1."""
    pixels = np.stack([_draw(np.random.default_rng(seed)) for seed in seeds])
    return np.ascontiguousarray(((pixels.astype(np.float32) / 255 - 0.5) / 0.5).transpose(0, 3, 1, 2))


def _draw(rng: np.random.Generator) -> NDArray[np.uint8]:
    image = Image.fromarray(_paper(rng))
    for _ in range(int(rng.integers(8, 22))):
        font = ImageFont.load_default(int(rng.integers(14, 48)))
        text = "".join(rng.choice(LETTERS, int(rng.integers(3, 18))))
        ink = tuple(int(value) for value in rng.integers(0, 110, 3))
        corner = (int(rng.integers(0, SIDE - 150)), int(rng.integers(0, SIDE - 60)))
        layer = Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 0))
        ImageDraw.Draw(layer).text(corner, text, fill=(*ink, 255), font=font)
        if rng.random() < 0.3:
            layer = layer.rotate(float(rng.uniform(-12, 12)), center=(SIDE / 2, SIDE / 2))
        image.paste(layer, (0, 0), layer)
    return np.asarray(image)


def _paper(rng: np.random.Generator) -> NDArray[np.uint8]:
    """A light colour with a slight gradient and noise."""
    base = rng.integers(120, 256, 3)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    gradient = (rng.normal() * 20 * x + rng.normal() * 20 * y)[..., None]
    noise = rng.normal(0, 4, (SIDE, SIDE, 3))
    return np.asarray(np.clip(base + gradient + noise, 0, 255), np.uint8)
