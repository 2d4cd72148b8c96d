"""Wan 2.1 and 2.2 (T2V, I2V, FLF2V, TI2V), Wan VACE, and the SkyReels V2 that can be told from Wan.

The layout is that of github.com/Wan-Video/Wan2.1 (`wan/modules/model.py`, `vace_model.py`), which ComfyUI keeps:
`patch_embedding`, `time_embedding`, `text_embedding`, `time_projection.1`, `blocks.N.{self_attn,cross_attn}.{q,k,v,o}`,
`blocks.N.ffn.{0,2}`, `blocks.N.modulation`, `head.{head,modulation}`.

What no shape tells is the same in every published model: heads are 128 wide (tiny models: `reading.head_width`),
q and k are normalised across heads, eps is 1e-6 and positions reach 1024. Told by keys: `img_emb` is the image
embedding of 2.1's I2V (2.2's I2V has 36 input channels and no `img_emb`), `img_emb.emb_pos` is FLF2V.

Not told apart from Wan, and read as Wan: SkyReels V2 without frame rate embedding (all but DF 1.3B) and ChronoEdit.
"""

from __future__ import annotations

import math
from typing import Any

from .family import Converter, Family, Shapes, Tensors
from .reading import count, head_width, shape

# A key that only one relative of Wan has -> why it is refused. None of them has a class in diffusers.
_RELATIVES = {
    "control_adapter.conv.weight": "Wan Fun Camera",
    "casual_audio_encoder.encoder.final_linear.weight": "Wan 2.2 S2V",
    "audio_proj.audio_proj_glob_1.layer.bias": "HuMo",
    "ref_conv.weight": "Wan Fun Control with a reference image",
}

# What diffusers' converter leaves under its original name: FLF2V's positions, the frame rate of SkyReels V2.
_LEFT_BEHIND = {
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "fps_projection.0.": "fps_projection.net.0.proj.",
    "fps_projection.2.": "fps_projection.net.2.",
}


def is_wan(shapes: Shapes) -> bool:
    """Whether it is Wan or any relative with the same blocks, Animate included (Animate 2 wraps its blocks)."""
    return "head.modulation" in shapes and "blocks.0.self_attn.q.weight" in shapes


def _is_vace(shapes: Shapes) -> bool:
    return is_wan(shapes) and "vace_patch_embedding.weight" in shapes


def _is_sky_reels(shapes: Shapes) -> bool:
    return is_wan(shapes) and "fps_embedding.weight" in shapes


def _is_plain(shapes: Shapes) -> bool:
    others = (
        "vace_patch_embedding.weight",
        "fps_embedding.weight",
        "face_adapter.fuser_blocks.0.q_norm.weight",
    )
    return is_wan(shapes) and not any(key in shapes for key in others)


def wan_config(shapes: Shapes) -> dict[str, Any]:
    """The entries that all classes of the family share. ValueError for a relative that diffusers has no class for."""
    for key, name in _RELATIVES.items():
        if key in shapes:
            raise ValueError(f"it is {name}, which diffusers has no model for")
    width, in_channels, *patch = shape(shapes, "patch_embedding.weight")
    head = head_width(width, published=128)
    image, positions = shapes.get("img_emb.proj.0.weight"), shapes.get("img_emb.emb_pos")
    added = shapes.get("blocks.0.cross_attn.k_img.weight")
    return {
        "patch_size": tuple(patch),
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "in_channels": in_channels,
        "out_channels": shape(shapes, "head.head.weight")[0] // math.prod(patch),
        "text_dim": shape(shapes, "text_embedding.0.weight")[1],
        "freq_dim": shape(shapes, "time_embedding.0.weight")[1],
        "ffn_dim": shape(shapes, "blocks.0.ffn.0.weight")[0],
        "num_layers": count(shapes, "blocks."),
        "cross_attn_norm": "blocks.0.norm3.weight" in shapes,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": image[0] if image else None,
        "added_kv_proj_dim": added[1] if added else None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": positions[1] if positions else None,
    }


def _vace_config(shapes: Shapes) -> dict[str, Any]:
    """Control enters at blocks 0, n, 2n, ... in both published sizes: every 2nd of 30, every 5th of 40."""
    config = wan_config(shapes)
    layers, controls = config["num_layers"], count(shapes, "vace_blocks.")
    if not controls or layers % controls:
        raise ValueError(
            f"which of the {layers} blocks the {controls} control blocks belong to cannot be told"
        )
    return {
        **config,
        "vace_layers": tuple(range(0, layers, layers // controls)),
        "vace_in_channels": shape(shapes, "vace_patch_embedding.weight")[1],
    }


def _sky_reels_config(shapes: Shapes) -> dict[str, Any]:
    """`num_frame_per_block` is 1 in the published config; its pipelines set it for each run."""
    return {**wan_config(shapes), "inject_sample_info": True, "num_frame_per_block": 1}


def _convert(upstream: Converter, tensors: Tensors) -> Tensors:
    """diffusers' converter, and then the names that it forgets (FLF2V and SkyReels V2 DF 1.3B fail without)."""
    renamed: Tensors = {}
    for key, tensor in upstream(tensors).items():
        for old, new in _LEFT_BEHIND.items():
            key = key.replace(old, new)
        renamed[key] = tensor
    return renamed


WAN = Family("Wan 2.1 / 2.2", "WanTransformer3DModel", _is_plain, wan_config, _convert)
WAN_VACE = Family("Wan VACE", "WanVACETransformer3DModel", _is_vace, _vace_config)
SKY_REELS_V2 = Family(
    "SkyReels V2 DF 1.3B", "SkyReelsV2Transformer3DModel", _is_sky_reels, _sky_reels_config, _convert
)

FAMILIES = (WAN, WAN_VACE, SKY_REELS_V2)
