"""Mochi 1 preview, in Genmo's layout.

The layout is that of github.com/genmoai/mochi (`dit/joint_model/asymm_models_joint.py`), which ComfyUI keeps. Heads'
width stands in the norms. Constant: SwiGLU, texts of 256 tokens, and 48 blocks, the only number that diffusers'
converter knows (the last block has no text side, so it must know which one is the last).
"""

from __future__ import annotations

from typing import Any

from .family import Family, Shapes
from .reading import count, shape

_BLOCKS = 48


def _recognises(shapes: Shapes) -> bool:
    return {"t5_yproj.weight", "blocks.0.attn.qkv_x.weight", "pos_frequencies"} <= shapes.keys()


def _config(shapes: Shapes) -> dict[str, Any]:
    if count(shapes, "blocks.") != _BLOCKS:
        raise ValueError(f"it has {count(shapes, 'blocks.')} blocks, and diffusers converts {_BLOCKS} only")
    width, in_channels, patch, _ = shape(shapes, "x_embedder.proj.weight")
    head = shape(shapes, "blocks.0.attn.q_norm_x.weight")[0]
    pooled, text = shape(shapes, "t5_yproj.weight")
    out_channels = shape(shapes, "final_layer.linear.weight")[0] // patch**2
    return {
        "patch_size": patch,
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "num_layers": _BLOCKS,
        "pooled_projection_dim": pooled,
        "in_channels": in_channels,
        "out_channels": None if out_channels == in_channels else out_channels,
        "text_embed_dim": text,
        "time_embed_dim": shape(shapes, "t_embedder.mlp.0.weight")[1],
        "max_sequence_length": 256,
    }


MOCHI = Family("Mochi 1", "MochiTransformer3DModel", _recognises, _config)

FAMILIES = (MOCHI,)
