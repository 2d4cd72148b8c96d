"""One forward of every transformer class under the tensor and the context axes against one process.

The host draws a tiny model, writes its folder and one process's result. Ranks under torchrun then load every folder
divided, one layout after the other, and compare what they computed. Further figures of a row say how far a fault
would have moved the result: the comparison would have noticed it.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers.models.transformers
import msgspec
import torch
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode

from runtime.engine.context import fits
from runtime.engine.context_plans import CONTEXT_PLANS
from runtime.engine.plans import tensor_plan
from runtime.spec import ParallelSpec
from tests.parity.model_case import Draw, ModelCase
from tests.parity.model_cases_image import IMAGE_CASES, IMAGE_VARIANTS
from tests.parity.model_cases_video import VIDEO_CASES, VIDEO_VARIANTS
from tests.support.models import randomise
from tests.support.reference import max_rel
from tests.support.torchrun import torchrun

CASES = {case.name: case for case in (*IMAGE_CASES, *VIDEO_CASES)}
ALL = CASES | {case.label: case for case in (*IMAGE_VARIANTS, *VIDEO_VARIANTS)}
TOLERANCE = 5e-6  # one forward in fp32
NOTICEABLE = 100  # a fault must move the result by so many tolerances
# How far the result is off: with a shard in the wrong place, without the masks (None: it has none), and where
# attention stays with each rank's own tokens (None: the layout does not divide them).
FAULTS = ("wrong_split", "no_mask", "local")
# Of the tensor axis 2, 3 and 4 equal ranks, and two cards of which one is twice the other.
TENSOR_LAYOUTS = (
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
# The families whose sequences people divide.
CONTEXT_SELECTION = (
    *("FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel"),
    *("WanTransformer3DModel (T2V)", "WanTransformer3DModel (I2V)", "WanVACETransformer3DModel"),
    *("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel", "HunyuanVideoTransformer3DModel"),
    *("HunyuanVideo15Transformer3DModel", "ZImageTransformer2DModel", "SD3Transformer2DModel (3.5 large)"),
    *("ChromaTransformer2DModel", "Lumina2Transformer2DModel"),
)


def passes(row: Mapping[str, Any]) -> bool:
    """Whether a row is right, and shows that it would have noticed what can go wrong."""
    if "error" in row or not row["max_rel"] <= TOLERANCE:
        return False
    return all(row[fault] is None or row[fault] >= NOTICEABLE * TOLERANCE for fault in FAULTS)


def as_text(row: Mapping[str, Any]) -> str:
    start = "{family:46} {layout:22} ".format(**row)
    if "error" in row:
        return start + row["error"]
    faults = (f"{fault} {row[fault]:.1e}" for fault in FAULTS if row[fault] is not None)
    return f"{start}max_rel {row['max_rel']:.1e} ({', '.join(faults)})"


def layout_name(layout: ParallelSpec) -> str:
    axes = [f"{axis}={degree}" for axis, degree in reversed(layout.degrees().items()) if degree > 1]
    return ", ".join(axes) + (
        f", shares={':'.join(map(str, layout.tensor_shares))}" if layout.tensor_shares else ""
    )


def drawn(case: ModelCase, seed: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model and the inputs of `case` for `seed`: the same on every call, other sizes for another seed."""
    own = zlib.crc32(case.label.encode()) + seed
    draw = Draw(own)
    torch.manual_seed(own)
    model = getattr(diffusers.models.transformers, case.name)(**case.config(draw)).eval()
    randomise(model)
    return model, inputs_of(case, seed, model.config)


def inputs_of(case: ModelCase, seed: int, config: Any) -> dict[str, Any]:
    return case.inputs(Draw(zlib.crc32(case.label.encode()) + seed + 1), config)


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


