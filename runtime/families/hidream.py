"""HiDream-I1 (Full, Dev, Fast) and E1: the authors' layout is diffusers' own.

Constant in every published model, as ComfyUI has it: heads of 128 (tiny models: `reading.head_width`), patches of 2x2,
two experts active, rotary axes of half and two quarters of a head, pictures of up to 128 x 128 latents, and the layers
of Llama that the blocks see: 0 to 31 in turn, then the last one again.
"""

from __future__ import annotations

from typing import Any

from .family import Family, Shapes
from .reading import count, head_width, shape

_PATCH = 2
_LAST_OF_LLAMA = 31


def _recognises(shapes: Shapes) -> bool:
    return {
        "caption_projection.0.linear.weight",
        "double_stream_blocks.0.block.ff_i.gate.weight",
        "p_embedder.pooled_embedder.linear_1.weight",
    } <= shapes.keys()


def _config(shapes: Shapes) -> dict[str, Any]:
    """Each block has a projection of a layer of Llama; the last one projects T5's output."""
    width, in_features = shape(shapes, "x_embedder.proj.weight")
    head = head_width(width, published=128)
    double, single = count(shapes, "double_stream_blocks."), count(shapes, "single_stream_blocks.")
    out_channels = shape(shapes, "final_layer.linear.weight")[0] // _PATCH**2
    return {
        "patch_size": _PATCH,
        "in_channels": in_features // _PATCH**2,
        "out_channels": out_channels,
        "num_layers": double,
        "num_single_layers": single,
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "caption_channels": (
            shape(shapes, f"caption_projection.{double + single}.linear.weight")[1],
            shape(shapes, "caption_projection.0.linear.weight")[1],
        ),
        "text_emb_dim": shape(shapes, "p_embedder.pooled_embedder.linear_1.weight")[1],
        "num_routed_experts": shape(shapes, "double_stream_blocks.0.block.ff_i.gate.weight")[0],
        "num_activated_experts": 2,
        "axes_dims_rope": (head - head // 4 * 2, head // 4, head // 4),
        "max_resolution": (128, 128),
        "llama_layers": tuple(min(layer, _LAST_OF_LLAMA) for layer in range(double + single)),
    }


HIDREAM = Family("HiDream", "HiDreamImageTransformer2DModel", _recognises, _config, diffusers_names=True)

FAMILIES = (HIDREAM,)
