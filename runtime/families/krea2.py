"""Krea 2, in its authors' layout (that of the converter in diffusers, which ComfyUI shares).

Widths of heads stand in the norms of the blocks and of the text fusion. Constant, as in diffusers' class: theta 1000,
eps 1e-5, rotary axes 32, 48 and 48 of a head's 128.
"""

from __future__ import annotations

from typing import Any

from .family import Family, Shapes
from .reading import count, rotary_32_48_48, shape

_TEXT = "txtfusion.layerwise_blocks.0."


def _recognises(shapes: Shapes) -> bool:
    return {"txtfusion.projector.weight", "first.weight", "blocks.0.attn.wq.weight"} <= shapes.keys()


def _config(shapes: Shapes) -> dict[str, Any]:
    width, in_channels = shape(shapes, "first.weight")
    head = shape(shapes, "blocks.0.attn.qknorm.qnorm.scale")[0]
    text_head = shape(shapes, f"{_TEXT}attn.qknorm.qnorm.scale")[0]
    text_hidden = shape(shapes, "txtmlp.1.weight")[1]
    return {
        "in_channels": in_channels,
        "num_layers": count(shapes, "blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "num_key_value_heads": shape(shapes, "blocks.0.attn.wk.weight")[0] // head,
        "intermediate_size": shape(shapes, "blocks.0.mlp.gate.weight")[0],
        "timestep_embed_dim": shape(shapes, "tmlp.0.weight")[1],
        "text_hidden_dim": text_hidden,
        "num_text_layers": shape(shapes, "txtfusion.projector.weight")[1],
        "text_num_attention_heads": text_hidden // text_head,
        "text_num_key_value_heads": shape(shapes, f"{_TEXT}attn.wk.weight")[0] // text_head,
        "text_intermediate_size": shape(shapes, f"{_TEXT}mlp.gate.weight")[0],
        "num_layerwise_text_blocks": count(shapes, "txtfusion.layerwise_blocks."),
        "num_refiner_text_blocks": count(shapes, "txtfusion.refiner_blocks."),
        "axes_dims_rope": rotary_32_48_48(head),
    }


KREA_2 = Family("Krea 2", "Krea2Transformer2DModel", _recognises, _config)

FAMILIES = (KREA_2,)
