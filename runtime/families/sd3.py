"""Stable Diffusion 3 medium, 3.5 large, large turbo and medium, in Stability's layout.

The layout is that of github.com/Stability-AI/sd3.5 (`mmditx.py`), which ComfyUI keeps. 3.5 norms queries and keys;
3.5 medium attends twice in its first blocks. The table of positions is part of the file. Constant in every published
model: heads of 64, as many as blocks (mmditx.py makes it so), and 128 latents along an edge by default.
"""

from __future__ import annotations

import math
from typing import Any

from .family import Family, Shapes
from .reading import count, shape


def _recognises(shapes: Shapes) -> bool:
    return {"joint_blocks.0.context_block.attn.qkv.weight", "x_embedder.proj.weight"} <= shapes.keys()


def _config(shapes: Shapes) -> dict[str, Any]:
    if any(key.startswith("context_processor.") for key in shapes):
        raise ValueError("its prompt passes through blocks of their own, which diffusers' SD3 has not")
    width, in_channels, patch, _ = shape(shapes, "x_embedder.proj.weight")
    norm = shapes.get("joint_blocks.0.x_block.attn.ln_q.weight")
    caption, joint = shape(shapes, "context_embedder.weight")
    positions = shape(shapes, "pos_embed")[1]
    depth = count(shapes, "joint_blocks.")
    head = norm[0] if norm else 64 if width % 64 == 0 else width // depth
    return {
        "sample_size": 128,
        "patch_size": patch,
        "in_channels": in_channels,
        "out_channels": shape(shapes, "final_layer.linear.weight")[0] // patch**2,
        "num_layers": depth,
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": joint,
        "caption_projection_dim": caption,
        "pooled_projection_dim": shape(shapes, "y_embedder.mlp.0.weight")[1],
        "pos_embed_max_size": math.isqrt(positions),
        "dual_attention_layers": tuple(
            block for block in range(depth) if f"joint_blocks.{block}.x_block.attn2.qkv.weight" in shapes
        ),
        "qk_norm": "rms_norm" if norm else None,
    }


SD3 = Family("Stable Diffusion 3 / 3.5", "SD3Transformer2DModel", _recognises, _config)

FAMILIES = (SD3,)
