"""Leads a model's own attention to `attention.py`, whatever way diffusers calls it.

Newer processors go through diffusers' dispatcher, which hands their `_parallel_config` to the backend; every backend
that takes part in context parallelism then calls one function of `attention_dispatch`, and that one is replaced here:
upstream's drops or misplaces masks, asks for even lengths and gathers all keys in a ring (`facts/parallel.md` 3.5;
diffusers #12568, #13277, #14316). Older processors call PyTorch's attention themselves: upstream lets them attend
to one rank's tokens without a word. Their call is taken over while their module runs.

Private names of diffusers, for 0.42.x; `tests/group/test_upstream_context.py` tells when upstream has caught up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models import attention_dispatch
from torch import nn
from torch.overrides import TorchFunctionMode

from .attention import Kernel, context_attention, native_kernel
from .kernels import check_mask, kernel_of

if TYPE_CHECKING:
    from .context import Sequences
    from .context_plans import Attends

_REPLACED = "_templated_context_parallel_attention"


@dataclass(frozen=True)
class Participant:
    """What an attention module takes part with, in the place of upstream's ParallelConfig."""

    sequences: Sequences
    attends: Attends

    @property
    def lacks_tokens(self) -> bool:
        """Whether a sequence is shorter than the ranks are many, and this one has nothing of it."""
        lengths, rank = self.sequences.lengths, self.sequences.axes.rank
        return any(0 < lengths.get(name, 0) <= rank for name in {*self.attends.queries, *self.attends.keys})

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        kernel: Kernel,
    ) -> torch.Tensor:
        """[B, S, H, D] of this rank's tokens. `mask` is the model's own, whole."""
        mask = self.sequences.mask(self.attends, mask)
        check_mask(kernel, mask)
        return context_attention(
            query,
            key,
            value,
            mask,
            scale,
            queries=self.sequences.tokens(self.attends.queries),
            keys=self.sequences.tokens(self.attends.keys),
            axes=self.sequences.axes,
            kernel=kernel,
        )


def take_part(module: nn.Module, participant: Participant) -> None:
    """Make the attention `module` compute with the other ranks."""
    _bear_empty_parts(module, participant)
    processor: Any = module.processor
    if hasattr(processor, "_parallel_config"):
        if not hasattr(attention_dispatch, _REPLACED):
            raise RuntimeError(
                f"this diffusers has no attention_dispatch.{_REPLACED}: its attention has changed"
            )
        processor._parallel_config = participant
        setattr(attention_dispatch, _REPLACED, _dispatched)
    else:
        _take_over(module, participant)


def _dispatched(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    forward_op: Any,
    backward_op: Any,
    _parallel_config: Participant,
) -> torch.Tensor:
    """Stands in for upstream's function of the same signature. Inference only."""
    if is_causal or return_lse or dropout_p:
        raise ValueError("causal attention, dropout and log-sum-exp are not taken over a divided sequence")
    return _parallel_config.attention(query, key, value, attn_mask, scale, kernel_of(forward_op))


def _take_over(module: nn.Module, participant: Participant) -> None:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _TakenOver(participant) as taken:
            result = original(*args, **kwargs)
        if not taken.calls:
            raise RuntimeError(f"{type(module).__name__} attends in a way that cannot be divided")
        return result

    module.forward = forward


class _TakenOver(TorchFunctionMode):
    """While it is active, PyTorch's attention on [B, H, S, D] is that over all ranks."""

    def __init__(self, participant: Participant):
        super().__init__()
        self.participant, self.calls = participant, 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        self.calls += 1
        return self._attention(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if is_causal or dropout_p:
            raise ValueError("causal attention and dropout are not taken over a divided sequence")
        if attn_mask is not None and attn_mask.ndim < 4:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
        q, k, v = (one.transpose(1, 2) for one in (query, key, value))
        return self.participant.attention(q, k, v, attn_mask, scale, native_kernel).transpose(1, 2)


def _bear_empty_parts(module: nn.Module, participant: Participant) -> None:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _EmptyParts() if participant.lacks_tokens else nullcontext():
            return original(*args, **kwargs)

    module.forward = forward


class _EmptyParts(TorchFunctionMode):
    """While it is active, view and reshape find a -1 for tensors without tokens too: PyTorch calls it ambiguous."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in (torch.Tensor.view, torch.Tensor.reshape) and not args[0].numel():
            sizes = args[1] if isinstance(args[1], tuple | list) else args[1:]
            if -1 in sizes:
                args = (args[0], _inferred(args[0].shape, sizes))
        return function(*args, **(kwargs or {}))


def _inferred(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """`sizes` without their -1: what it is for one token, or no tokens where it stands for these."""
    one_token, known = (math.prod(size or 1 for size in one if size != -1) for one in (shape, sizes))
    return [(one_token // known if 0 in sizes else 0) if size == -1 else size for size in sizes]
