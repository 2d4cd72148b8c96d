"""Sana 1.0 (600M and 1.6B), in NVIDIA's layout.

The layout is that of github.com/NVlabs/Sana (`diffusion/model/nets/sana_multi_scale.py`). Constant in every published
model: heads of 32 in self-attention, and in cross-attention 20 heads for 2240 wide and 16 for 1152; other widths (tiny
models) have the heads of `reading.head_width` in both. The number of positions, where the file has it, gives the
picture's size; those of 2K and 4K are interpolated.

Sana 1.5 and Sprint norm their queries and keys, which diffusers' converter does not know: refused.
"""

from __future__ import annotations

import math
from typing import Any

from .family import Converter, Family, Shapes, Tensors
from .reading import count, head_width, shape

_CROSS_HEADS = {2240: 20, 1152: 16}
_INTERPOLATION = {64: 1.0, 128: 2.0}
_UNUSED = ("pos_embed", "y_embedder.y_embedding")


def _recognises(shapes: Shapes) -> bool:
    return {
        "attention_y_norm.weight",
        "blocks.0.cross_attn.kv_linear.weight",
        "blocks.0.mlp.inverted_conv.conv.weight",
    } <= shapes.keys()


def _config(shapes: Shapes) -> dict[str, Any]:
    if "blocks.0.attn.q_norm.weight" in shapes or "cfg_embedder.mlp.0.weight" in shapes:
        raise ValueError("it is Sana 1.5 or Sprint, which diffusers cannot convert")
    width, in_channels, patch, _ = shape(shapes, "x_embedder.proj.weight")
    heads = width // head_width(width, published=32)
    cross_heads = _CROSS_HEADS.get(width, heads)
    sample_size = math.isqrt(shapes["pos_embed"][1]) if "pos_embed" in shapes else 32
    return {
        "in_channels": in_channels,
        "out_channels": shape(shapes, "final_layer.linear.weight")[0] // patch**2,
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "num_layers": count(shapes, "blocks."),
        "num_cross_attention_heads": cross_heads,
        "cross_attention_head_dim": width // cross_heads,
        "cross_attention_dim": shape(shapes, "blocks.0.cross_attn.kv_linear.weight")[1],
        "caption_channels": shape(shapes, "y_embedder.y_proj.fc1.weight")[1],
        "mlp_ratio": shape(shapes, "blocks.0.mlp.inverted_conv.conv.weight")[0] / 2 / width,
        "sample_size": sample_size,
        "patch_size": patch,
        "interpolation_scale": _INTERPOLATION.get(sample_size),
    }


def _convert(upstream: Converter, tensors: Tensors) -> Tensors:
    """diffusers' converter; it insists on two keys that it throws away."""
    anything = next(iter(tensors.values()))
    return upstream({**dict.fromkeys(_UNUSED, anything), **tensors})


SANA = Family("Sana", "SanaTransformer2DModel", _recognises, _config, _convert, unused=_UNUSED)

FAMILIES = (SANA,)
