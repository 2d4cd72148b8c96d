"""The checkpoints that are compared: tiny models with fresh random weights in the layout of the published files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import save_file

from tests.support.models import randomise
from tests.support.original_layouts import original_layout
from tests.support.original_layouts_video import WAN, in_original_layout

State = Mapping[str, torch.Tensor]
# Widths of what the text encoders would give.
TEXT, POOLED = 64, 48
# Heads that 2 and 3 ranks share evenly, of a width that the family's reading of tiny files finds.
HEADS, HEAD = 6, 16
AXES = (4, 6, 6)


@dataclass(frozen=True)
class Variant:
    """One checkpoint. `detection` is what ComfyUI takes for granted of the family, where this model is smaller."""

    name: str
    transformer: str
    config: Mapping[str, Any]
    original: Callable[[State], Mapping[str, torch.Tensor]]
    detection: Mapping[str, Any]
    prefix: str = ""

    def model(self, seed: int) -> torch.nn.Module:
        """In diffusers. Its fp32 numbers are those of bf16, so that loading it in either gives the same weights."""
        torch.manual_seed(zlib.crc32(self.name.encode()) + seed)
        model = getattr(diffusers, self.transformer)(**self.config)
        randomise(model)
        return model.bfloat16().float()

    def write(self, folder: Path, seed: int) -> Path:
        """The model's file in `folder`."""
        path = folder / f"{self.name}.safetensors"
        state = self.original(self.model(seed).state_dict())
        save_file({f"{self.prefix}{key}": tensor.contiguous() for key, tensor in state.items()}, path)
        return path


def _flux(name: str, prefix: str = "", **config: Any) -> Variant:
    return Variant(
        name,
        "FluxTransformer2DModel",
        {
            "in_channels": 64,
            "num_layers": 2,
            "num_single_layers": 3,
            "attention_head_dim": HEAD,
            "num_attention_heads": HEADS,
            "joint_attention_dim": TEXT,
            "pooled_projection_dim": POOLED,
            "axes_dims_rope": AXES,
            "guidance_embeds": True,
            **config,
        },
        lambda state: original_layout("FluxTransformer2DModel", state),
        {"num_heads": HEADS, "axes_dim": list(AXES)},
        prefix,
    )


FLUX_DEV = _flux("flux-dev")
FLUX_SCHNELL = _flux("flux-schnell", guidance_embeds=False)
FLUX_FILL = _flux("flux-fill", "model.diffusion_model.", in_channels=384, out_channels=64)
FLUX_CANNY = _flux("flux-canny", in_channels=128, out_channels=64)

QWEN = Variant(
    "qwen-image",
    "QwenImageTransformer2DModel",
    {
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 3,
        "attention_head_dim": HEAD,
        "num_attention_heads": HEADS,
        "joint_attention_dim": TEXT,
        "axes_dims_rope": AXES,
    },
    lambda state: original_layout("QwenImageTransformer2DModel", state),
    {
        "num_attention_heads": HEADS,
        "attention_head_dim": HEAD,
        "joint_attention_dim": TEXT,
        "axes_dims_rope": AXES,
    },
)


def _wan(name: str, prefix: str = "", **config: Any) -> Variant:
    return Variant(
        name,
        "WanTransformer3DModel",
        {
            "num_attention_heads": HEADS,
            "attention_head_dim": HEAD,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": TEXT,
            "freq_dim": 256,
            "ffn_dim": 160,
            "num_layers": 3,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            **config,
        },
        lambda state: in_original_layout(state, WAN),
        {"num_heads": HEADS, "text_dim": TEXT},
        prefix,
    )


_VISION = {
    "image_dim": 1280,
    "added_kv_proj_dim": HEADS * HEAD,
}  # ComfyUI takes the width of CLIP for granted
WAN_T2V = _wan("wan-2.1-t2v")
WAN_I2V = _wan("wan-2.1-i2v", in_channels=36, **_VISION)
WAN_FLF2V = _wan("wan-2.1-flf2v", "model.diffusion_model.", in_channels=36, pos_embed_seq_len=514, **_VISION)
WAN_22_I2V = _wan("wan-2.2-i2v", in_channels=36)
WAN_22_TI2V = _wan("wan-2.2-ti2v", in_channels=48, out_channels=48)
