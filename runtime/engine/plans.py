"""Which parameter of a transformer is split how under the tensor axis.

So far only upstream's own plans (diffusers `_tp_plan`) serve; a class without one is refused by the planner before
anything is loaded.
"""

from __future__ import annotations

import torch
from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs

from .tensor import Shard


def tensor_plan(model: torch.nn.Module, degree: int) -> dict[str, Shard]:
    """Parameter name -> how it is split over `degree` ranks. Works on a model without weights.

    Raises ValueError when a split block is not divisible by `degree`.
    """
    specs = resolve_tp_shard_specs(model, model._tp_plan, degree)
    return {
        name: Shard(dim=spec.dim, blocks=tuple(spec.block_sizes))
        for name, spec in specs.items()
        if spec.dim is not None and spec.block_sizes is not None
    }
