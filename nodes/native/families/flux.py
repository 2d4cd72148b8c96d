"""FLUX.1: dev, schnell, Krea, Kontext, Fill, Canny and Depth.

ComfyUI pads, cuts into patches and makes the positions (reference pictures, rope scaling), and puts the patches
together afterwards: what is replaced is the part between, whose arguments are diffusers' one to one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .family import (
    Arguments,
    Blocks,
    Call,
    NativeFamily,
    Sent,
    each,
    joined,
    kept,
    refuse_argument,
    residuals,
)

_TIME = "time_text_embed"
_GUIDANCE = f"{_TIME}.guidance_embedder"


def _comfy_class() -> type:
    from comfy.ldm.flux.model import Flux

    return Flux


def _call(model: Any, arguments: Arguments) -> Call:
    if arguments.get("timestep_zero_index") is not None:  # of newer releases
        raise refuse_argument("FLUX.1", "timestep_zero_index", "The reference method 'index_timestep_zero'")
    img, txt, y = arguments["img"], arguments["txt"], arguments["y"]
    timesteps, guidance, control = arguments["timesteps"], arguments["guidance"], arguments["control"] or {}
    if y is None:
        y = img.new_zeros(img.shape[0], model.params.vec_in_dim)
    tokens, width = img.shape[1], model.hidden_size
    sent: dict[str, Any] = {
        "hidden_states": _split(img, model.out_channels),
        "encoder_hidden_states": kept(txt),
        "pooled_projections": kept(y[:, : model.params.vec_in_dim]),
        "timestep": each(timesteps),
        "img_ids": kept(arguments["img_ids"][0], batched=False),
        "txt_ids": kept(arguments["txt_ids"][0], batched=False),
        "controlnet_block_samples": residuals(
            control.get("input"), len(model.double_blocks), tokens, width, img.dtype
        ),
        "controlnet_single_block_samples": residuals(
            control.get("output"), len(model.single_blocks), tokens, width, img.dtype
        ),
    }
    if arguments["attn_mask"] is not None:
        sent["joint_attention_kwargs"] = {"attention_mask": kept(arguments["attn_mask"])}
    outputs: dict[str, Sent] = {}
    if model.params.guidance_embed:
        if guidance is None:
            # diffusers cannot leave guidance out; ComfyUI then adds nothing for it.
            guidance = timesteps.new_zeros(timesteps.shape)
            outputs[_GUIDANCE] = each(img.new_zeros(1, 1), batched=False)
        sent["guidance"] = kept(guidance)
    return Call(
        sent,
        # diffusers rounds the timestep to the weights' dtype before its sinusoid, ComfyUI does not.
        inputs={_TIME: each(timesteps.float() * 1000)},
        outputs=outputs,
        lengths={"picture": tokens, "text": txt.shape[1]},
    )


def _split(img: torch.Tensor, latent: int) -> Sent:
    """The tokens of a picture [B, T, C]: the latent changes; a mask and a picture beside it (Fill, Canny) do not."""
    if img.shape[-1] == latent:
        return each(img)
    return joined(-1, each(img[..., :latent]), kept(img[..., latent:]))


def _result(_model: Any, _arguments: Arguments, output: torch.Tensor) -> torch.Tensor:
    return output


def _detection(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, width = config["num_attention_heads"], config["attention_head_dim"]
    return {
        "num_heads": heads,
        "hidden_size": heads * width,
        "axes_dim": list(config["axes_dims_rope"]),
        "context_in_dim": config["joint_attention_dim"],
        "vec_in_dim": config["pooled_projection_dim"],
        "out_channels": (config.get("out_channels") or config["in_channels"]) // 4,
    }


FLUX = NativeFamily(
    name="FLUX.1",
    transformer="FluxTransformer2DModel",
    comfy_class=_comfy_class,
    method="forward_orig",
    call=_call,
    result=_result,
    blocks={
        "double_block": Blocks("transformer_blocks", ("encoder_hidden_states", "hidden_states")),
        "single_block": Blocks("single_transformer_blocks", ("encoder_hidden_states", "hidden_states")),
    },
    replaced=(_TIME, _GUIDANCE),
    detection=_detection,
)
