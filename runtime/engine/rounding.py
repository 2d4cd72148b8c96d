"""How far rounding alone moves a model's answer: noise of one rounding step on what every block hands on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def rounding_noise(model: nn.Module, dtype: torch.dtype, seed: int = 0) -> Iterator[None]:
    """While it is open, every block of a list of `model` rounds its answer once more, up or down at random.

    The error is half a unit in the last place of `dtype` at most, as of any operation. A divided model rounds in
    other places than a whole one (partial sums, other kernels), about so often and so far.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    step = torch.finfo(dtype).eps / 2

    def noisy(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(noisy, value))
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        factors = torch.rand(value.shape, generator=generator).mul_(2 * step).add_(1 - step)
        return (value.float() * factors.to(value.device)).to(value.dtype)

    blocks = [block for many in model.modules() if isinstance(many, nn.ModuleList) for block in many]
    handles = [block.register_forward_hook(lambda _m, _a, output: noisy(output)) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
