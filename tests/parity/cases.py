"""What is compared: families, layouts, and a figure that shows the comparison would notice a wrong split."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.groups import layout_of, sample, slot_on_ranks
from tests.support.models import DEMO, FluxSize, make_flux
from tests.support.reference import Run, max_rel, reference_latents, reference_pipeline

Degrees = dict[str, int]
# Ways to divide the sequence, and both the sequence and the weights, over two and four ranks.
CONTEXT_LAYOUTS: tuple[Degrees, ...] = (
    {"ulysses": 2},
    {"ulysses": 4},
    {"ring": 2},
    {"ring": 4},
    {"ulysses": 2, "ring": 2},
    {"tensor": 2, "ulysses": 2},
    {"tensor": 2, "ring": 2},
)
LAYOUTS: tuple[Degrees, ...] = ({"tensor": 2}, {"tensor": 3}, {"tensor": 4}, *CONTEXT_LAYOUTS)
TOLERANCE = 1e-4  # latents after 8 steps in fp32


@dataclass(frozen=True)
class Family:
    """A pipeline, the run it is compared on, and the layouts it is compared in."""

    name: str
    run: Run
    size: FluxSize | None = None  # None is the trained demo model
    layouts: tuple[Degrees, ...] = LAYOUTS

    def folder(self, directory: Path) -> Path:
        return DEMO if self.size is None else make_flux(directory / self.name, seed=11, size=self.size)


FAMILIES = (
    Family("flux-demo", Run()),
    # Fresh random weights, a picture that is no square, two at a time, head widths unlike the demo's.
    Family("flux-random", Run(width=160, height=96, batch_size=2, seed=3, guidance=2.0), FluxSize(heads=8)),
    Family("flux-schnell", Run(width=64, height=128, seed=5), FluxSize(guidance=False, single_blocks=3)),
    # Odd lengths: no degree divides the picture's 45 tokens.
    Family(
        "flux-odd",
        Run(width=144, height=80, seed=9),
        FluxSize(heads=6, double_blocks=1),
        ({"tensor": 2}, {"tensor": 3}, {"tensor": 6}, *CONTEXT_LAYOUTS, {"tensor": 3, "ring": 2}),
    ),
    # Heads that no degree divides: 7 over 2, 3, 4, 5 and 7 ranks. And 35 tokens.
    Family(
        "flux-uneven",
        Run(width=112, height=80, seed=4, batch_size=2),
        FluxSize(heads=7, double_blocks=1),
        (
            *({"tensor": 2}, {"tensor": 3}, {"tensor": 5}, {"tensor": 7}),
            *({"ulysses": 3}, {"ring": 3}, {"ulysses": 4}, {"ulysses": 7}),
            *({"tensor": 2, "ulysses": 2}, {"tensor": 3, "ring": 2}, {"ulysses": 2, "ring": 3}),
        ),
    ),
    Family(
        "flux-eight",
        Run(width=128, height=64, seed=2),
        FluxSize(heads=8, double_blocks=1, single_blocks=1),
        (
            *({"tensor": 8}, {"ulysses": 8}, {"ring": 8}),
            *({"ulysses": 4, "ring": 2}, {"tensor": 2, "ulysses": 2, "ring": 2}),
        ),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """How far a layout is from one process, and how far a wrong split would be."""

    max_abs: float
    max_rel: float
    wrong_split: float


class Reference:
    """One process's result for a family, computed once."""

    def __init__(self, family: Family, directory: Path):
        self.family, self.folder = family, family.folder(directory)
        self.pipeline = reference_pipeline(self.folder)
        self.latents = reference_latents(self.pipeline, family.run)

    def wrong_split(self) -> float:
        """How far the result moves when one row-split weight's halves change places, as a misplaced shard would."""
        pipeline = copy.copy(self.pipeline)
        pipeline.transformer = copy.deepcopy(self.pipeline.transformer)
        weight = pipeline.transformer.transformer_blocks[0].attn.to_out[0].weight
        with torch.no_grad():
            weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))
        return max_rel(reference_latents(pipeline, self.family.run), self.latents)

    def compare(self, degrees: Degrees, wrong_split: float | None = None) -> Outcome:
        with slot_on_ranks(self.folder, layout_of(**degrees), "float32") as slot:
            ours = sample(slot, self.family.run)
        return Outcome(
            max_abs=(ours - self.latents).abs().max().item(),
            max_rel=max_rel(ours, self.latents),
            wrong_split=self.wrong_split() if wrong_split is None else wrong_split,
        )


def layout_name(degrees: Degrees) -> str:
    return ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
