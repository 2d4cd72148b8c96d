"""Lumina-Image 2.0 and its finetunes (Neta Lumina), in Alpha-VLLM's layout.

The layout is that of github.com/Alpha-VLLM/Lumina-Image-2.0 (`models/model.py`), which ComfyUI keeps; Z-Image shares
its names and has padding tokens besides. Constant in every published model: patches of 2x2, 128 latents along an edge
by default, eps 1e-5, three equal rotary axes with 300, 512 and 512 positions.
"""

from __future__ import annotations

from typing import Any

from .family import Converter, Family, Shapes, Tensors
from .reading import count, shape

_PATCH = 2
_QKV = ".attention.qkv.weight"


def _recognises(shapes: Shapes) -> bool:
    needed = {"cap_embedder.1.weight", "x_embedder.weight", f"noise_refiner.0{_QKV}", f"layers.0{_QKV}"}
    return needed <= shapes.keys() and "cap_pad_token" not in shapes


def _config(shapes: Shapes) -> dict[str, Any]:
    width, in_features = shape(shapes, "x_embedder.weight")
    head = shape(shapes, "layers.0.attention.q_norm.weight")[0]
    out_channels = shape(shapes, "final_layer.linear.weight")[0] // _PATCH**2
    return {
        "sample_size": 128,
        "patch_size": _PATCH,
        "in_channels": in_features // _PATCH**2,
        "out_channels": None if out_channels == in_features // _PATCH**2 else out_channels,
        "hidden_size": width,
        "num_layers": count(shapes, "layers."),
        "num_refiner_layers": count(shapes, "noise_refiner."),
        "num_attention_heads": width // head,
        "num_kv_heads": (shape(shapes, f"layers.0{_QKV}")[0] - width) // (2 * head),
        **_feed_forward(width, shape(shapes, "layers.0.feed_forward.w1.weight")[0]),
        "norm_eps": 1e-5,
        "scaling_factor": 1.0,
        "axes_dim_rope": _rotary(head),
        "axes_lens": (300, 512, 512),
        "cap_feat_dim": shape(shapes, "cap_embedder.1.weight")[1],
    }


def _feed_forward(width: int, hidden: int) -> dict[str, Any]:
    """What makes diffusers' feed-forward `hidden` wide: four widths times a factor, rounded up to a multiple.

    The published model has four widths in multiples of 256; any other is reached as a multiple of itself.
    """
    if hidden == -(-4 * width // 256) * 256:
        return {"multiple_of": 256, "ffn_dim_multiplier": None}
    return {
        "multiple_of": hidden,
        "ffn_dim_multiplier": None if hidden >= 4 * width else hidden / (4 * width),
    }


def _rotary(head: int) -> tuple[int, int, int]:
    """Rotary widths per head: a third each, 32 for 96; even, so the first may be wider."""
    side = head // 6 * 2
    return (head - 2 * side, side, side)


def _convert(upstream: Converter, tensors: Tensors) -> Tensors:
    """diffusers' converter, after splitting queries, keys and values: it takes 2304, 768 and 768 rows for them."""
    width = tensors["x_embedder.weight"].shape[0]
    for key in [key for key in tensors if key.endswith(_QKV)]:
        fused, stem = tensors.pop(key), key.removesuffix(_QKV)
        keys = (fused.shape[0] - width) // 2
        tensors[f"{stem}.attention.to_q.weight"] = fused[:width]
        tensors[f"{stem}.attention.to_k.weight"] = fused[width : width + keys]
        tensors[f"{stem}.attention.to_v.weight"] = fused[width + keys : fused.shape[0]]
    return upstream(tensors)


LUMINA_2 = Family(
    "Lumina-Image 2.0",
    "Lumina2Transformer2DModel",
    _recognises,
    _config,
    _convert,
    unused=("norm_final.weight",),
)

FAMILIES = (LUMINA_2,)
