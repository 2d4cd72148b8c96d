"""Three hundred prompts in one server, the layout another one every fifty: nothing grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.faults.row import Row, Wanted
from tests.faults.scene import Scene, scene

LAYOUTS: tuple[dict[str, int], ...] = (
    {"tensor": 2},
    {"ulysses": 2},
    {"ring": 2},
    {"tensor": 2},
    {"ulysses": 2},
    {"tensor": 1},
)
PROMPTS, SETTLED = 50, 20
SIZES = ((64, 64), (96, 96), (96, 64), (128, 96))
ALLOWED = 0.1  # MB a prompt


def rows(wanted: Wanted) -> Iterator[Row]:
    chosen = [(n, layout) for n, layout in enumerate(LAYOUTS) if wanted("soak", _stage(n, layout), None)]
    if chosen:
        with scene(faulty=False) as on:
            for number, layout in chosen:
                yield from _layout(on, number, layout)


def _stage(number: int, layout: dict[str, int]) -> str:
    return f"{number} " + " ".join(f"{axis} {degree}" for axis, degree in layout.items())


def _layout(on: Scene, number: int, layout: dict[str, int]) -> Iterator[Row]:
    """Run the prompts of one layout; a row for the host and each rank's memory slope, and one for what is counted."""
    memory: dict[int, list[float]] = {}
    for prompt in range(PROMPTS):
        width, height = SIZES[prompt % len(SIZES)]
        others = dict.fromkeys(("tensor", "ulysses", "ring"), 1) | layout
        on.client.run(on.fresh(width=width, height=height, steps=2, **others))
        if prompt == SETTLED:
            held = on.holds()
        if prompt >= SETTLED:
            for pid in (on.server.pid, *on.pids()):
                memory.setdefault(pid, []).append(_megabytes(pid))
    slopes = {pid: slope(values) for pid, values in memory.items()}
    worst = max(slopes.values())
    names = dict(zip(memory, ("host", *(f"rank {rank}" for rank in range(len(memory)))), strict=False))
    told = ", ".join(f"{names[pid]} {found:+.3f}" for pid, found in slopes.items())
    more = on.more_than(held)
    problems = [f"grew: {more}"] if more else []
    if len({len(values) for values in memory.values()}) > 1:
        problems.append("the ranks changed")
    text = "; ".join([*problems, f"MB a prompt: {told}"])
    yield Row("soak", _stage(number, layout), None, not problems and worst < ALLOWED, worst, text)


def slope(values: list[float]) -> float:
    """The least squares line's rise from one value to the next."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    rise = sum((n - middle) * (value - mean) for n, value in enumerate(values))
    return rise / (sum((n - middle) ** 2 for n in range(len(values))) or 1)


def _megabytes(pid: int) -> float:
    """The process's own memory: file pages and shared segments are counted elsewhere."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no memory")
