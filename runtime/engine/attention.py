"""The context axes: the sequence is split over ranks, attention puts it together.

So far Ulysses with upstream's plans and exchange (diffusers `_cp_plan`, `apply_context_parallel`): right for the
families accepted here, for sequence lengths the degree divides. Ring, masks and other lengths are refused earlier.
"""

from __future__ import annotations

import torch
from diffusers import ContextParallelConfig
from diffusers.hooks import apply_context_parallel
from diffusers.models._modeling_parallel import ParallelConfig
from torch.distributed.device_mesh import DeviceMesh

from ..spec import Refusal
from .backend import Backend


def split_sequence(model: torch.nn.Module, ulysses: int, mesh: DeviceMesh, backend: Backend) -> None:
    """Split the sequence of `model` over the mesh's ulysses axis.

    `enable_parallelism` would do the same, but it asks for an accelerator even when it is given a CPU mesh; the
    parts used here are public and take the mesh as it is.
    """
    inner = ContextParallelConfig(ulysses_degree=ulysses, mesh=mesh)
    config = ParallelConfig(context_parallel_config=inner)
    config.setup(backend.rank, backend.world_size, backend.device, mesh=mesh)
    taking_part = 0
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if processor is not None and hasattr(processor, "_parallel_config"):
            processor._parallel_config = config
            taking_part += 1
        elif processor is not None:
            # Upstream skips such processors without a word, and they attend to the local tokens only.
            raise Refusal(
                f"{type(model).__name__} cannot run with ulysses {ulysses}.",
                f"Its attention ({type(processor).__name__}) cannot take part in context parallelism.",
                "Works instead: tensor.",
            )
    if not taking_part:
        raise RuntimeError(f"no attention of {type(model).__name__} takes part in context parallelism")
    model._parallel_config = config
    apply_context_parallel(model, inner, model._cp_plan)
