"""Qwen-Image, Qwen-Image-Edit (2509 with several reference pictures, 2511) and Qwen-Image-Layered.

The whole inner forward is replaced: cutting into patches and placing reference pictures is done here, with ComfyUI's
own helpers. diffusers would place odd grids, larger references and every placement but "index" elsewhere than ComfyUI
does, so the rotary frequencies are sent, and its own are not computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ....runtime.spec import Refusal
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

_NAME = "Qwen-Image"
_TIME = "time_text_embed"
_ROPE = "pos_embed"
_AT_TIME_ZERO = "index_timestep_zero"  # of Edit 2511: reference pictures are at time 0, not at the picture's
_BEFORE = "negative_index"  # of Layered
_SIDE_BY_SIDE = ("offset", "uxo")
# Named alike in both programs, with the same defaults.
_SIZES = (
    "out_channels",
    "num_attention_heads",
    "attention_head_dim",
    "joint_attention_dim",
    "axes_dims_rope",
)


def _comfy_class() -> type:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel


def _call(model: Any, arguments: Arguments) -> Call:
    x, timesteps, context = arguments["x"], arguments["timesteps"], arguments["context"]
    if arguments.get("guidance") is not None:
        raise refuse_argument(_NAME, "guidance", "Guidance")
    own, positions, _ = model.process_img(x)
    method = _reference_method(model, arguments)
    references = arguments["ref_latents"] or ()
    beside = [
        model.process_img(one, index=index, h_offset=top, w_offset=left)
        for one, (index, top, left) in zip(references, _places(method, references), strict=True)
    ]
    tokens = [own.shape[1], *(one.shape[1] for one, _, _ in beside)]
    at_time_zero = bool(beside) and method == _AT_TIME_ZERO
    control = (arguments["control"] or {}).get("input")
    sent: dict[str, Any] = {
        "hidden_states": joined(1, each(own), *(kept(one) for one, _, _ in beside)),
        "encoder_hidden_states": kept(context),
        "encoder_hidden_states_mask": _mask(model, arguments["attention_mask"], context),
        "timestep": each(timesteps),
        # Of the grids only the tokens count, for which of them are at time zero; the first grid's are not.
        "img_shapes": [_grids([tokens[0], sum(tokens[1:])] if at_time_zero else [sum(tokens)])],
        "controlnet_block_samples": residuals(
            control, len(model.transformer_blocks), sum(tokens), model.inner_dim, x.dtype
        ),
    }
    if getattr(model.time_text_embed, "use_additional_t_cond", False):
        sent["additional_t_cond"] = _layered_condition(arguments["additional_t_cond"], timesteps)
    all_positions = torch.cat([positions[:1], *(one[:1] for _, one, _ in beside)], dim=1)
    return Call(
        sent,
        inputs={_TIME: _times(model, timesteps)},
        outputs={
            _ROPE: (
                _frequencies(model, all_positions),
                _frequencies(model, _text_positions(model, x, context.shape[1])),
            )
        },
        lengths={"picture": sum(tokens), "text": context.shape[1]},
    )


def _default_method(model: Any) -> str:
    """Releases of ComfyUI before 0.5.0 have no such attribute, and know neither Edit 2511 nor masks."""
    return str(getattr(model, "default_ref_method", "index"))


def _reference_method(model: Any, arguments: Arguments) -> str:
    """How reference pictures are placed. Raises Refusal for what this ComfyUI or this checkpoint does not know."""
    if arguments["ref_latents"] is None:
        return "index"
    method = str(arguments.get("ref_latents_method", _default_method(model)))
    known = ["index", *_SIDE_BY_SIDE]
    if hasattr(model, "default_ref_method"):
        known += [_BEFORE, _AT_TIME_ZERO]
    if method not in known:
        raise Refusal(
            f"The reference method '{method}' cannot be used with a sharded {_NAME} model.",
            "This release of ComfyUI has no such method for it, and would take another one without a word.",
            f"Works instead: the reference methods {', '.join(known)}.",
        )
    if method == _AT_TIME_ZERO and _default_method(model) != _AT_TIME_ZERO:
        raise Refusal(
            f"The reference method '{method}' cannot be used with this {_NAME} checkpoint.",
            "It is not marked as Qwen-Image-Edit 2511, so the ranks show it references at the picture's own time.",
            "Works instead: the method 'index', a 2511 file with '__index_timestep_zero__', or its diffusers folder.",
        )
    return method


def _places(method: str, references: Sequence[torch.Tensor]) -> Iterator[tuple[int, int, int]]:
    """Index, top and left (in latent cells) of every reference picture, as ComfyUI's own forward has them."""
    height = width = 0
    for number, one in enumerate(references, start=1):
        if method not in _SIDE_BY_SIDE:
            yield (-number if method == _BEFORE else number), 0, 0
            continue
        top = left = 0
        if one.shape[-2] + height > one.shape[-1] + width:
            left = width
        else:
            top = height
        height, width = max(height, one.shape[-2] + top), max(width, one.shape[-1] + left)
        yield 1, top, left


