"""What a remote step of a stock MODEL costs the host: all between ComfyUI's call of its denoiser and the answer.

ComfyUI's own model at its published size calls a real rank, which answers with the latent it was given. Latent and
residuals are new in every step; text, positions and guidance are new tensors with the old content, as ComfyUI makes
them. `bytes_out` and `bytes_in` are all that crosses in such a step. `x_copy` is the time as a multiple of copying
the new tensors and the answer once, measured in the same run, interleaved. `cpu_ms` is what host and rank compute for
a step, which says more than the time where other programs want the cores too.

The other figures say where the time goes; they are from steps between those, which the clocks make a little longer:
`kept_ms` to find again what the ranks have, `stage_ms` to put the rest into shared memory, `rank_ms` on the rank,
`wire_ms` for frames and for waking up, `back_ms` to take the answer, `rest_ms` for the call and the refusals.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from runtime.engine.loading import empty_model
from tests.parity_native.host import Host

WARM_UP = 4
STEPS = 60  # every second one with the clocks
BF16 = torch.bfloat16
Pack = Callable[[str], ModuleType]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """The call of one denoiser: arguments that `fresh` makes for each step, and such that stay the `same`."""

    shape: str
    transformer: str  # of diffusers
    config: Mapping[str, Any]
    fresh: Callable[[int], Mapping[str, Any]]
    same: Tensors


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16)


def _flux(residuals: int = 0) -> Step:
    """FLUX.1-dev: 64x64 patches of a picture of 1024x1024, 512 tokens of text, residuals of a ControlNet."""
    latent, residual = _normal(1, 4096, 64), _normal(1, 4096, 3072)
    rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")

    def fresh(number: int) -> Mapping[str, Any]:
        added = [residual * (number + block) for block in range(residuals)]
        control = {"input": added} if residuals else None
        return {"img": latent * number, "timesteps": torch.tensor([1 / (number + 1)]), "control": control}

    return Step(
        f"Flux 1024x1024, {residuals} residuals" if residuals else "Flux 1024x1024",
        "FluxTransformer2DModel",
        {"guidance_embeds": True},
        fresh,
        {
            "img_ids": torch.stack([rows * 0, rows, columns], dim=-1).reshape(1, 4096, 3),
            "txt": _normal(1, 512, 4096),
            "txt_ids": torch.zeros(1, 512, 3),
            "y": _normal(1, 768),
            "guidance": torch.tensor([3.5], dtype=BF16),
        },
    )


def _wan() -> Step:
    """Wan 2.1 14B: 81 frames of 1280x720, both conditionings in one batch."""
    latent = _normal(2, 16, 21, 90, 160)

    def fresh(number: int) -> Mapping[str, Any]:
        return {"x": latent * number, "timestep": torch.full((2,), 1000 / (number + 1))}

    context = {"context": _normal(2, 512, 4096)}
    return Step("Wan 1280x720, 81 frames, CFG", "WanTransformer3DModel", {}, fresh, context)


def rows() -> Iterator[dict[str, object]]:
    torch.set_num_threads(1)  # the copy it is compared with has one core, as the rank has
    with tempfile.TemporaryDirectory(prefix="sharded-bench-") as directory:
        pack = Host(Path(directory)).pack
        try:
            with (
                mock.patch.object(pack("runtime.launch"), "WORKER", "tests.bench.echo_rank"),
                torch.inference_mode(),
            ):
                for step in (_flux(), _wan(), _flux(residuals=10)):
                    yield _row(pack, step)
        finally:
            pack("runtime.group").GROUPS.close_all()


def _row(pack: Pack, step: Step) -> dict[str, object]:
    model = _remote_model(pack, step)
    call = getattr(model.diffusion_model, model.sharded.family.method)
    meter = Meter(pack, model.sharded)
    plain: list[tuple[float, float, float]] = []
    metered: list[dict[str, float]] = []
    for number in range(WARM_UP + STEPS):
        fresh = step.fresh(number)
        arguments = {**fresh, **{name: tensor.clone() for name, tensor in step.same.items()}}
        with meter.on() if number % 2 else contextlib.nullcontext():
            answer, seconds, cpu = _measured(lambda: call(**arguments), meter)  # noqa: B023
        assert torch.equal(answer, next(iter(fresh.values()))), "the rank answered with another latent"
        if number < WARM_UP:  # these touch fresh pages, and carry what is kept
            continue
        if number % 2:
            metered.append(meter.figures(seconds))
        else:
            plain.append((seconds, cpu, _copy_seconds(fresh, answer)))
    model.sharded.slot.unload()
    split = {name: statistics.median(one[name] for one in metered) for name in metered[0]}
    total, cpu, copy = map(statistics.median, zip(*plain, strict=True))
    return {
        "shape": step.shape,
        "ms_per_step": _ms(total),
        "bytes_out": int(split.pop("bytes_out")),
        "bytes_in": int(split.pop("bytes_in")),
        "least_ms": _ms(min(seconds for seconds, _, _ in plain)),
        "cpu_ms": _ms(cpu),
        "copy_ms": _ms(copy),
        "x_copy": round(total / copy, 2),
        **{name: _ms(seconds) for name, seconds in split.items()},
    }


def _measured(call: Callable[[], torch.Tensor], meter: Meter) -> tuple[torch.Tensor, float, float]:
    """The answer, the seconds until it came, and the seconds that this process and the rank computed for it."""
    rank, own, start = meter.rank_cpu_seconds(), time.process_time(), time.perf_counter()
    answer = call()
    end, own_end = time.perf_counter(), time.process_time()
    return answer, end - start, own_end - own + meter.rank_cpu_seconds() - rank


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _copy_seconds(fresh: Mapping[str, Any], answer: torch.Tensor) -> float:
    tensors = [one for one in fresh.values() if isinstance(one, torch.Tensor)]
    tensors += [*(fresh.get("control") or {}).get("input", ()), answer]
    targets = [torch.zeros_like(one) for one in tensors]
    start = time.perf_counter()
    for target, source in zip(targets, tensors, strict=True):
        target.copy_(source)
    return time.perf_counter() - start


def _remote_model(pack: Pack, step: Step) -> Any:
    """ComfyUI's model of the published size, without weights, whose denoiser calls one rank that echoes."""
    native, spec, groups = pack("nodes.native.model"), pack("runtime.spec"), pack("runtime.group").GROUPS
    family = native.FAMILIES[step.transformer]
    transformer = empty_model(step.transformer, step.config)
    shapes = {name: tuple(one.shape) for name, one in transformer.state_dict().items()}
    model = native.empty_model(Path(step.shape), family, shapes, transformer.config, BF16)
    device = pack("runtime.devices").cpu_devices(1)
    layout = spec.Layout(spec=spec.ParallelSpec(), devices=device, reason="the benchmark's")
    held = spec.ModelSpec(path=step.shape, pipeline_class="", dtype="bfloat16", replaced=family.replaced)
    native._swap_classes(model, pack("nodes.native.remote").Remote(groups.slot(layout, held), family))
    return model


