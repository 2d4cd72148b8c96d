"""Where each transformer is cut along its sequences: upstream's plans where they are right, ours elsewhere.

A plan is data: which tensors are cut on the way into a module or out of it, which results are joined, and which
attentions see cut sequences. In patterns * stands for a number, a leading ** for any beginning of a path, and -1 for
the last of a list. Names of sequences are free; those of one name have one length in a forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from ..spec import Refusal


@dataclass(frozen=True)
class Cut:
    """Dimension `dim` runs over the tokens of the sequence `of`; with `ndim`, only of tensors that have so many.

    With `spreads`, a tensor of a single token holds for all of them and stays as it is.
    """

    dim: int
    of: str
    ndim: int = 0
    spreads: bool = False


@dataclass(frozen=True)
class Attends:
    """The sequences an attention joins, in its own order: those of its queries, and those of its keys."""

    queries: tuple[str, ...]
    keys: tuple[str, ...]


def joint(*names: str) -> Attends:
    """Queries and keys are of the same sequences."""
    return Attends(names, names)


@dataclass(frozen=True)
class ContextPlan:
    """How one class is divided.

    `inputs`: module -> argument -> cut (of a list or tuple, every tensor). `outputs` and `joins`: module -> place in
    its result (0 for a single tensor) -> cut. `attentions`: module -> what it attends to. `whole`: attentions whose
    keys are not cut, so that this rank's queries need nobody else's: cross attention, refiners outside the blocks.
    `key_masks`: module -> argument -> the sequence whose padding it marks ([B, tokens], True for tokens that count).
    It is for models that put their mask together from cut sequences: they get none, and the attentions that see the
    sequence get it whole.
    """

    inputs: Mapping[str, Mapping[str, Cut]]
    joins: Mapping[str, Mapping[int, Cut]]
    attentions: Mapping[str, Attends]
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    whole: Sequence[str] = ()
    key_masks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


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
_WAN = ContextPlan(
    inputs={
        "": {"timestep": Cut(1, "picture", ndim=2)},  # of Wan 2.2's 5B model, one for each token
        "blocks.0": {"hidden_states": _PICTURE},
    },
    outputs={"rope": {0: _PICTURE, 1: _PICTURE}},
    joins={"proj_out": {0: _PICTURE}},
    attentions={"blocks.*.attn1": joint("picture")},
    whole=("blocks.*.attn2",),
)

_PLANS: Mapping[str, ContextPlan] = {
    "FluxTransformer2DModel": _FLUX,
    "QwenImageTransformer2DModel": _QWEN,
    "WanTransformer3DModel": _WAN,
}
CLASSES = frozenset(_PLANS)


def context_plan(model: nn.Module) -> ContextPlan:
    """The plan of a model's class. Raises Refusal for a class without one."""
    name = type(model).__name__
    if name not in _PLANS:
        raise Refusal(
            f"{name} cannot run with its sequence divided.",
            "There is no context plan for it: its attention would see one rank's tokens only.",
            "Works instead: tensor.",
        )
    return _PLANS[name]
