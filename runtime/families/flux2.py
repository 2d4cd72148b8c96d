"""FLUX.2: dev (guidance embedded) and klein (4B and 9B, none), in Black Forest Labs' layout.

The layout is that of github.com/black-forest-labs/flux2 (`src/flux2/model.py`), which ComfyUI keeps. It has FLUX.1's
blocks with one modulation for all of them, which is what tells it from FLUX.1 and Chroma; FLUX.3 has modulations too,
but one for each mode. Heads' width stands in the norms. Constant in every published model: rotary theta 2000 and four
equal rotary axes, eps 1e-6, patches of one latent.
"""

from __future__ import annotations

from typing import Any

from .family import Family, Shapes
from .reading import double_and_single_blocks, rotary_quarters, shape


def _recognises(shapes: Shapes) -> bool:
    return (
        "double_stream_modulation_img.lin.weight" in shapes
        and "single_stream_modulation.lin.weight" in shapes
    )


def _config(shapes: Shapes) -> dict[str, Any]:
    sizes = double_and_single_blocks(shapes)
    width = sizes["attention_head_dim"] * sizes["num_attention_heads"]
    return {
        **sizes,
        "timestep_guidance_channels": shape(shapes, "time_in.in_layer.weight")[1],
        "mlp_ratio": shape(shapes, "double_blocks.0.img_mlp.2.weight")[1] / width,
        "axes_dims_rope": rotary_quarters(sizes["attention_head_dim"]),
        "rope_theta": 2000,
        "eps": 1e-6,
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
    }


FLUX2 = Family("FLUX.2", "Flux2Transformer2DModel", _recognises, _config)

FAMILIES = (FLUX2,)
