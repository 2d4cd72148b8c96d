"""The attention backend of one model, and diffusers' operator of a backend as a kernel of ours.

What each backend can do, and what is refused before loading, is in `attention_backends.py`; here is what only a rank
can see: whether its card and the package's build suit, and whether a mask comes along.

Private names of diffusers, for 0.42.x.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import attention_backend
from diffusers.models import attention_dispatch
from torch import nn

from ..attention_backends import (
    BACKENDS,
    AttentionBackend,
    broken_refusal,
    card_refusal,
    check_backend_name,
    class_refusal,
    mask_refusal,
)
from .attention import Kernel, native_kernel


def set_attention(model: Any, name: str) -> None:
    """Let `model`, and no other, attend with the backend `name`. Call it before the model is divided and read.

    "native" leaves the model as its class has it. Raises Refusal for a name that does not exist, a package that does
    not load, a card that is too old and a model that takes no choice; a mask that the kernels cannot take is refused
    as the model runs.
    """
    check_backend_name(name)
    if name in ("auto", "native"):
        return
    backend = BACKENDS[name]
    if torch.cuda.is_available() and (here := torch.cuda.get_device_capability()) < backend.capability:
        raise card_refusal(name, here)
    try:
        # Upstream's setter also makes the backend the default of the whole process; leaving the context undoes that.
        with attention_backend("native"):
            model.set_attention_backend(backend.upstream)
    except RuntimeError as error:
        raise broken_refusal(name) from error
    if _chosen(model) != {backend.upstream}:
        raise class_refusal(name, type(model).__name__)
    if not backend.masks:
        _refuse_masks(model, backend)


def _chosen(model: nn.Module) -> set[Any]:
    """The backends of all attentions of `model` that have one."""
    processors: list[Any] = [getattr(module, "processor", None) for module in model.modules()]
    return {one._attention_backend for one in processors if hasattr(one, "_attention_backend")}


def _refuse_masks(model: Any, backend: AttentionBackend) -> None:
    """Upstream raises a ValueError for a mask that a backend cannot take: say it in our words."""
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ValueError as error:
            if "attn_mask" in str(error):
                raise mask_refusal(backend.name) from error
            raise

    model.forward = forward


# ---- kernels of context parallelism


@dataclass(frozen=True)
class UpstreamKernel:
    """A `Kernel` (see `attention.py`) that runs diffusers' operator of `backend`."""

    backend: AttentionBackend
    forward_op: Any

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        with_lse: bool,
    ) -> Any:
        if mask is not None:
            mask = _additive(mask, query.dtype)
        return self.forward_op(
            None, query, key, value, attn_mask=mask, scale=scale, return_lse=with_lse, _save_ctx=False
        )


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """These operators add a mask as it is, also a boolean one. Finite: a part masked as a whole must not become NaN."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min / 2)


def kernel_of(forward_op: Any) -> Kernel:
    """Upstream's operator of a backend in our terms. Native has no log-sum-exp there, so ours is used.

    Raises RuntimeError for a backend that is none of ours.
    """
    operator = forward_op.func if isinstance(forward_op, functools.partial) else forward_op
    if operator is attention_dispatch._native_attention_forward_op:
        return native_kernel
    known = {
        attention_dispatch._flash_attention_forward_op: "flash",
        attention_dispatch._cudnn_attention_forward_op: "cudnn",
        attention_dispatch._sage_attention_forward_op: "sage",
    }
    if operator not in known:
        raise RuntimeError(f"the operator {operator.__name__} is of no attention backend that is known here")
    return UpstreamKernel(BACKENDS[known[operator]], forward_op)


def check_mask(kernel: Kernel, mask: torch.Tensor | None) -> None:
    """Refuse a mask that `kernel` cannot take, before a rank that has no tokens goes on alone."""
    if mask is not None and isinstance(kernel, UpstreamKernel) and not kernel.backend.masks:
        raise mask_refusal(kernel.backend.name)
