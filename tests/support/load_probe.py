"""Loads a pipeline under torchrun and writes what each rank read and how its own memory grew.

Run as `python -m torch.distributed.run ... -m tests.support.load_probe <folder> <axis> <output directory>`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.engine.backend import Backend
from runtime.engine.checkpoints.folder import open_folder
from runtime.engine.loading import empty_model
from runtime.engine.pipelines import PipelineSlot
from runtime.engine.plans import tensor_plan
from runtime.environment import rank_environment
from runtime.spec import ModelSpec, ParallelSpec


class Peak:
    """The largest anonymous memory of this process while it is watched, in bytes."""

    def __init__(self, backend: Backend):
        self._backend, self._stop = backend, threading.Event()
        self.start = self.peak = backend.memory().host or 0
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, self._backend.memory().host or 0)
            time.sleep(0.005)


def main() -> None:
    folder, axis, output = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    place = rank_environment()
    torch.set_grad_enabled(False)
    dist.init_process_group("cpu:gloo")
    backend = Backend(torch.device("cpu"), place)
    model = ModelSpec(path=str(folder), pipeline_class="FluxPipeline", dtype="float32")
    slot = PipelineSlot(model, ParallelSpec(**{axis: place.world_size}), backend)
    with Peak(backend) as memory:
        slot.load(lambda *_: None, lambda: False)
        time.sleep(0.05)
    report = {
        "slices": [[one.name, one.stored, one.read] for one in slot.slices],
        "planned": sorted(_plan_names(slot, place.world_size)) if axis == "tensor" else [],
        "grown_at_peak": memory.peak - memory.start,
        "weights": slot.info().weight_bytes,
        "other": sum(t.nbytes for part in _whole_parts(slot) for t in part.parameters()),
        "seconds": slot.seconds,
    }
    (output / f"{place.rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def _plan_names(slot: PipelineSlot, degree: int) -> set[str]:
    checkpoint = open_folder(slot.folder / "transformer")
    model = empty_model(checkpoint.model_class, checkpoint.config)
    return set(tensor_plan(model, (1,) * degree).shards(model))


def _whole_parts(slot: PipelineSlot) -> list[torch.nn.Module]:
    if not slot.is_first:
        return []
    return [slot.vae, slot.encoding.text_encoder, slot.encoding.text_encoder_2]


if __name__ == "__main__":
    main()
