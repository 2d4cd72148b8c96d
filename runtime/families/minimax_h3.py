"""MiniMax-H3, in the layout of its published single files.

The layout is the reference model's (that of the converter in diffusers). Heads' width stands in the norms. Constant:
patches of 2x2 in one frame, theta 10000, all eps 1e-5, 16 rotary frequencies for each axis of a head of 128 (told by
`rope.inv_freq`, where the file has it).

Not told apart: a file merged by hand from MiniMax's own shards interleaves the rows of q, k and v by head; keys and
shapes are the same. Every published single file stacks them, and that is how a file is read.
"""

from __future__ import annotations

from typing import Any

from .family import Family, Shapes
from .reading import count, shape

_BLOCK = "blocks.0."


def _recognises(shapes: Shapes) -> bool:
    return {"token_refiner.blocks.0.attn.qkv_proj.weight", "video_patch_proj.weight"} <= shapes.keys()


def _config(shapes: Shapes) -> dict[str, Any]:
    if "adaln_t_table" in shapes:
        raise ValueError("its time embedding is pruned to a table, which diffusers' model has not")
    width, in_features = shape(shapes, "video_patch_proj.weight")
    head = shape(shapes, f"{_BLOCK}attn.q_norm.weight")[0]
    time_hidden, frequencies = shape(shapes, "time_embedder.proj_in.weight")
    rotary = shapes.get("rope.inv_freq")
    return {
        "num_attention_heads": shape(shapes, f"{_BLOCK}attn.qkv_proj.weight")[0] // (3 * head),
        "attention_head_dim": head,
        "hidden_size": width,
        "num_layers": count(shapes, "blocks."),
        "num_refiner_layers": count(shapes, "token_refiner.blocks."),
        "ffn_dim": shape(shapes, f"{_BLOCK}mlp.fc2.weight")[1],
        "in_channels": in_features // 4,
        "audio_in_channels": shape(shapes, "audio_patch_proj.weight")[1],
        "patch_size": (1, 2, 2),
        "text_dim": shape(shapes, "condition_proj.weight")[1],
        "freq_dim": frequencies,
        "time_embed_hidden_dim": time_hidden,
        "time_embed_dim": shape(shapes, "time_embedder.proj_out.weight")[0],
        "rope_freq_dim": rotary[0] if rotary else head // 8,
    }


MINIMAX_H3 = Family(
    "MiniMax-H3", "MiniMaxH3Transformer3DModel", _recognises, _config, unused=("rope.inv_freq",)
)

FAMILIES = (MINIMAX_H3,)
