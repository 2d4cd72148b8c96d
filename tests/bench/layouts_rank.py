"""One rank of the layout benchmark, run by torchrun. Arguments: a Flux transformer's folder, the steps to time.

Emits a row for every layout of as many ranks as there are, shape and path. A step of ours and one of upstream's
alternate; a step takes as long as on the slowest rank. Peaks are of one more step under the allocator's profile, in
which exchanges make their buffers only.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime.engine.attention import ContextAxes, Tokens, context_attention, cut_lengths
from runtime.engine.backend import Backend
from runtime.engine.checkpoints.folder import open_folder
from runtime.engine.context import divide_sequence
from runtime.engine.mesh import build_mesh
from runtime.engine.transformer import load_transformer, plan_transformer
from runtime.environment import rank_environment
from runtime.spec import ParallelSpec
from tests.support import upstream
from tests.support.allocated import peak_bytes, unfilled
from tests.support.torchrun import emit

WARM_UP = 2
# Of attention alone: tokens, heads, width of a head. FLUX.1 at 512x512; few heads and more tokens.
ATTENTION = ((1152, 24, 128), (2304, 8, 64))
PICTURE, TEXT = 32, 128  # of the model: patches along an edge, tokens
Step = Callable[[], Any]


@dataclass(frozen=True)
class Layout:
    """A layout; with `odd`, over lengths that no degree divides, for which upstream has its modes "anything"."""

    spec: ParallelSpec
    odd: bool = False

    def __str__(self) -> str:
        axes = [f"{axis}={degree}" for axis, degree in self.spec.degrees().items() if degree > 1]
        return ", ".join(axes)

    @property
    def is_upstream(self) -> bool:
        """Whether upstream has it: no tensor axis beside the others, no odd lengths on both axes."""
        both = self.spec.ring > 1 and self.spec.ulysses > 1
        return self.spec.tensor == 1 and not (both and self.odd)


LAYOUTS = {
    2: [
        Layout(spec, odd) for spec in (ParallelSpec(ulysses=2), ParallelSpec(ring=2)) for odd in (False, True)
    ],
    4: [
        Layout(ParallelSpec(ulysses=4)),
        Layout(ParallelSpec(ring=4)),
        Layout(ParallelSpec(ring=2, ulysses=2)),
        Layout(ParallelSpec(ring=2, ulysses=2), odd=True),
        Layout(ParallelSpec(tensor=2, ulysses=2)),
        Layout(ParallelSpec(tensor=2, ring=2)),
    ],
}


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    place = rank_environment()
    dist.init_process_group("cpu:gloo", timeout=datetime.timedelta(seconds=120))
    backend = Backend(torch.device("cpu"), place)
    for layout in LAYOUTS[place.world_size]:
        mesh = build_mesh(layout.spec, "cpu")
        measured: list[tuple[str, Mapping[str, Step]]] = []
        if layout.spec.tensor == 1:
            measured += [_attention_steps(layout, mesh, *shape) for shape in ATTENTION]
        measured.append(_model_steps(layout, mesh, folder, backend))
        for shape, paths in measured:
            for row in _rows(paths, steps):
                if place.rank == 0:
                    emit({"layout": str(layout), "shape": shape, **row})
    dist.destroy_process_group()


def _rows(paths: Mapping[str, Step], steps: int) -> Iterator[dict[str, object]]:
    spans: dict[str, list[tuple[float, float]]] = {path: [] for path in paths}
    for number in range(WARM_UP + steps):
        for path in paths if number % 2 else reversed(paths):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            paths[path]()
            spans[path].append((time.perf_counter() - start, time.process_time() - cpu))
    medians: dict[str, float] = {}
    for path, step in paths.items():  # upstream's first
        with unfilled():
            peak = peak_bytes(step)
        figures = torch.tensor([*spans[path][WARM_UP:], (peak, 0)], dtype=torch.float64)
        dist.all_reduce(figures, op=dist.ReduceOp.MAX)
        (peak, _), (seconds, cpu_seconds) = figures[-1].tolist(), figures[:-1].median(dim=0).values.tolist()
        medians[path] = seconds
        yield {
            "path": path,
            "ms_per_step": round(seconds * 1e3, 2),
            "x_upstream": round(seconds / medians["upstream"], 3) if "upstream" in medians else None,
            "cpu_ms": round(cpu_seconds * 1e3, 2),
            "peak_mb": round(peak / 2**20, 2),
        }


def _attention_steps(
    layout: Layout, mesh: DeviceMesh, tokens: int, heads: int, width: int
) -> tuple[str, dict[str, Step]]:
    """One attention of all tokens, fp32."""
    tokens -= layout.odd
    axes = ContextAxes.of_mesh(mesh)
    lengths = cut_lengths(tokens, axes)
    torch.manual_seed(axes.rank)
    query, key, value = torch.randn(3, 1, lengths[axes.rank], heads, width)
    all_tokens = Tokens((lengths,))

    def ours() -> torch.Tensor:
        return context_attention(
            query, key, value, None, None, queries=all_tokens, keys=all_tokens, axes=axes
        )

    steps: dict[str, Step] = {}
    if layout.is_upstream:
        parallel = upstream.set_up(upstream.config(mesh, anything=layout.odd), mesh)
        steps["upstream"] = upstream.inside(lambda: upstream.attention(query, key, value, parallel))
    steps["ours"] = ours
    return f"attention 1x{tokens}x{heads}x{width}", steps


def _model_steps(
    layout: Layout, mesh: DeviceMesh, folder: Path, backend: Backend
) -> tuple[str, dict[str, Step]]:
    """One forward of a small FLUX.1."""
    planned = plan_transformer(open_folder(folder), layout.spec, mesh)
    model: Any = load_transformer(
        planned, backend, torch.float32, on_bytes=lambda _: None, cancelled=lambda: False
    )
    divide_sequence(model, mesh)
    side, text = PICTURE - layout.odd, TEXT - layout.odd
    inputs = _inputs(model.config, side, text)
    steps: dict[str, Step] = {}
    if layout.is_upstream:
        other: Any = diffusers.FluxTransformer2DModel.from_pretrained(folder)
        with upstream.running():
            upstream.enable(other, mesh, anything=layout.odd)
        steps["upstream"] = upstream.inside(lambda: other(**inputs))
    steps["ours"] = lambda: model(**inputs)
    return f"Flux {side}x{side} patches, {text} of text", steps


def _inputs(config: Any, side: int, text: int) -> dict[str, Any]:
    rows, columns = torch.meshgrid(torch.arange(float(side)), torch.arange(float(side)), indexing="ij")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "hidden_states": normal(1, side * side, config.in_channels),
        "encoder_hidden_states": normal(1, text, config.joint_attention_dim),
        "pooled_projections": normal(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.stack([rows * 0, rows, columns], dim=-1).flatten(0, 1),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }


if __name__ == "__main__":
    main()
