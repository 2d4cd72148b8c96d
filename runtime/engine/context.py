"""The context axes in a model: its sequences are cut on the way into its blocks and joined on the way out.

What runs between is token by token (Linears, norms, rotary tables), except attention, which `attention.py` does over
all ranks. Where a model is cut, and which of its attentions see cut sequences, is its context plan
(`context_plans/`); everything outside runs on whole sequences, so that a model builds its masks as it always does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..spec import Refusal
from .attention import ContextAxes, Tokens, cut_lengths, join_parts
from .context_plans import Attends, Change, ContextPlan, Count, Cut, Whole, context_plan
from .dispatch import Participant, take_part


class Sequences:
    """The sequences of the running forward: their whole lengths by name, and how they lie on the ranks."""

    def __init__(self, axes: ContextAxes):
        self.axes = axes
        self.begin()

    def begin(self) -> None:
        """A new forward: nothing is known of its lengths yet."""
        self.lengths: dict[str, int] = {}
        self.key_masks: dict[str, torch.Tensor] = {}
        self.masks: dict[Attends, torch.Tensor | None] = {}
        self._joint_masks: dict[tuple[str, ...], torch.Tensor] = {}
        self._tokens: dict[tuple[str, ...], Tokens] = {}
        self.sample = 0  # the next one, where an attention takes one after the other

    def mask_keys(self, name: str, mask: torch.Tensor) -> None:
        """From here on the tokens of `name` that `mask` [B, tokens] marks False are attended to by nobody."""
        if self.key_masks.get(name) is not mask:
            self.key_masks[name] = mask
            self._joint_masks.clear()

    def key_mask(self, names: tuple[str, ...]) -> torch.Tensor | None:
        """The mask [B, 1, 1, tokens] of these sequences, joined in this order; None if none of them has one."""
        if not any(name in self.key_masks for name in names):
            return None
        if names not in self._joint_masks:
            one = next(self.key_masks[name] for name in names if name in self.key_masks)
            parts = [
                self.key_masks.get(name, one.new_ones(len(one), self.lengths.get(name, 0), dtype=torch.bool))
                for name in names
            ]
            self._joint_masks[names] = torch.cat([part.bool() for part in parts], dim=1)[:, None, None]
        return self._joint_masks[names]

    def mask(self, attends: Attends, own: torch.Tensor | None) -> torch.Tensor | None:
        """The whole mask of an attention, `own` being the one that the model hands it."""
        if attends in self.masks:
            mask = self.masks[attends]
            return mask[:, None] if mask is not None and mask.ndim == 3 else mask
        if own is not None and not isinstance(own, torch.Tensor):
            raise ValueError(f"a {type(own).__name__} is no mask that can be taken over a divided sequence")
        padding = self.key_mask(attends.keys)
        if padding is not None and attends.by_sample:
            self.sample += 1
            return padding[self.sample - 1 : self.sample]
        return own if padding is None else padding

    def tokens(self, names: tuple[str, ...]) -> Tokens:
        if names not in self._tokens:
            lengths = (cut_lengths(self.lengths.get(name, 0), self.axes) for name in names)
            self._tokens[names] = Tokens(tuple(lengths))
        return self._tokens[names]

    def cut(self, value: Any, cut: Change | None) -> Any:
        """This rank's part of a tensor, or of every tensor in a list, tuple or dict; anything else as it is."""
        if cut is None:
            return value
        if isinstance(cut, Count):
            return self.count(value, cut)
        if isinstance(cut, Whole):
            return self.join(value, cut.cut)
        if isinstance(cut, tuple):
            return type(value)(self.cut(*one) for one in zip(value, cut, strict=True))
        if isinstance(value, list | tuple):
            return type(value)(self.cut(one, cut) for one in value)
        if isinstance(value, dict):
            return {name: self.cut(one, cut) for name, one in value.items()}
        if not isinstance(value, torch.Tensor) or (cut.ndim and value.ndim != cut.ndim):
            return value
        if cut.leads:
            size = self.lengths[cut.of]
            first, rest = value.split([size, value.shape[cut.dim] - size], cut.dim)
            return torch.cat([self.cut(first, replace(cut, leads=False)), rest], cut.dim)
        size = value.shape[cut.dim]
        if cut.spreads and size == 1:
            return value
        known = self.lengths.setdefault(cut.of, size)
        if size != known:
            raise ValueError(f"the sequence '{cut.of}' has {known} tokens and {size}")
        if cut.pads:
            self.mask_keys(cut.of, value)
        if cut.everywhere and size < self.axes.size:
            raise ValueError(
                f"the sequence '{cut.of}' has {size} tokens, and the model needs one on each of {self.axes.size} ranks"
            )
        lengths = cut_lengths(size, self.axes)
        # Contiguous: what follows may view it, as it could the whole.
        part = value.narrow(cut.dim, sum(lengths[: self.axes.rank]), lengths[self.axes.rank]).contiguous()
        return torch.ones_like(part) if cut.pads else part

    def count(self, tokens: int, count: Count) -> int:
        """How many of the first (or last) `tokens` of a sequence this rank has."""
        lengths = cut_lengths(self.lengths[count.of], self.axes)
        start, own = sum(lengths[: self.axes.rank]), lengths[self.axes.rank]
        before = sum(lengths) - tokens if count.last else tokens
        first = min(max(before - start, 0), own)
        return own - first if count.last else first

    def join(self, value: torch.Tensor | None, cut: Cut) -> torch.Tensor | None:
        """The whole of a tensor that was computed from this rank's part of a sequence; None stays."""
        if value is None:
            return None
        lengths = cut_lengths(self.lengths[cut.of], self.axes)
        if value.shape[cut.dim] != lengths[self.axes.rank]:
            raise ValueError(
                f"{value.shape[cut.dim]} tokens of '{cut.of}' to join instead of {lengths[self.axes.rank]}"
            )
        return join_parts(value, cut.dim, lengths, self.axes)