class _Unmasked(TorchFunctionMode):
    """While it is active, PyTorch's attention gets no mask; it counts those that it would have got."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        self.masks += given.pop("attn_mask", None) is not None
        return function(**given)

    def over(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            with self:
                return call(*args, **kwargs)

        return within


def _without_masks(case: ModelCase, model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor] | None:
    """The outputs where the attentions that a context plan divides get no mask, or, if they have none, any others.

    None if no attention has one.
    """
    plan = CONTEXT_PLANS[case.name]
    attentions = {path: module for path, module in model.named_modules() if hasattr(module, "processor")}
    divided = {path for path in attentions if any(fits(pattern, path) for pattern in plan.attentions)}
    for paths in (divided, attentions.keys() - divided):
        with ExitStack() as patches:
            mode = _Unmasked()
            for path in paths:
                module = attentions[path]
                patches.enter_context(mock.patch.object(module, "forward", mode.over(module.forward)))
            found = outputs(case.run(model, inputs))
        if mode.masks:
            return found
    return None


@dataclass(frozen=True)
class Faults:
    """How far faults of one process would move its result; see FAULTS."""

    wrong_split: float
    no_mask: float | None


@torch.no_grad()
def write(case: ModelCase, seed: int, directory: Path) -> Faults:
    """Write the folder, and one process's result beside it."""
    model, inputs = drawn(case, seed)
    folder = directory / case.label
    # Several files, as large models have them.
    size = sum(p.numel() for p in model.parameters()) * 4
    model.save_pretrained(folder, max_shard_size=f"{max(1, size // 3000)}KB")
    expected = outputs(case.run(model, inputs))
    save_file({str(number): one.contiguous() for number, one in enumerate(expected)}, folder / "expected.st")
    unmasked = _without_masks(case, model, inputs) if case.name in CONTEXT_PLANS else None
    plan = tensor_plan(model, (1, 1))
    path = next(path for path, split in plan.splits.items() if split.style == "rowwise")
    weight = model.get_submodule(path).weight
    weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))  # type: ignore[operator, index]
    return Faults(
        wrong_split=difference(outputs(case.run(model, inputs)), expected)[0],
        no_mask=unmasked and difference(unmasked, expected)[0],
    )


@dataclass(frozen=True)
class Job:
    """One forward of a case, by its label, in a layout."""

    layout: ParallelSpec
    case: str


def jobs(cases: Sequence[str], layouts: Sequence[ParallelSpec]) -> list[Job]:
    """Context layouts take the classes that have a plan, those of the tensor axis alone no variants."""
    return [
        Job(layout, label)
        for layout in layouts
        for label in cases
        if (ALL[label].name in CONTEXT_PLANS if layout.context > 1 else not ALL[label].variant)
    ]


def rows(directory: Path, work: Sequence[Job], seed: int) -> Iterator[dict[str, Any]]:
    """A row per job. Those of one number of ranks share a start, which is what takes most of the time."""
    faults = {label: write(ALL[label], seed, directory) for label in dict.fromkeys(job.case for job in work)}
    starts: dict[int, list[Job]] = defaultdict(list)
    for job in work:
        starts[job.layout.world_size].append(job)
    for ranks, left in starts.items():
        fruitless = 0
        while left:
            done = set()
            for number, found in _start(directory, ranks, left, seed):
                if number not in done:  # not another rank's word on the same failure
                    yield _row(left[number], faults[left[number].case], found)
                    done.add(number)
            if not done:
                fruitless += 1
                done = {0} if fruitless < 3 else {*range(len(left))}
                for number in done:
                    job = left[number]
                    yield _row(job, faults[job.case], {"error": "the ranks ended without a word"})
            left = [job for number, job in enumerate(left) if number not in done]


def _start(
    directory: Path, ranks: int, work: Sequence[Job], seed: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of a job and what was found, one after the other until all are done or the ranks ended."""
    asked = directory / "jobs.json"
    asked.write_bytes(msgspec.json.encode(work))
    for found in torchrun(directory, ranks, "tests.parity.rank", str(asked), str(seed)):
        yield found.pop("job"), found


def _row(job: Job, faults: Faults, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "family": job.case,
        "layout": layout_name(job.layout),
        "ranks": job.layout.world_size,
        "dtype": "float32",
        "max_abs": found.get("max_abs"),
        "max_rel": found.get("max_rel"),
        "wrong_split": faults.wrong_split,
        "no_mask": faults.no_mask if job.layout.context > 1 else None,
        "local": found.get("local"),
        "peak_mb": found.get("peak_mb"),
        **({"error": found["error"]} if "error" in found else {}),
    }
