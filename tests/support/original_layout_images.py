"""Tiny transformers of the image families, for the tests of single files."""

from __future__ import annotations

from typing import Any, NamedTuple

import diffusers
import torch

FLUX = {
    "in_channels": 12,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "joint_attention_dim": 20,
    "pooled_projection_dim": 14,
    "axes_dims_rope": (4, 2, 2),
}
CHROMA = {name: value for name, value in FLUX.items() if name != "pooled_projection_dim"} | {
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 24,
    "approximator_layers": 2,
}
SD3 = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "joint_attention_dim": 20,
    "caption_projection_dim": 24,
    "pooled_projection_dim": 14,
    "pos_embed_max_size": 6,
}
QWEN = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 20,
    "axes_dims_rope": (4, 6, 6),
}
Z_IMAGE = {
    "in_channels": 4,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "cap_feat_dim": 20,
    "axes_dims": [4, 6, 6],
    "axes_lens": [1536, 512, 512],
}
LUMINA = {
    "in_channels": 4,
    "hidden_size": 72,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "num_attention_heads": 6,
    "num_kv_heads": 2,
    "axes_dim_rope": (4, 4, 4),
    "cap_feat_dim": 20,
}
FILL = {"in_channels": 40, "out_channels": 12, "guidance_embeds": True}
LAYERED = {"use_additional_t_cond": True, "use_layer3d_rope": True}


class Case(NamedTuple):
    """A tiny model and its variant's name."""

    name: str
    model_class: str
    config: dict[str, Any]


CASES = (
    Case("flux schnell", "FluxTransformer2DModel", FLUX),
    Case("flux dev", "FluxTransformer2DModel", FLUX | {"guidance_embeds": True}),
    Case(
        "flux fill",
        "FluxTransformer2DModel",
        FLUX | {"in_channels": 40, "out_channels": 12, "guidance_embeds": True},
    ),
    Case("chroma", "ChromaTransformer2DModel", CHROMA),
    Case("sd3 medium", "SD3Transformer2DModel", SD3),
    Case("sd3.5 large", "SD3Transformer2DModel", SD3 | {"qk_norm": "rms_norm"}),
    Case(
        "sd3.5 medium",
        "SD3Transformer2DModel",
        SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
    ),
    Case("qwen image", "QwenImageTransformer2DModel", QWEN),
    Case("qwen layered", "QwenImageTransformer2DModel", QWEN | LAYERED),
    Case("z-image", "ZImageTransformer2DModel", Z_IMAGE),
    Case("z-image omni", "ZImageTransformer2DModel", Z_IMAGE | {"siglip_feat_dim": 10}),
    Case("lumina 2", "Lumina2Transformer2DModel", LUMINA),
    Case(
        "lumina 2, other groups", "Lumina2Transformer2DModel", LUMINA | {"num_kv_heads": 3, "multiple_of": 32}
    ),
)


def build(case: Case) -> torch.nn.Module:
    model = getattr(diffusers, case.model_class)(**case.config)
    generator = torch.Generator().manual_seed(len(case.name))
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model
