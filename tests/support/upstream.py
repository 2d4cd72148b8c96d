"""Upstream's own context parallelism on CPU ranks, for tests and benchmarks that put it beside ours.

diffusers has no way to run it there: its native attention returns no log-sum-exp, which a ring needs, gloo gathers
no uneven parts, and a machine without an accelerator counts zero devices. `running` gives it these three, and nothing
else, while it is active. Private names of diffusers 0.42.x (`facts/parallel.md` 5.2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.hooks import context_parallel
from diffusers.models import attention_dispatch
from torch.distributed.device_mesh import DeviceMesh

from runtime.engine.backend import attention_with_lse

_NATIVE = attention_dispatch._native_attention_forward_op
# `runtime.engine.dispatch` puts ours in its place as soon as a model is divided; this module is imported before.
original = attention_dispatch._templated_context_parallel_attention
assert original.__module__ == attention_dispatch.__name__, "ours already stands in for upstream's attention"


@contextlib.contextmanager
def running(*, with_lse: bool = True, uneven_gather: bool = True) -> Iterator[None]:
    """While active diffusers' own context parallelism is in place, and what the flags name is made to work.

    Models of ours run only outside it, models of upstream's only inside.
    """
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(attention_dispatch, "_templated_context_parallel_attention", original))
        stack.enter_context(patch(torch.accelerator, "device_count", lambda: 1))
        if with_lse:
            stack.enter_context(patch(attention_dispatch, "_native_attention_forward_op", _native_with_lse))
        if uneven_gather:
            stack.enter_context(patch(context_parallel, "_all_gather_anything", _gather_uneven))
        yield


def config(mesh: DeviceMesh, *, anything: bool = False) -> ParallelConfig:
    """Upstream's description of the ring and ulysses axes of `mesh`; with `anything`, in the mode of that name."""
    ring, ulysses = mesh["ring"].size(), mesh["ulysses"].size()
    context = ContextParallelConfig(
        ring_degree=ring,
        ulysses_degree=ulysses,
        ring_anything=anything and ring > 1,
        ulysses_anything=anything and ulysses > 1,
        mesh=mesh["ring", "ulysses"],
    )
    return ParallelConfig(context_parallel_config=context)


def enable(
    model: Any, mesh: DeviceMesh, *, anything: bool = False, plan: Mapping[str, Any] | None = None
) -> None:
    """Upstream's `enable_parallelism`, by `plan` or by the class's own. Call it inside `running`."""
    model.enable_parallelism(config=config(mesh, anything=anything), cp_plan=plan)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parallel: ParallelConfig,
    mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Upstream's attention of this rank's tokens [B, S, H, D]. Call it inside `running`, with a config set up."""
    return original(
        query,
        key,
        value,
        attn_mask=mask,
        forward_op=attention_dispatch._native_attention_forward_op,
        backward_op=None,
        _parallel_config=parallel,
        **options,
    )


def set_up(parallel: ParallelConfig, mesh: DeviceMesh) -> ParallelConfig:
    """`parallel` with its groups, as `enable_parallelism` gives it to a model's attention."""
    parallel.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh["ring", "ulysses"])
    return parallel


def inside(step: Callable[[], Any]) -> Callable[[], Any]:
    """`step` as one that runs inside `running`."""

    def run() -> Any:
        with running():
            return step()

    return run


def _native_with_lse(
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    if not return_lse:
        given = (attn_mask, dropout_p, is_causal, scale, enable_gqa, False)
        return _NATIVE(ctx, query, key, value, *given, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    heads_first = (one.transpose(1, 2) for one in (query, key, value))
    out, lse = attention_with_lse(*heads_first, attn_mask, scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _gather_uneven(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Parts of different lengths along `dim`, joined: padded to the longest, gathered, and cut again."""
    ranks = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([tensor.shape[dim]]), group=group)
    most = max(int(length) for length in lengths)
    sent = tensor.new_zeros(*tensor.shape[:dim], most, *tensor.shape[dim + 1 :])
    sent.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    parts = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather(parts, sent, group=group)
    return torch.cat([p.narrow(dim, 0, int(n)) for p, n in zip(parts, lengths, strict=True)], dim=dim)