def divide_sequence(
    model: nn.Module, mesh: DeviceMesh, entered: Callable[[], None] = lambda: None
) -> ContextAxes:
    """Make `model` compute over the ring and ulysses axes of `mesh`, by the plan of its class.

    Call it after the tensor axis and the substitutions are in place; `entered` is called before each collective. Raises
    Refusal for a class without a plan, and for an attention that the plan does not know: it would attend to this
    rank's tokens only.
    """
    plan = context_plan(model)
    sequences = Sequences(replace(ContextAxes.of_mesh(mesh), entered=entered))
    model.register_forward_pre_hook(lambda *_: sequences.begin())
    for pattern, arguments in plan.refuses.items():
        for _, module in _matching(model, pattern):
            _refuse_inputs(module, arguments)
    for pattern, changes in plan.inputs.items():
        for _, module in _matching(model, pattern):
            _cut_inputs(module, changes, sequences)
    for pattern, cuts in plan.outputs.items():
        for _, module in _matching(model, pattern):
            _cut_outputs(module, cuts, sequences)
    for pattern, cuts in plan.joins.items():
        for _, module in _matching(model, pattern):
            _join_outputs(module, cuts, sequences)
    _lead_attention(model, plan, sequences)
    return sequences.axes


def _matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose path fits: * is one number; a pattern that begins with ** fits any beginning.

    "blocks.-1" is the last one of a list. What a config does not have is no error.
    """
    owner, last, rest = pattern.partition(".-1")
    if last:
        pattern = f"{owner}.{len(model.get_submodule(owner)) - 1}{rest}"
    for path, module in model.named_modules():
        if fits(pattern, path):
            yield path, module


def fits(pattern: str, path: str) -> bool:
    inside = re.escape(pattern).replace(r"\*\*\.", r"(?:.+\.)?").replace(r"\*", r"\d+")
    return re.fullmatch(inside, path) is not None


# ---- cut and join


def _cut_inputs(module: nn.Module, cuts: Mapping[str, Change], sequences: Sequences) -> None:
    _change_inputs(module, {name: _bound(sequences.cut, cut) for name, cut in cuts.items()})


def _take_mask(module: nn.Module, attends: Attends, sequences: Sequences) -> None:
    def take(mask: torch.Tensor | None) -> None:
        sequences.masks[attends] = mask

    _change_inputs(module, {attends.mask: take})


def _count_samples(module: nn.Module, sequences: Sequences) -> None:
    def begin(*_: Any) -> None:
        sequences.sample = 0

    module.register_forward_pre_hook(begin)


def _refuse_inputs(module: nn.Module, names: Sequence[str]) -> None:
    def refusing(name: str) -> Any:
        def refuse(value: Any) -> None:
            if value is not None:
                raise Refusal(
                    f"{type(module).__name__} cannot take '{name}' with its sequence divided.",
                    "It goes by the places of tokens in the whole sequence.",
                    "Works instead: tensor.",
                )

        return refuse

    _change_inputs(module, {name: refusing(name) for name in names})


def _change_inputs(module: nn.Module, changes: Mapping[str, Any]) -> None:
    """Pass the arguments that `changes` names through their functions, in that order."""
    # Of the class: a substitution may have replaced the instance's forward by one that takes anything.
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        changed, named = list(args), dict(kwargs)
        for name, change in changes.items():
            if name in named:
                named[name] = change(named[name])
            elif name in names[: len(args)]:
                place = names.index(name)
                changed[place] = change(changed[place])
        return tuple(changed), named

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _cut_outputs(module: nn.Module, cuts: Mapping[int, Cut], sequences: Sequences) -> None:
    _change_outputs(module, {place: _bound(sequences.cut, cut) for place, cut in cuts.items()})


def _join_outputs(module: nn.Module, cuts: Mapping[int, Cut], sequences: Sequences) -> None:
    _change_outputs(module, {place: _bound(sequences.join, cut) for place, cut in cuts.items()})


def _bound(change: Any, cut: Change) -> Any:
    return lambda value: change(value, cut)


def _change_outputs(module: nn.Module, changes: Mapping[int, Any]) -> None:
    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, list | tuple):
            return changes[0](output)
        return type(output)(
            changes[place](value) if place in changes else value for place, value in enumerate(output)
        )

    module.register_forward_hook(hook)


# ---- attention


def _lead_attention(model: nn.Module, plan: ContextPlan, sequences: Sequences) -> None:
    """Lead every attention that the plan names to `attention.py`; those in `plan.whole` stay as they are."""
    for path, module in model.named_modules():
        if not hasattr(module, "processor"):
            continue
        attends = _named(plan, path)
        if attends is not None:
            if attends.mask:
                _take_mask(module, attends, sequences)
            if attends.by_sample:
                _count_samples(module, sequences)
            take_part(module, Participant(sequences, attends))
        elif not any(fits(pattern, path) for pattern in plan.whole):
            raise Refusal(
                f"{type(model).__name__} cannot run with its sequence divided.",
                f"Its attention '{path}' is not in the context plan and would see this rank's tokens only.",
                "Works instead: tensor.",
            )


def _named(plan: ContextPlan, path: str) -> Attends | None:
    return next((attends for pattern, attends in plan.attentions.items() if fits(pattern, path)), None)
