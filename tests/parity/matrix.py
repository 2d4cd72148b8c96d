"""One forward of every transformer class under the tensor axis against one process on the same weights.

The host draws a tiny model, writes its folder and one process's result. A group of ranks under torchrun then loads
every folder sharded, and each rank compares what it computed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers.models.transformers
import msgspec
import torch
from safetensors.torch import save_file

from runtime.engine.plans import tensor_plan
from runtime.spec import ParallelSpec
from tests.parity.model_case import Draw, ModelCase
from tests.parity.model_cases_image import IMAGE_CASES
from tests.parity.model_cases_video import VIDEO_CASES
from tests.support.models import randomise
from tests.support.reference import max_rel
from tests.support.torchrun import torchrun

CASES = {case.name: case for case in (*IMAGE_CASES, *VIDEO_CASES)}
TOLERANCE = 5e-6  # one forward in fp32
NOTICEABLE = 100  # a wrong split must move the result by so many tolerances
# Of the tensor axis 2, 3 and 4 equal ranks, and two cards of which one is twice the other.
LAYOUTS = (
    *(ParallelSpec(tensor=degree) for degree in (2, 3, 4)),
    ParallelSpec(tensor=2, tensor_shares=(2, 1)),
)
CONTEXT_LAYOUTS = (
    *(ParallelSpec(ulysses=degree) for degree in (2, 4)),
    *(ParallelSpec(ring=degree) for degree in (2, 4)),
    ParallelSpec(ulysses=2, ring=2),
    ParallelSpec(tensor=2, ulysses=2),
    ParallelSpec(tensor=2, ring=2),
)
# What each rule of the planner needs once; the whole matrix is `make matrix`.
SELECTION = (
    *("FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel"),
    *("WanTransformer3DModel", "LTX2VideoTransformer3DModel", "SD3Transformer2DModel"),
    *("ZImageTransformer2DModel", "Lumina2Transformer2DModel", "MochiTransformer3DModel"),
    *("SanaTransformer2DModel", "HiDreamImageTransformer2DModel", "HunyuanVideoTransformer3DModel"),
)


def passes(row: Mapping[str, Any]) -> bool:
    """Whether a row is right, and shows that it would have noticed a wrong split."""
    return "error" not in row and row["max_rel"] <= TOLERANCE and row["wrong_split"] >= NOTICEABLE * TOLERANCE


def as_text(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return "{family:42} {layout:24} {error}".format(**row)
    return "{family:42} {layout:24} max_rel {max_rel:.1e} (a wrong split: {wrong_split:.1e})".format(**row)


def layout_name(layout: ParallelSpec) -> str:
    axes = [f"{axis}={degree}" for axis, degree in reversed(layout.degrees().items()) if degree > 1]
    return ", ".join(axes) + (
        f", shares={':'.join(map(str, layout.tensor_shares))}" if layout.tensor_shares else ""
    )


def drawn(case: ModelCase, seed: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model and the inputs of `case` for `seed`: the same on every call, other sizes for another seed."""
    own = zlib.crc32(case.name.encode()) + seed
    draw = Draw(own)
    torch.manual_seed(own)
    model = getattr(diffusers.models.transformers, case.name)(**case.config(draw)).eval()
    randomise(model)
    return model, inputs_of(case, seed, model.config)


def inputs_of(case: ModelCase, seed: int, config: Any) -> dict[str, Any]:
    return case.inputs(Draw(zlib.crc32(case.name.encode()) + seed + 1), config)


def outputs(result: Any) -> list[torch.Tensor]:
    """The tensors of a forward's result, nested lists and tuples laid flat."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    return [t for part in result for t in outputs(part)] if isinstance(result, list | tuple) else []


def difference(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> tuple[float, float]:
    """max_rel and max_abs of the worst output."""
    pairs = list(zip(ours, reference, strict=True))
    return max(max_rel(a, b) for a, b in pairs), max((a - b).abs().max().item() for a, b in pairs)


@torch.no_grad()
def write(case: ModelCase, seed: int, directory: Path) -> float:
    """Write the folder, one process's result beside it; how far a wrong split would move that result."""
    model, inputs = drawn(case, seed)
    folder = directory / case.name
    # Several files, as large models have them.
    size = sum(p.numel() for p in model.parameters()) * 4
    model.save_pretrained(folder, max_shard_size=f"{max(1, size // 3000)}KB")
    expected = outputs(case.run(model, inputs))
    save_file({str(number): one.contiguous() for number, one in enumerate(expected)}, folder / "expected.st")
    plan = tensor_plan(model, (1, 1))
    path = next(path for path, split in plan.splits.items() if split.style == "rowwise")
    weight = model.get_submodule(path).weight
    weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))  # type: ignore[operator, index]
    return difference(outputs(case.run(model, inputs)), expected)[0]


def rows(
    directory: Path, names: Sequence[str], seed: int, layouts: Sequence[ParallelSpec] = LAYOUTS
) -> Iterator[dict[str, Any]]:
    """A row per (class, layout)."""
    wrong_split = {name: write(CASES[name], seed, directory) for name in names}
    for layout in layouts:
        arguments = (str(directory), str(seed), msgspec.json.encode(layout).decode(), *names)
        for row in torchrun(directory, layout.world_size, "tests.parity.rank", *arguments):
            yield {
                "family": row["family"],
                "layout": layout_name(layout),
                "ranks": layout.world_size,
                "dtype": "float32",
                "max_abs": row.get("max_abs"),
                "max_rel": row.get("max_rel"),
                "wrong_split": wrong_split[row["family"]],
                "peak_mb": row.get("peak_mb"),
                **({"error": row["error"]} if "error" in row else {}),
            }
