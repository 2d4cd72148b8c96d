"""Leads a model's own attention to `attention.py`, whatever way diffusers calls it.

Newer processors go through diffusers' dispatcher, which hands their `_parallel_config` to the backend; every backend
that takes part in context parallelism then calls one function of `attention_dispatch`, and that one is replaced here:
upstream's drops or misplaces masks, asks for even lengths and gathers all keys in a ring (`facts/parallel.md` 3.5;
diffusers #12568, #13277, #14316). Older processors call PyTorch's attention themselves: upstream lets them attend
to one rank's tokens without a word. Their call is taken over while their module runs.

Private names of diffusers, for 0.42.x; `tests/group/test_upstream_context.py` tells when upstream has caught up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models import attention_dispatch
from torch import nn
from torch.overrides import TorchFunctionMode

from .attention import Kernel, context_attention, native_kernel

if TYPE_CHECKING:
    from .context import Sequences
    from .context_plans import Attends


@dataclass(frozen=True)
class Participant:
    """What an attention module takes part with, in the place of upstream's ParallelConfig."""

    sequences: Sequences
    attends: Attends

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
        if mask is None:
            mask = self.sequences.key_mask(self.attends.keys)
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
    processor: Any = module.processor
    if hasattr(processor, "_parallel_config"):
        processor._parallel_config = participant
        attention_dispatch._templated_context_parallel_attention = _dispatched
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
    return _parallel_config.attention(query, key, value, attn_mask, scale, _kernel(forward_op))


def _kernel(forward_op: Any) -> Kernel:
    """Upstream's operator of a backend in our terms. Native has no log-sum-exp there, so ours is used."""
    if forward_op is attention_dispatch._native_attention_forward_op:
        return native_kernel

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        with_lse: bool,
    ) -> Any:
        return forward_op(
            None, query, key, value, attn_mask=mask, scale=scale, return_lse=with_lse, _save_ctx=False
        )

    return kernel


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
        tokens_first = (one.transpose(1, 2) for one in (query, key, value))
        return self.participant.attention(*tokens_first, attn_mask, scale, native_kernel).transpose(1, 2)