class Meter:
    """Clocks around the parts of a step's path, and counts of what crosses, while it is on."""

    def __init__(self, pack: Pack, remote: Any):
        self._remote = remote
        self._kept, self._wire, self._group = map(pack, ("runtime.kept", "runtime.wire", "runtime.group"))
        self._sums: Counter[str] = Counter()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """For one step."""
        self._sums.clear()
        connection, pool = self._wire.Connection, self._wire.BufferPool
        with contextlib.ExitStack() as stack:
            for owner, name, note in (
                (self._kept.KeptTensors, "number", None),
                (pool, "stage", self._note_staged),
                (self._group.WorkerGroup, "call", self._note_answers),
                (type(self._remote), "_serve", None),
                (connection, "_send_bytes", lambda args, _: self._add("bytes_out", map(len, args[1]))),
                (connection, "_receive_prefix", lambda _, result: self._add("bytes_in", [len(result[0])])),
                (connection, "_read", lambda args, _: self._add("bytes_in", [len(args[1])])),
            ):
                stack.enter_context(self._around(owner, name, note))
            yield

    def rank_cpu_seconds(self) -> float:
        """What all threads of the rank have computed so far; 0 before it is started."""
        snapshots = [group.snapshot() for group in self._group.GROUPS.groups()]
        pids = [pid for one in snapshots for rank in one["ranks"] if (pid := rank["pid"])]
        threads = [thread for pid in pids for thread in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def _around(self, owner: Any, name: str, note: Callable[[Any, Any], None] | None) -> Any:
        original = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            end = time.perf_counter()
            self._sums[name] += end - start  # type: ignore[assignment]
            self._sums[f"{name} ended"] = end  # type: ignore[assignment]
            if note:
                note(args, result)
            return result

        return mock.patch.object(owner, name, measured)

    def _add(self, name: str, counts: Any) -> None:
        self._sums[name] += sum(counts)

    def _note_staged(self, _: Any, staged: Any) -> None:
        """What is beside the frame, in shared memory."""
        tensors = [header for header in staged.headers if header.buffer >= 0]
        self._add("bytes_out", map(self._wire._tensor_bytes, tensors))

    def _note_answers(self, _: Any, replies: Any) -> None:
        tensors = [one for reply in replies.values() for one in reply.tensors.values()]
        self._add("bytes_in", (one.nbytes for one in tensors if one.nbytes >= self._wire.SHARE_FROM))

    def figures(self, total: float) -> dict[str, float]:
        """Seconds and bytes of the step that took `total`."""
        sums = self._sums
        rank = sum(end - start for spans in self._remote.spans.values() for _, start, end in spans)
        back = sums["_serve ended"] - sums["call ended"]
        return {
            "bytes_out": sums["bytes_out"],
            "bytes_in": sums["bytes_in"],
            "kept_ms": sums["number"],
            "stage_ms": sums["stage"],
            "rank_ms": rank,
            "wire_ms": sums["call"] - sums["stage"] - rank,
            "back_ms": back,
            "rest_ms": total - sums["number"] - sums["call"] - back,
        }
