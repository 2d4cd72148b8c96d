"""Wan 2.2 Animate and Wan Animate 2: Wan's blocks with a face adapter, and blocks that attend to a reference video.

Animate's layout is that of github.com/Wan-Video/Wan2.2 (`wan/modules/animate`): Wan's keys, and `pose_patch_embedding`,
`motion_encoder.{enc,dec}`, `face_encoder` and `face_adapter.fuser_blocks.N`. Its heads' width stands in the face
adapter's norms. Animate 2 (layout of the converter in diffusers) has `blocks.N.block.*` in place of `blocks.N.*`.
"""

from __future__ import annotations

import math
from typing import Any

from .family import Family, Shapes
from .reading import count, head_width, shape
from .wan import is_wan, wan_config

_CONVS = "motion_encoder.enc.net_app.convs."

# diffusers' table of the motion encoder's channels by picture size, which `None` stands for in its config.
_PUBLISHED_CHANNELS = {"4": 512, "8": 512, "16": 512, "32": 512, "64": 256, "128": 128, "256": 64, "512": 32}


def _is_animate(shapes: Shapes) -> bool:
    return is_wan(shapes) and "face_adapter.fuser_blocks.0.q_norm.weight" in shapes


def _is_animate_2(shapes: Shapes) -> bool:
    return "head.modulation" in shapes and "blocks.0.block.self_attn.q.weight" in shapes


def _motion_config(shapes: Shapes) -> dict[str, Any]:
    """The motion encoder: each of its residual blocks halves the picture, down to 4 x 4."""
    blocks = count(shapes, _CONVS) - 2  # the first and last convolutions are single
    channels = {str(4 << blocks): shape(shapes, f"{_CONVS}0.0.weight")[0]}
    for block in range(1, blocks + 1):
        channels[str(4 << (blocks - block))] = shape(shapes, f"{_CONVS}{block}.conv2.1.weight")[0]
    motion_width, motion_dim = shape(shapes, "motion_encoder.dec.direction.weight")
    as_published = channels.items() <= _PUBLISHED_CHANNELS.items()
    return {
        "motion_encoder_channel_sizes": None if as_published else channels,
        "motion_encoder_size": 4 << blocks,
        "motion_style_dim": shape(shapes, "motion_encoder.enc.fc.0.weight")[0],
        "motion_dim": motion_dim,
        "motion_encoder_dim": motion_width,
    }


def _animate_config(shapes: Shapes) -> dict[str, Any]:
    """Faces enter at blocks 0, n, 2n, ...: every 5th of 40. diffusers' converter knows 512 x 512 faces only."""
    config, motion = wan_config(shapes), _motion_config(shapes)
    if motion["motion_encoder_size"] != 512:
        raise ValueError(
            f"its motion encoder takes faces of {motion['motion_encoder_size']} pixels; only 512 is known"
        )
    layers, adapters = config["num_layers"], count(shapes, "face_adapter.fuser_blocks.")
    if layers % adapters:
        raise ValueError(
            f"which of the {layers} blocks the {adapters} face adapters belong to cannot be told"
        )
    width = shape(shapes, "patch_embedding.weight")[0]
    head = shape(shapes, "face_adapter.fuser_blocks.0.q_norm.weight")[0]
    face_width = shape(shapes, "face_encoder.conv2.conv.weight")[0]
    return {
        **config,
        **motion,
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "latent_channels": shape(shapes, "pose_patch_embedding.weight")[1],
        "face_encoder_hidden_dim": face_width,
        "face_encoder_num_heads": shape(shapes, "face_encoder.conv1_local.conv.weight")[0] // face_width,
        "inject_face_latents_blocks": layers // adapters,
    }


def _animate_2_config(shapes: Shapes) -> dict[str, Any]:
    """Heads are 128 wide, texts 512 tokens long, and the reference's rotary offsets are those of diffusers' class."""
    width, in_channels, *patch = shape(shapes, "patch_embedding.weight")
    return {
        "patch_size": tuple(patch),
        "in_dim": in_channels,
        "dim": width,
        "ffn_dim": shape(shapes, "blocks.0.block.ffn.0.weight")[0],
        "freq_dim": shape(shapes, "time_embedding.0.weight")[1],
        "text_dim": shape(shapes, "text_embedding.0.weight")[1],
        "out_dim": shape(shapes, "head.head.weight")[0] // math.prod(patch),
        "num_heads": width // head_width(width, published=128),
        "num_layers": count(shapes, "blocks."),
        "cross_attn_norm": "blocks.0.block.norm3.weight" in shapes,
        "use_img_emb": "img_emb.proj.0.weight" in shapes,
    }


WAN_ANIMATE = Family(
    "Wan 2.2 Animate",
    "WanAnimateTransformer3DModel",
    _is_animate,
    _animate_config,
    unused=(".kernel",),  # blur filters of the motion encoder
)
WAN_ANIMATE_2 = Family("Wan Animate 2", "WanAnimate2Transformer3DModel", _is_animate_2, _animate_2_config)

FAMILIES = (WAN_ANIMATE, WAN_ANIMATE_2)
