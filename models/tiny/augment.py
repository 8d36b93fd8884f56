"""Random changes of a training batch that keep its labels; all randomness comes from the generator."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Augment = Callable[[Tensor, torch.Generator], Tensor]


def affine(*, rotation_deg: float, scale: float, shear: float, shift: float) -> Augment:
    """Turns, stretches, slants and moves every image [N, C, H, W] by up to the given amounts.

    Args:
        rotation_deg: Degrees to either side.
        scale: Relative stretch of each axis on its own.
        shear: Slant as a share of the height.
        shift: Movement as a share of half the width or height.
    """

    def apply(x: Tensor, generator: torch.Generator) -> Tensor:
        def uniform(limit: float) -> Tensor:
            return (torch.rand(len(x), generator=generator) * 2 - 1) * limit

        angle = torch.deg2rad(uniform(rotation_deg))
        cos, sin = angle.cos(), angle.sin()
        rows = (
            torch.stack([cos * (1 + uniform(scale)), uniform(shear) - sin, uniform(shift)], dim=1),
            torch.stack([sin, cos * (1 + uniform(scale)), uniform(shift)], dim=1),
        )
        grid = functional.affine_grid(torch.stack(rows, dim=1), list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, align_corners=False)

    return apply


def jitter(*, noise: float, offset: float) -> Augment:
    """Adds noise to every frame, and an offset to every channel, of series [N, channels, frames].

    Both are standard deviations, as shares of the channel's own over the batch. A constant offset
    of a cepstrum is what another microphone or room adds. Padded frames (all zero) stay zero.
    """

    def apply(x: Tensor, generator: torch.Generator) -> Tensor:
        spread = x.std(dim=(0, 2), keepdim=True)
        padded = (x == 0).all(dim=1, keepdim=True)
        noisy = x + spread * noise * torch.randn(x.shape, generator=generator)
        noisy = noisy + spread * offset * torch.randn((*x.shape[:2], 1), generator=generator)
        return noisy.masked_fill(padded, 0.0)

    return apply
