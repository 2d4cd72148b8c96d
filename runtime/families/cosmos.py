"""Cosmos 1.0 (Text2World, Video2World), Cosmos Predict 2 and 2.5, and Anima, in NVIDIA's two layouts.

The layouts are those of github.com/nvidia-cosmos/cosmos-predict1 (`blocks.block0.blocks.0.block.attn`) and
cosmos-predict2 (`blocks.0.self_attn`), which ComfyUI keeps. Heads' width stands in the norms; a model that continues a
video has one channel more. Constant: patches of 2x2 in one frame, a padding mask beside the latents, positions up to
128 x 240 x 240. How far positions are stretched (`rope_scale`) differs between published models and is told by the
number of heads: 16 (2B), 32 (7B) or 40 (14B); any other number is treated like the smallest of its version.

Anima is Predict 2's 2B text-to-image transformer; its `llm_adapter` belongs to the text side and is left aside.
"""

from __future__ import annotations

import re
from typing import Any

from .family import Converter, Family, Shapes, Tensors
from .reading import count, shape

_FIRST = "blocks.block0.blocks."
_SECOND = "blocks.0."
_PATCH = (1, 2, 2)
# Training's counters, the loss's weighting, and positions that the model computes.
_UNUSED = ("logvar.", "pos_embedder.seq", "pos_embedder.dim_", "accum_", "_extra_state", "llm_adapter.")

# Parts of 1.0's keys -> diffusers' names. A block has three parts: self-attention, cross-attention and feed-forward.
_FIRST_NAMES = (
    (r"^blocks\.block(\d+)\.blocks\.", r"transformer_blocks.\1."),
    (r"\.0\.block\.attn\.", ".attn1."),
    (r"\.1\.block\.attn\.", ".attn2."),
    (r"\.2\.block\.layer1\.", ".ff.net.0.proj."),
    (r"\.2\.block\.layer2\.", ".ff.net.2."),
    *((rf"\.{part}\.adaLN_modulation\.", f".norm{part + 1}.linear_") for part in range(3)),
    (r"\.to_([qkv])\.0\.", r".to_\1."),
    (r"\.to_([qk])\.1\.", r".norm_\1."),
    (r"^x_embedder\.proj\.1\.", "patch_embed.proj."),
    (r"^extra_pos_embedder\.", "learnable_pos_embed."),
    (r"^t_embedder\.1\.", "time_embed.t_embedder."),
    (r"^affline_norm\.", "time_embed.norm."),
    (r"^final_layer\.adaLN_modulation\.", "norm_out.linear_"),
    (r"^final_layer\.linear\.", "proj_out."),
)


def _is_first(shapes: Shapes) -> bool:
    return {f"{_FIRST}0.block.attn.to_q.0.weight", "x_embedder.proj.1.weight"} <= shapes.keys()


def _is_second(shapes: Shapes) -> bool:
    return {
        f"{_SECOND}self_attn.q_proj.weight",
        f"{_SECOND}adaln_modulation_mlp.1.weight",
        "x_embedder.proj.1.weight",
    } <= shapes.keys()


def _sizes(shapes: Shapes, norm: str, feed_forward: str, text: str, modulation: str) -> dict[str, Any]:
    """What both layouts tell alike; the arguments are keys."""
    width, in_features = shape(shapes, "x_embedder.proj.1.weight")
    head = shape(shapes, norm)[0]
    return {
        "in_channels": in_features // 4 - 1,
        "out_channels": shape(shapes, "final_layer.linear.weight")[0] // 4,
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "mlp_ratio": shape(shapes, feed_forward)[0] / width,
        "text_embed_dim": shape(shapes, text)[1],
        "adaln_lora_dim": shape(shapes, modulation)[0],
        "patch_size": _PATCH,
        "concat_padding_mask": True,
    }


def _first_config(shapes: Shapes) -> dict[str, Any]:
    sizes = _sizes(
        shapes,
        f"{_FIRST}0.block.attn.to_q.1.weight",
        f"{_FIRST}2.block.layer1.weight",
        f"{_FIRST}1.block.attn.to_k.0.weight",
        f"{_FIRST}0.adaLN_modulation.1.weight",
    )
    frames, height, columns = (shape(shapes, f"extra_pos_embedder.pos_emb_{axis}")[0] for axis in "thw")
    return {
        **sizes,
        "num_layers": count(shapes, "blocks.block"),
        "max_size": (frames, 2 * height, 2 * columns),
        "rope_scale": (2.0, 2.0, 2.0) if sizes["num_attention_heads"] == 40 else (2.0, 1.0, 1.0),
        "extra_pos_embed_type": "learnable",
    }


def _second_config(shapes: Shapes) -> dict[str, Any]:
    if "img_context_proj.0.weight" in shapes:
        raise ValueError("it is Cosmos Transfer 2.5, whose control branch is a model of its own")
    sizes = _sizes(
        shapes,
        f"{_SECOND}self_attn.q_norm.weight",
        f"{_SECOND}mlp.layer1.weight",
        f"{_SECOND}cross_attn.k_proj.weight",
        f"{_SECOND}adaln_modulation_self_attn.1.weight",
    )
    config = {
        **sizes,
        "num_layers": count(shapes, "blocks."),
        "max_size": (128, 240, 240),
        "rope_scale": _second_rope_scale(shapes, sizes),
        "extra_pos_embed_type": None,
    }
    if projection := shapes.get("crossattn_proj.0.weight"):
        config["use_crossattn_projection"] = True
        config["encoder_hidden_states_channels"], config["crossattn_proj_in_channels"] = projection
    return config


def _second_rope_scale(shapes: Shapes, sizes: dict[str, Any]) -> tuple[float, float, float]:
    """Predict 2.5 projects its texts and is stretched alike in both sizes; 2's 14B Video2World has fewer frames."""
    if sizes["in_channels"] == sizes["out_channels"]:
        return (1.0, 4.0, 4.0)
    if sizes["num_attention_heads"] == 40 and "crossattn_proj.0.weight" not in shapes:
        return (20 / 24, 2.0, 2.0)
    return (1.0, 3.0, 3.0)


def _convert_first(upstream: Converter, tensors: Tensors) -> Tensors:
    """Renamed here: diffusers 0.42's converter looks for 1.0's keys after it has emptied the dict it looks in."""
    return {_renamed(key): tensor for key, tensor in tensors.items()}


def _renamed(key: str) -> str:
    for old, new in _FIRST_NAMES:
        key = re.sub(old, new, key)
    return key


COSMOS_1 = Family(
    "Cosmos 1.0", "CosmosTransformer3DModel", _is_first, _first_config, _convert_first, unused=_UNUSED
)
COSMOS_2 = Family(
    "Cosmos Predict 2 / Anima",
    "CosmosTransformer3DModel",
    _is_second,
    _second_config,
    unused=_UNUSED,
)

FAMILIES = (COSMOS_1, COSMOS_2)
