"""ERNIE-Image: the authors' layout is diffusers' own.

Heads' width stands in the norms. Constant, as in diffusers' class: patches of one latent, theta 256, eps 1e-6, rotary
axes 32, 48 and 48 of a head's 128.
"""

from __future__ import annotations

from typing import Any

from .family import Family, Shapes
from .reading import count, rotary_32_48_48, shape


def _recognises(shapes: Shapes) -> bool:
    return {
        "layers.0.adaLN_sa_ln.weight",
        "text_proj.weight",
        "layers.0.mlp.linear_fc2.weight",
    } <= shapes.keys()


def _config(shapes: Shapes) -> dict[str, Any]:
    """Queries and keys are normed in every published model; without norms the heads could not be told."""
    width, in_channels, patch, _ = shape(shapes, "x_embedder.proj.weight")
    head = shape(shapes, "layers.0.self_attention.norm_q.weight")[0]
    return {
        "hidden_size": width,
        "num_attention_heads": width // head,
        "num_layers": count(shapes, "layers."),
        "ffn_hidden_size": shape(shapes, "layers.0.mlp.gate_proj.weight")[0],
        "in_channels": in_channels,
        "out_channels": shape(shapes, "final_linear.weight")[0] // patch**2,
        "patch_size": patch,
        "text_in_dim": shape(shapes, "text_proj.weight")[1],
        "rope_axes_dim": rotary_32_48_48(head),
        "qk_layernorm": True,
    }


ERNIE_IMAGE = Family(
    "ERNIE-Image", "ErnieImageTransformer2DModel", _recognises, _config, diffusers_names=True
)

FAMILIES = (ERNIE_IMAGE,)
