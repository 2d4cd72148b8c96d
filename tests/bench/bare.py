"""A bare torchrun script: one tensor-parallel FluxPipeline run, without ComfyUI, group, socket or progress."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.engine.backend import Backend
from runtime.engine.pipelines import PipelineSlot
from runtime.environment import rank_environment
from runtime.spec import ModelSpec, ParallelSpec


def main() -> None:
    folder, steps, side = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    place = rank_environment()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    backend = Backend(torch.device("cpu"), place)
    torch.set_grad_enabled(False)
    model = ModelSpec(path=str(folder), pipeline_class="FluxPipeline", dtype="float32")
    slot = PipelineSlot(model, ParallelSpec(tensor=place.world_size), backend)
    slot.load(lambda *_: None, lambda: False)
    width = slot.transformer.config.joint_attention_dim
    generator = torch.Generator().manual_seed(0)
    times = []

    def step_ended(_pipe, _step, _timestep, values):  # type: ignore[no-untyped-def]
        times.append(time.perf_counter())
        return values

    slot.denoising(
        prompt_embeds=torch.randn(1, 16, width, generator=generator),
        pooled_prompt_embeds=torch.randn(1, width, generator=generator),
        generator=generator,
        num_inference_steps=steps,
        height=side,
        width=side,
        output_type="latent",
        callback_on_step_end=step_ended,
    )
    if place.rank == 0:
        print(json.dumps([b - a for a, b in zip(times, times[1:], strict=False)]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
