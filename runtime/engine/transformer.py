"""One transformer on this rank, under the tensor axis: opened, planned, read and made to compute with the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..spec import ParallelSpec, Refusal
from .backend import Backend
from .checkpoints.source import Checkpoint
from .loading import SliceRead, bytes_to_read, check_sources, empty_model, read_weights
from .plans import TensorPlan, apply_plan, tensor_plan
from .tensor import Ranks, Shard


@dataclass(frozen=True)
class Planned:
    """A transformer that is planned and checked, of which nothing has been read yet."""

    model: torch.nn.Module
    checkpoint: Checkpoint
    plan: TensorPlan | None
    shards: dict[str, Shard]
    ranks: Ranks

    @property
    def bytes_to_read(self) -> int:
        """Of the files, on this rank."""
        return bytes_to_read(self.checkpoint.sources, self.shards, self.ranks.rank, self.ranks.shares)


def plan_transformer(
    checkpoint: Checkpoint, parallel: ParallelSpec, mesh: DeviceMesh | None = None
) -> Planned:
    """Decide what this rank reads; without a mesh all of it, for this rank alone.

    Raises Refusal for a plan or a checkpoint that does not fit the model.
    """
    model = empty_model(checkpoint.model_class, checkpoint.config)
    check_sources(model, checkpoint.sources)
    used = model.state_dict().keys()  # what the class says is no fault to find in a file is not read
    sources = {name: source for name, source in checkpoint.sources.items() if name in used}
    checkpoint = replace(checkpoint, sources=sources)
    if mesh is None:
        return Planned(model, checkpoint, None, {}, Ranks.alone())
    axis = mesh["tensor"]
    ranks = Ranks(axis.get_group(), axis.get_local_rank(), parallel.shares)
    plan = tensor_plan(model, parallel.shares, parallel.tensor_plan) if parallel.tensor > 1 else None
    return Planned(model, checkpoint, plan, plan.shards(model) if plan else {}, ranks)


def load_transformer(
    planned: Planned,
    backend: Backend,
    dtype: torch.dtype,
    *,
    on_bytes: Callable[[int], None],
    cancelled: Callable[[], bool],
    on_slice: Callable[[SliceRead], None] | None = None,
) -> torch.nn.Module:
    """Read this rank's part and return a model that computes with the other ranks. Raises Cancelled."""
    read_weights(
        planned.model,
        planned.checkpoint.sources,
        planned.shards,
        rank=planned.ranks.rank,
        shares=planned.ranks.shares,
        dtype=dtype,
        device=backend.device,
        on_bytes=on_bytes,
        cancelled=cancelled,
        on_slice=on_slice,
        pulse=backend.pulse,
    )
    if planned.plan is not None:
        ranks = planned.ranks._replace(entered=backend.pulse.entered)
        apply_plan(planned.model, planned.plan, ranks)
        _refuse_calls_on_parts(planned.model)
    return planned.model


# Methods of diffusers' models that would act on this rank's part as if it were the whole, without a word.
_NEED_THE_WHOLE = {
    "save_pretrained": (
        "be saved",
        "this rank's part would be written as if it were the model",
        "copy its files",
    ),
    "load_lora_adapter": (
        "take a LoRA",
        "the LoRA's matrices are those of whole weights",
        "merge it into the file",
    ),
    "add_adapter": (
        "take an adapter",
        "the adapter's matrices are those of whole weights",
        "merge it into the file",
    ),
    "fuse_qkv_projections": (
        "fuse its projections",
        "their parts are cut each on its own",
        "leave them as they are",
    ),
    "enable_layerwise_casting": (
        "be cast layer by layer",
        "its layers wait for other ranks",
        "a smaller dtype",
    ),
    "enable_group_offload": (
        "be offloaded in groups",
        "its layers wait for other ranks",
        "a larger tensor degree",
    ),
    "enable_parallelism": (
        "be divided again",
        "it is already divided",
        "set the degrees before it is loaded",
    ),
}


def _refuse_calls_on_parts(model: torch.nn.Module) -> None:
    for name, (what, why, instead) in _NEED_THE_WHOLE.items():
        if not hasattr(model, name):
            continue

        def refuse(
            *_: object, what: str = what, why: str = why, instead: str = instead, **__: object
        ) -> None:
            raise Refusal(
                f"A {type(model).__name__} that is divided over the tensor axis cannot {what}.",
                f"Every rank holds a part of each weight: {why}.",
                f"Works instead: {instead}.",
            )

        setattr(model, name, refuse)
