"""Qwen-Image 2.1, in the authors' layout (diffusers' own) and in ComfyUI's, whose MLP is fused.

Heads' width stands in the norms. Constant, as in diffusers' class: patches of one latent, eps 1e-6, rotary axes 16, 56
and 56 of a head's 128, text that sees no later text.
"""

from __future__ import annotations

from typing import Any

from .family import Family, Shapes
from .reading import count, rotary_16_56_56, shape


def _recognises(shapes: Shapes) -> bool:
    return {"txt_in.text_norm.weight", "transformer_blocks.0.img_mlp.out.weight"} <= shapes.keys()


def _config(shapes: Shapes) -> dict[str, Any]:
    width, in_channels = shape(shapes, "img_in.weight")
    head = shape(shapes, "transformer_blocks.0.attn.norm_q.weight")[0]
    hidden = shape(shapes, "transformer_blocks.0.img_mlp.out.weight")[1]
    if hidden % width:
        raise ValueError(f"its MLP is {hidden} wide, which is no multiple of {width}")
    return {
        "patch_size": 1,
        "in_channels": in_channels,
        "out_channels": shape(shapes, "proj_out.weight")[0],
        "num_layers": count(shapes, "transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "context_in_dim": shape(shapes, "txt_in.in_layer.weight")[1],
        "mlp_ratio": hidden // width,
        "axes_dims_rope": rotary_16_56_56(head),
    }


QWEN_IMAGE_21 = Family("Qwen-Image 2.1", "QwenImage21Transformer2DModel", _recognises, _config)

FAMILIES = (QWEN_IMAGE_21,)
