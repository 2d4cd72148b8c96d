"""Wan 2.1 (T2V, I2V, FLF2V, Fun), Wan 2.2 (T2V, I2V, TI2V) and Phantom.

Both programs take and give whole latents, so all between ComfyUI's wrappers is replaced: the padding to whole patches
and the cropping happen here, as ComfyUI does them. Relatives that are a class of their own in ComfyUI (VACE, Camera,
S2V, HuMo, Animate) are other families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ....runtime.spec import Refusal
from .family import Arguments, Blocks, Call, NativeFamily, Sent, Shapes, each, joined, kept, refuse_argument

_NAME = "Wan 2.1 / 2.2"
_SINUSOID = "condition_embedder.timesteps_proj"
_TIME = "condition_embedder.time_embedder"
_ROPE = "rope"

# Beside a picture's embedding, diffusers takes this many last tokens for text, no more and no less.
_TEXT_LENGTH = 512
# Positions of an axis in diffusers' table.
_ROPE_LENGTH = 1024

_USED = {"x", "timestep", "context", "clip_fea", "time_dim_concat", "transformer_options"}
# Taken by ComfyUI's class, which does nothing with them.
_WITHOUT_EFFECT = {"y", "crossattn_controlnet", "denoise_mask"}
_FEATURES = {
    "control": "A ControlNet",
    "context_latents": "A reference in context (Bernini)",
    "reference_latent": "A reference picture",
}


def _comfy_class() -> type:
    from comfy.ldm.wan.model import WanModel

    return WanModel


def _call(model: Any, arguments: Arguments) -> Call:
    for name, value in arguments.items():
        if name not in _USED | _WITHOUT_EFFECT and _has_effect(model, name, value):
            raise refuse_argument(_NAME, name, _FEATURES.get(name, f"The conditioning '{name}'"))
    x, timestep = arguments["x"], arguments["timestep"]
    latents, grid = _latents(model, x, arguments["time_dim_concat"])
    tokens = math.prod(grid)
    inputs: dict[str, Sent] = {}
    outputs: dict[str, Sent | tuple[Sent, ...]] = {}

    # Two formulas for the same frequencies differ by rounding, which a timestep of 1000 makes visible.
    if timestep.ndim == 2 and timestep.shape[1] > 1:
        timestep = _per_token(timestep, tokens)
        # Larger than the latent itself, and in 16 bits nothing is seen of it.
        if x.dtype == torch.float32:
            inputs[_TIME] = each(_sinusoid(model, timestep, x.dtype), tokens=True)
    else:
        timestep = timestep.flatten()
        outputs[_SINUSOID] = each(_sinusoid(model, timestep, x.dtype))

    # Numbers of 16 bits cannot tell all positions apart; ComfyUI rounds them, diffusers does not.
    exact = min(_ROPE_LENGTH, 2 / torch.finfo(x.dtype).eps)
    if arguments["transformer_options"].get("rope_options") is not None or max(grid) > exact:
        outputs[_ROPE] = _positions(model, arguments, grid[0] * model.patch_size[0])

    sent = {
        "hidden_states": latents,
        "timestep": each(timestep),
        **_conditions(model, arguments["context"], arguments["clip_fea"]),
    }
    return Call(sent, inputs=inputs, outputs=outputs, lengths={"picture": tokens})


def _has_effect(model: Any, name: str, value: Any) -> bool:
    if name == "control":
        return any(one is not None for residuals in (value or {}).values() for one in residuals)
    if name == "reference_latent":
        return model.ref_conv is not None and value is not None
    return value is not None


def _latents(model: Any, x: torch.Tensor, frames: torch.Tensor | None) -> tuple[Sent, tuple[int, ...]]:
    """The latent [B, C, T, H, W] filled up to whole patches, and the patches along T, H and W.

    Beside the latent's own channels stand those of a picture and its mask, behind its own frames those of a subject
    (Phantom).
    """
    x = _filled_up(x, model.patch_size)
    shape = list(x.shape[2:])
    if frames is not None:
        frames = _filled_up(frames, model.patch_size)
        shape[0] += frames.shape[2]
        sent = joined(2, each(x), kept(frames))
    elif x.shape[1] > model.out_dim:
        sent = joined(1, each(x[:, : model.out_dim]), kept(x[:, model.out_dim :]))
    else:
        sent = each(x)
    return sent, tuple(size // patch for size, patch in zip(shape, model.patch_size, strict=True))


def _filled_up(x: torch.Tensor, patch_size: tuple[int, ...]) -> torch.Tensor:
    """`x` [B, C, T, H, W] filled up to whole patches. ComfyUI's own function copies it where nothing is missing too."""
    from comfy.ldm.common_dit import pad_to_patch_size

    is_whole = not any(size % patch for size, patch in zip(x.shape[2:], patch_size, strict=True))
    return x if is_whole else pad_to_patch_size(x, patch_size)


