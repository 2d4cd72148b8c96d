"""Qwen-Image, its Edit models and Layered: the original layout is diffusers' own.

ComfyUI marks Edit 2511, which sees its reference pictures at time zero, by an empty `__index_timestep_zero__`; no
weight tells it from Edit 2509. Layered has an embedding more, and rotary positions for layers. Constant in every
published model: patches of 2x2, rotary axes 16, 56 and 56 of a head's 128.
"""

from __future__ import annotations

from typing import Any

from .family import Family, Shapes
from .reading import count, rotary_16_56_56, shape

_AT_TIME_ZERO = "__index_timestep_zero__"
_PATCH = 2


def _recognises(shapes: Shapes) -> bool:
    return {
        "txt_norm.weight",
        "img_in.weight",
        "transformer_blocks.0.img_mod.1.weight",
        "transformer_blocks.0.attn.norm_added_q.weight",
    } <= shapes.keys()


def _config(shapes: Shapes) -> dict[str, Any]:
    width, in_channels = shape(shapes, "img_in.weight")
    head = shape(shapes, "transformer_blocks.0.attn.norm_q.weight")[0]
    layered = "time_text_embed.addition_t_embedding.weight" in shapes
    return {
        "patch_size": _PATCH,
        "in_channels": in_channels,
        "out_channels": shape(shapes, "proj_out.weight")[0] // _PATCH**2,
        "num_layers": count(shapes, "transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shape(shapes, "txt_in.weight")[1],
        "guidance_embeds": False,
        "axes_dims_rope": rotary_16_56_56(head),
        "zero_cond_t": _AT_TIME_ZERO in shapes,
        "use_additional_t_cond": layered,
        "use_layer3d_rope": layered,
    }


QWEN_IMAGE = Family(
    "Qwen-Image",
    "QwenImageTransformer2DModel",
    _recognises,
    _config,
    unused=(_AT_TIME_ZERO,),
    diffusers_names=True,
)

FAMILIES = (QWEN_IMAGE,)
