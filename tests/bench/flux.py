"""The FLUX.1 of the benchmarks: FLUX's shape at a sixth of its width, with random weights."""

from __future__ import annotations

from pathlib import Path

import diffusers
import torch

from tests.support.models import randomise


def write_flux(folder: Path, double_blocks: int, single_blocks: int) -> None:
    """Write its transformer folder, the same on every call."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        num_layers=double_blocks,
        num_single_layers=single_blocks,
        num_attention_heads=8,
        attention_head_dim=64,
        axes_dims_rope=(16, 24, 24),
        joint_attention_dim=256,
        pooled_projection_dim=64,
    )
    randomise(model)
    model.save_pretrained(folder)
