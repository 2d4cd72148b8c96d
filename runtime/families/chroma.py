"""Chroma1: FLUX.1's blocks without modulation of their own; a small network, the approximator, gives them all.

The layout is that of its author's trainer (github.com/lodestone-rock/flow), which ComfyUI keeps. The approximator
stands under `distilled_guidance_layer`, which is what tells it from FLUX.1. Chroma Radiance works on pixels.
Constant in every published model: rotary axes 16, 56 and 56 of a head's 128, an MLP of four widths.
"""

from __future__ import annotations

from typing import Any

from .family import Family, Shapes
from .reading import count, double_and_single_blocks, rotary_16_56_56, shape

_APPROXIMATOR = "distilled_guidance_layer"


def _recognises(shapes: Shapes) -> bool:
    return f"{_APPROXIMATOR}.in_proj.weight" in shapes and "double_blocks.0.img_attn.qkv.weight" in shapes


def _config(shapes: Shapes) -> dict[str, Any]:
    if any(key.startswith("nerf_") for key in shapes):
        raise ValueError("Chroma Radiance works on pixels, which diffusers' Chroma cannot")
    sizes = double_and_single_blocks(shapes)
    hidden, approximator_channels = shape(shapes, f"{_APPROXIMATOR}.in_proj.weight")
    return {
        **sizes,
        "axes_dims_rope": rotary_16_56_56(sizes["attention_head_dim"]),
        "approximator_num_channels": approximator_channels,
        "approximator_hidden_dim": hidden,
        "approximator_layers": count(shapes, f"{_APPROXIMATOR}.layers."),
    }


CHROMA = Family("Chroma1", "ChromaTransformer2DModel", _recognises, _config)

FAMILIES = (CHROMA,)