def _grids(tokens: Sequence[int]) -> list[list[int]]:
    return [[1, 1, number] for number in tokens]


def _mask(model: Any, mask: torch.Tensor | None, context: torch.Tensor) -> Sent | None:
    """Which text tokens count, [B, T]; None if all do.

    ComfyUI adds a mask of floats to the scores and makes one of integers from 1 and 0. Releases that have no default
    method take no heed of masks, and their own code never gives one.
    """
    if mask is None or not hasattr(model, "default_ref_method"):
        return None
    if mask.is_floating_point():
        counts, ignored = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    else:
        counts, ignored = mask == 1, mask == 0
    if not bool((counts | ignored).all()):
        raise Refusal(
            f"An attention mask that weighs words cannot be used with a sharded {_NAME} model.",
            "The model that the ranks run can only ignore a word or take it whole.",
            "Works instead: a mask of whole numbers, 1 for a word that counts and 0 for one that does not, or none.",
        )
    return None if bool(counts.all()) else kept(counts.expand(context.shape[:2]))


def _layered_condition(given: torch.Tensor | None, timesteps: torch.Tensor) -> Sent:
    """ComfyUI takes 0 where nothing is given; diffusers wants it said."""
    return kept(timesteps.new_zeros(timesteps.shape, dtype=torch.long) if given is None else given)


def _times(model: Any, timesteps: torch.Tensor) -> Sent:
    """The timestep that diffusers would round to the weights' dtype, 0 to 1, and time zero where the model has both."""
    times = each(timesteps.float())
    if _default_method(model) != _AT_TIME_ZERO:
        return times
    return joined(0, times, kept(torch.zeros_like(timesteps, dtype=torch.float32)))


def _text_positions(model: Any, x: torch.Tensor, length: int) -> torch.Tensor:
    """Positions of the words [1, T, 3]: on all axes from where half the picture's longer side ends."""
    patch = model.patch_size
    start = max(((side + patch // 2) // patch) // 2 for side in x.shape[-2:])
    return torch.arange(start, start + length, device=x.device).reshape(1, -1, 1).repeat(1, 1, 3)


def _frequencies(model: Any, positions: torch.Tensor) -> Sent:
    """Rotary frequencies [T, head / 2] of positions [1, T, 3], complex as diffusers wants them.

    In bf16 ComfyUI rounds them; left as they are, the result comes neither nearer to its own nor further away.
    """
    rotations = model.pe_embedder(positions)[0, 0]  # [T, head / 2, 2, 2]
    return kept(torch.complex(rotations[..., 0, 0], rotations[..., 1, 0]), batched=False)


def _result(model: Any, arguments: Arguments, output: torch.Tensor) -> torch.Tensor:
    """The picture's own tokens put together again and cut to the latent's size."""
    x = arguments["x"]
    batch, channels, frames = x.shape[:3]
    rows, columns = (-(-side // model.patch_size) for side in x.shape[-2:])
    own = output[:, : frames * rows * columns].view(batch, frames, rows, columns, channels, 2, 2)
    whole = own.permute(0, 4, 1, 2, 5, 3, 6).reshape(batch, channels, frames, rows * 2, columns * 2)
    return whole[..., : x.shape[-2], : x.shape[-1]]


def _detection(config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises Refusal for a checkpoint that this release of ComfyUI would take for a plain Qwen-Image."""
    known = inspect.signature(_comfy_class()).parameters
    at_time_zero, layered = config.get("zero_cond_t", False), config.get("use_additional_t_cond", False)
    if at_time_zero and "default_ref_method" not in known:
        raise _too_old("Qwen-Image-Edit 2511", "sees reference pictures at time zero", "0.5.0")
    if layered and "use_additional_t_cond" not in known:
        raise _too_old("Qwen-Image-Layered", "makes several layers", "0.6.0")
    wanted = {
        **{name: config[name] for name in _SIZES if name in config},
        "default_ref_method": _AT_TIME_ZERO if at_time_zero else _BEFORE if layered else "index",
        "use_additional_t_cond": layered,
    }
    return {name: value for name, value in wanted.items() if name in known}


def _too_old(model: str, feature: str, release: str) -> Refusal:
    return Refusal(
        f"{model} cannot be loaded with this release of ComfyUI.",
        f"The model {feature}, which this release does not know: it would make another picture without a word.",
        f"Works instead: ComfyUI {release} or later, or a Qwen-Image or Qwen-Image-Edit 2509 model.",
    )


QWEN_IMAGE = NativeFamily(
    name=_NAME,
    transformer="QwenImageTransformer2DModel",
    comfy_class=_comfy_class,
    method="_forward",
    call=_call,
    result=_result,
    blocks={"double_block": Blocks("transformer_blocks", ("encoder_hidden_states", "hidden_states"))},
    replaced=(_TIME, _ROPE),
    detection=_detection,
)
