"""Z-Image: Turbo, Base and Omni, in the layout that ComfyUI keeps (Lumina's names) and in diffusers' own.

The padding tokens tell it from Lumina-Image 2.0. Omni also refines SigLIP features. Constant in every published
model: patches of 2x2 in one frame, theta 256, times counted to 1000, rotary axes 32, 48 and 48 of a head's 128 with
1536, 512 and 512 positions, an MLP of 8/3 widths, as many key-value heads as heads.
"""

from __future__ import annotations

from typing import Any

from .family import Converter, Family, Shapes, Tensors
from .reading import count, shape

_PATCH = 2


def _is_original(shapes: Shapes) -> bool:
    return {"cap_pad_token", "x_embedder.weight", "layers.0.attention.qkv.weight"} <= shapes.keys()


def _is_diffusers(shapes: Shapes) -> bool:
    return {"cap_pad_token", "all_x_embedder.2-1.weight", "layers.0.attention.to_q.weight"} <= shapes.keys()


def _original_config(shapes: Shapes) -> dict[str, Any]:
    return _config(shapes, "x_embedder.weight", "layers.0.attention.q_norm.weight")


def _diffusers_config(shapes: Shapes) -> dict[str, Any]:
    return _config(shapes, "all_x_embedder.2-1.weight", "layers.0.attention.norm_q.weight")


def _config(shapes: Shapes, first: str, norm: str) -> dict[str, Any]:
    if any(key.startswith("dec_net.") for key in shapes):
        raise ValueError("this Z-Image works on pixels, which diffusers' Z-Image cannot")
    width, in_features = shape(shapes, first)
    head = shape(shapes, norm)[0]
    siglip = shapes.get("siglip_embedder.0.weight")
    return {
        "all_patch_size": (_PATCH,),
        "all_f_patch_size": (1,),
        "in_channels": in_features // _PATCH**2,
        "dim": width,
        "n_layers": count(shapes, "layers."),
        "n_refiner_layers": count(shapes, "noise_refiner."),
        "n_heads": width // head,
        "n_kv_heads": width // head,
        "norm_eps": 1e-5,
        "qk_norm": True,
        "cap_feat_dim": shape(shapes, "cap_embedder.1.weight")[1],
        "siglip_feat_dim": siglip[0] if siglip else None,
        "rope_theta": 256.0,
        "t_scale": 1000.0,
        "axes_dims": _rotary(head),
        "axes_lens": [1536, 512, 512],
    }


def _rotary(head: int) -> list[int]:
    """Rotary widths per head: 32, 48 and 48 for 128, in proportion (and even) otherwise."""
    side = head * 3 // 16 * 2
    return [head - 2 * side, side, side]


def _as_it_is(upstream: Converter, tensors: Tensors) -> Tensors:
    return tensors


Z_IMAGE = Family(
    "Z-Image", "ZImageTransformer2DModel", _is_original, _original_config, unused=("norm_final.weight",)
)
Z_IMAGE_DIFFUSERS = Family(
    "Z-Image",
    "ZImageTransformer2DModel",
    _is_diffusers,
    _diffusers_config,
    _as_it_is,
    diffusers_names=True,
)

FAMILIES = (Z_IMAGE, Z_IMAGE_DIFFUSERS)
