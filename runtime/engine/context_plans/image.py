"""Context plans of the image families: upstream's where they are right, ours elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from .plan import ContextPlan, Cut, joint

_PICTURE, _TEXT = Cut(1, "picture"), Cut(1, "text")
_RESIDUALS = Cut(1, "picture", spreads=True)  # of a ControlNet; upstream does not cut them

_FLUX = ContextPlan(
    inputs={
        "": {
            "hidden_states": _PICTURE,
            "encoder_hidden_states": _TEXT,
            "img_ids": Cut(0, "picture", ndim=2),
            "txt_ids": Cut(0, "text", ndim=2),
            "controlnet_block_samples": _RESIDUALS,
            "controlnet_single_block_samples": _RESIDUALS,
        }
    },
    joins={"proj_out": {0: _PICTURE}},
    attentions={
        "transformer_blocks.*.attn": joint("text", "picture"),
        "single_transformer_blocks.*.attn": joint("text", "picture"),
    },
)
_QWEN = ContextPlan(
    inputs={
        "": {"controlnet_block_samples": _RESIDUALS},
        "transformer_blocks.0": {"hidden_states": _PICTURE, "encoder_hidden_states": _TEXT},
        "transformer_blocks.*": {"modulate_index": _PICTURE},
    },
    outputs={"pos_embed": {0: Cut(0, "picture"), 1: Cut(0, "text")}},
    joins={"proj_out": {0: _PICTURE}},
    attentions={"transformer_blocks.*.attn": joint("text", "picture")},
    key_masks={"transformer_blocks.*": {"encoder_hidden_states_mask": "text"}},
)

PLANS: Mapping[str, ContextPlan] = {
    "FluxTransformer2DModel": _FLUX,
    "QwenImageTransformer2DModel": _QWEN,
}
