"""The vocabulary in which a family says how ComfyUI's call of its denoiser becomes diffusers' call of the same model.

A family is a table: which class of ComfyUI, which of its methods is replaced, and two functions that turn that
method's arguments into a `Call` and the ranks' answer into what the method would have returned. The ranks know no
families: everything that differs between both programs is in the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ....runtime.spec import Refusal

Shapes = Mapping[str, tuple[int, ...]]
Arguments = Mapping[str, Any]  # of the replaced method by name, defaults applied, **kwargs merged in


@dataclass(frozen=True)
class Sent:
    """One tensor of a call. `parts` are (tensor, whether it stays the same over a run), joined along `dim`.

    `batched`: dim 0 is the batch. `tokens`: dim 1 follows the picture's tokens, of which each rank of a context axis
    has its own part.
    """

    parts: tuple[tuple[torch.Tensor, bool], ...]
    dim: int = 0
    batched: bool = True
    tokens: bool = False


def each(tensor: torch.Tensor, *, batched: bool = True, tokens: bool = False) -> Sent:
    """A tensor that changes with every call: the latent, the timestep, residuals."""
    return Sent(((tensor, False),), batched=batched, tokens=tokens)


def kept(tensor: torch.Tensor, *, batched: bool = True) -> Sent:
    """A tensor that stays the same over a run (text, positions, image conditions): it crosses once."""
    return Sent(((tensor, True),), batched=batched)


def joined(dim: int, *sent: Sent) -> Sent:
    """One argument whose parts are sent each in its own way and joined along `dim` on the rank."""
    return Sent(tuple(part for one in sent for part in one.parts), dim=dim, batched=sent[0].batched)


@dataclass(frozen=True)
class Call:
    """One call of a diffusers transformer.

    `arguments` are its keyword arguments: `Sent`, plain numbers and None, and lists and dicts of these. `inputs` gives
    named modules another first argument than the model would, `outputs` makes them answer without computing: where the
    model of diffusers would compute something else than ComfyUI does. `lengths` are the sequences that a context axis
    divides, by what they are called in messages.
    """

    arguments: Mapping[str, Any]
    inputs: Mapping[str, Sent] = field(default_factory=dict)
    outputs: Mapping[str, Sent | tuple[Sent, ...]] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)


class Blocks(NamedTuple):
    """Blocks of one kind in the diffusers model: their list, and the arguments a block that is skipped hands back.

    One name: the block returns that argument; several: a tuple of them.
    """

    path: str
    returns: tuple[str, ...]


def _as_they_are(shapes: Shapes) -> Shapes:
    return shapes


@dataclass(frozen=True, eq=False)  # one of each, told apart by identity
class NativeFamily:
    """A family whose stock MODEL can run on a group.

    `call` and `result` get the model of ComfyUI (its own class, on the meta device: configuration and helper methods,
    no weights) and the arguments of `method`. `detection` corrects what ComfyUI's detection takes for granted where
    the checkpoint says otherwise (head counts, rotary axes); `original_shapes` renames a diffusers folder's
    parameters to the layout ComfyUI detects.
    """

    name: str  # as in runtime/families
    transformer: str  # the diffusers class
    comfy_class: Callable[[], type]  # imported when it is asked for
    method: str  # the inner forward that is replaced
    call: Callable[[Any, Arguments], Call]
    result: Callable[[Any, Arguments, torch.Tensor], torch.Tensor]
    blocks: Mapping[str, Blocks]
    replaced: tuple[str, ...] = ()  # modules of the diffusers model that `inputs` and `outputs` may name
    detection: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    original_shapes: Callable[[Shapes], Shapes] = _as_they_are


def refuse_argument(family: str, name: str, feature: str) -> Refusal:
    """For an argument of ComfyUI's model that the model of diffusers has no counterpart for."""
    return Refusal(
        f"{feature} cannot be used with a sharded {family} model.",
        f"The model that the ranks run has no counterpart for '{name}', and leaving it out would change the result.",
        "Works instead: the stock Load Diffusion Model for this workflow, or the workflow without it.",
    )


def residuals(
    samples: list[torch.Tensor | None] | None, blocks: int, tokens: int, width: int, dtype: torch.dtype
) -> list[Sent] | None:
    """ControlNet residuals [B, tokens, width] for the first `blocks` blocks, as diffusers takes them: one for each.

    They get the model's `dtype`, as ComfyUI adds them in place; diffusers would go on in the wider of both. Blocks
    without one get a zero that fits any shape. A residual covers the picture's own tokens, the first ones;
    where others follow (reference pictures) it is filled up with zeros, for ComfyUI leaves those alone. None if
    there is nothing to add. Refuses residuals of another shape: the ControlNet is another model's.
    """
    present = list(samples or ())[:blocks]
    first = next((one for one in present if one is not None), None)
    if first is None:
        return None
    if first.ndim != 3 or first.shape[-1] != width or first.shape[1] > tokens:
        raise Refusal(
            "This ControlNet is not for this model.",
            f"What it adds has the shape {' x '.join(map(str, first.shape))}; the model's tokens are {width} wide.",
            "Choose a ControlNet of the model's own family.",
        )
    zero = each(first.new_zeros(1, 1, 1, dtype=dtype), batched=False)
    # ControlNets give several blocks the same residual: what is one tensor stays one, and crosses once.
    sent = {id(one): _filled_up(one.to(dtype), tokens) for one in present if one is not None}
    filled = [zero if one is None else sent[id(one)] for one in present]
    return [*filled, *[zero] * (blocks - len(filled))]


def _filled_up(residual: torch.Tensor, tokens: int) -> Sent:
    missing = tokens - residual.shape[1]
    if missing > 0:
        residual = torch.nn.functional.pad(residual, (0, 0, 0, missing))
    return each(residual)
