"""FLUX.2: dev (guidance embedded) and klein (4B and 9B, none), in Black Forest Labs' layout.

The layout is that of github.com/black-forest-labs/flux2 (`src/flux2/model.py`), which ComfyUI keeps. It has FLUX.1's
blocks with one modulation for all of them, which is what tells it from FLUX.1 and Chroma; FLUX.3 has modulations too,
but one for each mode. Heads' width stands in the norms. Constant in every published model: rotary theta 2000 and four
equal rotary axes, eps 1e-6, patches of one latent.
"""

from __future__ import annotations

from typing import Any

from ..source import Shapes
from .family import Family
from .reading import count, rotary_quarters, shape


def _recognises(shapes: Shapes) -> bool:
    return (
        "double_stream_modulation_img.lin.weight" in shapes
        and "single_stream_modulation.lin.weight" in shapes
    )


def _config(shapes: Shapes) -> dict[str, Any]:
    width, in_channels = shape(shapes, "img_in.weight")
    head = shape(shapes, "double_blocks.0.img_attn.norm.key_norm.scale")[0]
    out_channels = shape(shapes, "final_layer.linear.weight")[0]
    return {
        "patch_size": 1,
        "in_channels": in_channels,
        "out_channels": None if out_channels == in_channels else out_channels,
        "num_layers": count(shapes, "double_blocks."),
        "num_single_layers": count(shapes, "single_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shape(shapes, "txt_in.weight")[1],
        "timestep_guidance_channels": shape(shapes, "time_in.in_layer.weight")[1],
        "mlp_ratio": shape(shapes, "double_blocks.0.img_mlp.2.weight")[1] / width,
        "axes_dims_rope": rotary_quarters(head),
        "rope_theta": 2000,
        "eps": 1e-6,
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
    }


FLUX2 = Family("FLUX.2", "Flux2Transformer2DModel", _recognises, _config)

FAMILIES = (FLUX2,)
