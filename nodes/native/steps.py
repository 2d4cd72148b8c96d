"""Which step a stock sampler makes: it does not say so, but hands down the noise levels of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def step_of(options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Which step a sampler makes, from 0, and of how many, by the noise levels that ComfyUI hands down; None without.

    A sampler that looks at levels between two steps is in the earlier of them.
    """
    levels, level = options.get("sample_sigmas"), options.get("sigmas")
    if not isinstance(levels, torch.Tensor) or not isinstance(level, torch.Tensor):
        return None
    if levels.ndim != 1 or len(levels) < 2 or not level.numel():
        return None
    noise, now = levels.tolist(), float(level.max())
    if noise[0] <= noise[-1]:
        return None  # noise is put in, not taken out
    begun = sum(one >= now * (1 - 1e-4) for one in noise)  # the level may be rounded
    return min(max(begun - 1, 0), len(levels) - 2), len(levels) - 1
