"""The pack's own cable types, and the object that travels on the pipeline cable."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from comfy_api.latest import io

from ..runtime import planner
from ..runtime.group import Slot
from ..runtime.spec import RankOutOfMemory, SlotInfo
from . import comfy_host
from .moving import ELSE, Moving

log = logging.getLogger("comfyui-sharded")
T = TypeVar("T")
CATEGORY = "sharded"
ParallelConfigCable = io.Custom("PARALLEL_CONFIG")
PipelineCable = io.Custom("SHARDED_PIPELINE")


class ShardedPipeline(Moving):
    """A pipeline in a slot, as nodes pass it on. Holding it holds the slot; it reloads itself when it must."""

    def __init__(self, slot: Slot, wanted: planner.Wanted | None = None):
        super().__init__(slot, wanted)
        self._info: SlotInfo | None = None  # of the newest load
        self.moved()

    def moved(self) -> None:
        self._manager = comfy_host.ManagedSlot(self.slot)

    def ensure(self, progress: comfy_host.NodeProgress) -> SlotInfo:
        """Make the pipeline resident, asking ComfyUI for room first if it is not. Raises ComfyUI's own errors."""

        def run() -> SlotInfo:
            self._manager.make_room(0 if self.slot.loaded else self.slot.model.rank_bytes)
            if self._info is not None and self.slot.doubtful:
                return self._info  # the next request loads, if it is not the one that failed
            self._info = self.slot.ensure(progress.report, comfy_host.interrupted)
            self._manager.note_loaded(self._info.weight_bytes)
            return self._info

        return self.with_room(run)

    def staged(self, run: Callable[[bool], T]) -> T:
        """What `run(False)` gives; if rank 0's card had no room for it, `run(True)`, which computes in host RAM.

        That is said on the node. Encoders and VAE are on rank 0 only: another layout would help them little.
        """
        with comfy_host.comfy_errors():
            first = self.slot.layout.devices[0]
            try:
                return run(False)
            except RankOutOfMemory as error:
                if first.kind == "cpu":
                    error.advise(ELSE)
                    raise
                log.warning("%s\nComputed on the CPU instead.", error.summary)
            node = comfy_host.executing_node()
            comfy_host.say(
                node, f"Out of memory on {first.label}: computed on the CPU instead, which is slow"
            )
            return run(True)
