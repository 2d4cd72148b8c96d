"""AuraFlow 0.1 to 0.3 and its finetunes (Pony V7), in their authors' layout.

The layout is that of github.com/cloneofsimo/minRF (`dit.py`), which ComfyUI keeps: `double_layers`, `single_layers`,
and positions in the file. Constant in every published model: heads of 256 (tiny models: `reading.head_width`), patches
of 2x2, latents of 64 along an edge by default.
"""

from __future__ import annotations

from typing import Any

from .family import Converter, Family, Shapes, Tensors
from .reading import count, head_width, shape

_PATCH = 2


def _recognises(shapes: Shapes) -> bool:
    return {
        "cond_seq_linear.weight",
        "double_layers.0.attn.w1q.weight",
        "init_x_linear.weight",
    } <= shapes.keys()


def _config(shapes: Shapes) -> dict[str, Any]:
    width, in_features = shape(shapes, "init_x_linear.weight")
    head = head_width(width, published=256)
    caption, joint = shape(shapes, "cond_seq_linear.weight")
    return {
        "sample_size": 64,
        "patch_size": _PATCH,
        "in_channels": in_features // _PATCH**2,
        "num_mmdit_layers": count(shapes, "double_layers."),
        "num_single_dit_layers": count(shapes, "single_layers."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": joint,
        "caption_projection_dim": caption,
        "out_channels": shape(shapes, "final_linear.weight")[0] // _PATCH**2,
        "pos_embed_max_size": shape(shapes, "positional_encoding")[1],
    }


def _convert(upstream: Converter, tensors: Tensors) -> Tensors:
    """diffusers' converter, without the None that it gives for a weight that the file has not."""
    return {key: tensor for key, tensor in upstream(tensors).items() if tensor is not None}


AURA_FLOW = Family("AuraFlow", "AuraFlowTransformer2DModel", _recognises, _config, _convert)

FAMILIES = (AURA_FLOW,)