def _per_token(timestep: torch.Tensor, tokens: int) -> torch.Tensor:
    """Timesteps of frames [B, T] for each token [B, tokens], as ComfyUI's `repeat_e` spreads them."""
    times = -(-tokens // timestep.shape[1])
    return timestep.repeat_interleave(times, dim=1)[:, :tokens]


def _sinusoid(model: Any, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What stands for the timestep before the first weight, rounded as ComfyUI does: [*timestep.shape, freq_dim].

    In fp32, the dtype in which diffusers keeps the module that takes it.
    """
    from comfy.ldm.wan.model import sinusoidal_embedding_1d

    embedded = sinusoidal_embedding_1d(model.freq_dim, timestep.flatten()).to(dtype).float()
    return embedded.unflatten(0, timestep.shape)


def _positions(model: Any, arguments: Arguments, frames: int) -> tuple[Sent, Sent]:
    """ComfyUI's rotary table as diffusers' two, cosines and sines [1, tokens, 1, head width]."""
    x = arguments["x"]
    table = model.rope_encode(
        frames,
        *x.shape[3:],
        device=x.device,
        dtype=x.dtype,
        transformer_options=arguments["transformer_options"],
    )
    cosines, sines = (table[..., row, 0].repeat_interleave(2, dim=-1) for row in (0, 1))
    return kept(cosines, batched=False), kept(sines, batched=False)


def _conditions(model: Any, context: torch.Tensor, clip_fea: torch.Tensor | None) -> dict[str, Sent]:
    """The text [B, length, C] and, for a model that takes one, the picture's embedding [B, 257 or 514, C]."""
    if model.img_emb is None:
        return {"encoder_hidden_states": kept(context)}
    # Attending to every token several times is the same as once, so lengths that 512 is a multiple of can be right.
    length = context.shape[1]
    if not length or _TEXT_LENGTH % length:
        raise Refusal(
            f"A text of {length} tokens cannot be used with a sharded {_NAME} model that takes CLIP vision.",
            f"The model that the ranks run takes {_TEXT_LENGTH} tokens for text and all others for the picture.",
            f"Works instead: a prompt of at most {_TEXT_LENGTH} tokens through ComfyUI's own text encoder, "
            "which fills it up.",
        )
    text = context if length == _TEXT_LENGTH else context.repeat(1, _TEXT_LENGTH // length, 1)
    if clip_fea is None:
        # The attention to the picture then sees the text in ComfyUI.
        return {"encoder_hidden_states": kept(torch.cat([context, text], dim=1))}
    if model.img_emb.emb_pos is not None:
        clip_fea = _two_pictures(clip_fea, model.img_emb.emb_pos.shape[1])
    return {"encoder_hidden_states": kept(text), "encoder_hidden_states_image": kept(clip_fea)}


def _two_pictures(clip_fea: torch.Tensor, positions: int) -> torch.Tensor:
    """The embeddings of the first and the last picture one after the other [B, 514, C] -> [2 B, 257, C]."""
    if clip_fea.shape[1] != positions:
        raise Refusal(
            f"CLIP vision of {clip_fea.shape[1]} tokens cannot be used with a sharded {_NAME} "
            "first-last-frame model.",
            f"The model that the ranks run takes {positions} tokens, those of two pictures.",
            "Works instead: CLIP vision of both pictures, or of none.",
        )
    return clip_fea.reshape(-1, positions // 2, clip_fea.shape[2])


def _result(_model: Any, arguments: Arguments, output: torch.Tensor) -> torch.Tensor:
    frames, height, width = arguments["x"].shape[2:]
    return output[:, :, :frames, :height, :width]


def _detection(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return {
        "num_heads": heads,
        "dim": heads * config["attention_head_dim"],
        "patch_size": tuple(config["patch_size"]),
        "out_dim": config["out_channels"] or config["in_channels"],
        "freq_dim": config["freq_dim"],
        "text_dim": config["text_dim"],
        "cross_attn_norm": config["cross_attn_norm"],
        "eps": config["eps"],
    }


# diffusers' names -> those of Wan's own layout, outside of blocks and in them.
_OUTSIDE = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
}
_IN_BLOCKS = {
    "scale_shift_table": "modulation",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "norm_added_k": "norm_k_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "norm2": "norm3",
}


def _original_shapes(shapes: Shapes) -> Shapes:
    if "condition_embedder.time_proj.weight" not in shapes:
        return shapes
    return {_original_name(name): shape for name, shape in shapes.items()}


def _original_name(name: str) -> str:
    path = f".{name}."
    for old, new in (_IN_BLOCKS if name.startswith("blocks.") else _OUTSIDE).items():
        path = path.replace(f".{old}.", f".{new}.")
    return path.strip(".")


WAN = NativeFamily(
    name=_NAME,
    transformer="WanTransformer3DModel",
    comfy_class=_comfy_class,
    method="_forward",
    call=_call,
    result=_result,
    blocks={"double_block": Blocks("blocks", ("hidden_states",))},
    replaced=(_SINUSOID, _TIME, _ROPE),
    detection=_detection,
    original_shapes=_original_shapes,
)
