"""FLUX.3 image (klein base and the step-distilled klein), in Black Forest Labs' layout.

The layout is that of the converter in diffusers. It has a stream for each mode (image, image condition, text), which
tells it from FLUX.2. Heads' width stands in the norms; the distilled model embeds a second time (`ref_time_in`).
Constant, as in diffusers' class: theta 10000, four equal rotary axes, eps 1e-6.
"""

from __future__ import annotations

from typing import Any

from .family import Family, Shapes
from .reading import count, rotary_quarters, shape

_IMAGE = "content_mode_blocks.image."


def _recognises(shapes: Shapes) -> bool:
    return {"early_stream_modulations.image.lin.weight", "emb_in.image.weight"} <= shapes.keys()


def _config(shapes: Shapes) -> dict[str, Any]:
    width, in_channels = shape(shapes, "emb_in.image.weight")
    head = shape(shapes, f"{_IMAGE}0.norm.query_norm.scale")[0]
    return {
        "in_channels": in_channels,
        "cond_in_channels": shape(shapes, "emb_in.image_cond.weight")[1],
        "num_layers": count(shapes, _IMAGE),
        "num_single_layers": count(shapes, "single_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shape(shapes, "txt_in.weight")[1],
        "timestep_channels": shape(shapes, "time_in.in_layer.weight")[1],
        "mlp_ratio": shape(shapes, f"{_IMAGE}0.mlp_out.weight")[1] / width,
        "axes_dims_rope": rotary_quarters(head),
        "flow_map": "ref_time_in.in_layer.weight" in shapes,
    }


FLUX3 = Family("FLUX.3", "Flux3Transformer2DModel", _recognises, _config, unused=("repa_projectors.",))

FAMILIES = (FLUX3,)
