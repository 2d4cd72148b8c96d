"""Real groups of CPU ranks for tests, and a short way to run a pipeline on one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from runtime import planner
from runtime.group import GROUPS, Report, Slot
from runtime.spec import Decode, Encode, ParallelConfig, ParallelSpec, Sample
from tests.support.reference import Run


def layout_of(*, shares: tuple[int, ...] = (), tensor_plan: str = "", **degrees: int) -> ParallelConfig:
    """An explicit layout on CPU ranks."""
    spec = ParallelSpec(tensor_shares=shares, **degrees)
    return ParallelConfig(strategy="manual", degrees=spec, devices="cpu", tensor_plan=tensor_plan)


def make_slot(folder: Path, config: ParallelConfig, dtype: str = "auto") -> Slot:
    facts = planner.check_pipeline(folder, config)
    layout = planner.plan(facts, config, cards=(), dtype=dtype)
    return GROUPS.slot(layout, planner.model_spec(facts, dtype, layout))


@contextmanager
def slot_on_ranks(folder: Path, config: ParallelConfig, dtype: str = "auto") -> Iterator[Slot]:
    """A loaded slot; its group is closed afterwards."""
    slot = make_slot(folder, config, dtype)
    try:
        slot.ensure()
        yield slot
    finally:
        GROUPS.close_all()


def encode(slot: Slot, prompt: str) -> Mapping[str, torch.Tensor]:
    return slot.call(Encode(slot=slot.name, prompt=prompt)).tensors


def sampling(
    slot: Slot, run: Run, *, latent: torch.Tensor | None = None, denoise: float = 1.0, preview: bool = False
) -> tuple[Sample, dict[str, torch.Tensor]]:
    """The request for a run, and its tensors: the prompt is encoded for it."""
    tensors = dict(encode(slot, run.prompt))
    if latent is not None:
        tensors["latent"] = latent
    request = Sample(
        slot=slot.name,
        seed=run.seed,
        steps=run.steps,
        guidance=run.guidance,
        width=run.width,
        height=run.height,
        batch_size=run.batch_size,
        denoise=denoise,
        preview=preview,
    )
    return request, tensors


def sample(
    slot: Slot,
    run: Run,
    *,
    latent: torch.Tensor | None = None,
    denoise: float = 1.0,
    report: Report | None = None,
) -> torch.Tensor:
    """Latents [B, C, h, w] in VAE space."""
    request, tensors = sampling(slot, run, latent=latent, denoise=denoise, preview=report is not None)
    return slot.call(request, tensors, report=report).tensors["samples"].clone()


def decode(slot: Slot, latent: torch.Tensor, *, tiled: bool = False) -> torch.Tensor:
    """Pictures [B, H, W, 3]."""
    return slot.call(Decode(slot=slot.name, tiled=tiled), {"samples": latent}).tensors["images"].clone()
