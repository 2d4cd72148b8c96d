"""FLUX.1: schnell, dev, Krea, Kontext, Fill, Canny and Depth, in Black Forest Labs' layout and in diffusers' own.

The layout is that of github.com/black-forest-labs/flux (`src/flux/model.py`), which ComfyUI keeps. schnell has no
guidance; Fill (384) and Canny and Depth (128) take more channels in than they give out. Kontext has dev's shapes.
Constant in every published model: theta 10000, rotary axes 16, 56 and 56 of a head's 128, an MLP of four widths.
"""

from __future__ import annotations

from typing import Any

from .family import Converter, Family, Shapes, Tensors
from .reading import count, double_and_single_blocks, rotary_16_56_56, shape


def _is_original(shapes: Shapes) -> bool:
    """Chroma lacks `vector_in`, FLUX.2 has its modulation outside the blocks."""
    return {
        "img_in.weight",
        "vector_in.in_layer.weight",
        "double_blocks.0.img_mod.lin.weight",
        "double_blocks.0.img_attn.norm.key_norm.scale",
        "single_blocks.0.modulation.lin.weight",
        "final_layer.linear.weight",
    } <= shapes.keys()


def _is_diffusers(shapes: Shapes) -> bool:
    return {
        "x_embedder.weight",
        "context_embedder.weight",
        "time_text_embed.text_embedder.linear_1.weight",
        "transformer_blocks.0.attn.norm_added_q.weight",
        "single_transformer_blocks.0.proj_mlp.weight",
        "proj_out.weight",
    } <= shapes.keys()


def _original_config(shapes: Shapes) -> dict[str, Any]:
    sizes = double_and_single_blocks(shapes)
    return {
        **sizes,
        "axes_dims_rope": rotary_16_56_56(sizes["attention_head_dim"]),
        "pooled_projection_dim": shape(shapes, "vector_in.in_layer.weight")[1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
    }


def _diffusers_config(shapes: Shapes) -> dict[str, Any]:
    width, in_channels = shape(shapes, "x_embedder.weight")
    head = shape(shapes, "transformer_blocks.0.attn.norm_k.weight")[0]
    out_channels = shape(shapes, "proj_out.weight")[0]
    embed = "time_text_embed"
    return {
        "patch_size": 1,
        "in_channels": in_channels,
        "out_channels": None if out_channels == in_channels else out_channels,
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "axes_dims_rope": rotary_16_56_56(head),
        "num_layers": count(shapes, "transformer_blocks."),
        "num_single_layers": count(shapes, "single_transformer_blocks."),
        "joint_attention_dim": shape(shapes, "context_embedder.weight")[1],
        "pooled_projection_dim": shape(shapes, f"{embed}.text_embedder.linear_1.weight")[1],
        "guidance_embeds": f"{embed}.guidance_embedder.linear_1.weight" in shapes,
    }


def _as_it_is(upstream: Converter, tensors: Tensors) -> Tensors:
    return tensors


FLUX = Family("FLUX.1", "FluxTransformer2DModel", _is_original, _original_config)
FLUX_DIFFUSERS = Family(
    "FLUX.1",
    "FluxTransformer2DModel",
    _is_diffusers,
    _diffusers_config,
    _as_it_is,
    diffusers_names=True,
)

FAMILIES = (FLUX, FLUX_DIFFUSERS)
