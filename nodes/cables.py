"""The pack's own cable types, and the object that travels on the pipeline cable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, TypeVar

from comfy_api.latest import io

from ..runtime import planner
from ..runtime.group import Slot
from ..runtime.spec import RankOutOfMemory, SlotInfo
from . import comfy_host
from .moving import ELSE, Moving

log = logging.getLogger("comfyui-sharded")
T = TypeVar("T")
Way = Literal["", "tiles", "host"]  # in which a stage of rank 0 is computed: as it is, in tiles, in host RAM
INSTEAD: dict[Way, str] = {"": "", "tiles": "in tiles", "host": "on the CPU, which is slow"}
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

    def staged(self, run: Callable[[Way], T], ways: Sequence[Way]) -> tuple[T, Way]:
        """What `run` gives in the first of `ways` that rank 0's device has room for, and in which.

        Encoders and VAE are on rank 0 only: another layout would help them little.
        """
        devices = self.slot.layout.devices
        ways = [way for way in ways if way != "host" or devices[0].kind != "cpu"]
        with comfy_host.comfy_errors():
            for way, following in pairwise(ways):
                try:
                    return run(way), way
                except RankOutOfMemory as error:
                    log.warning("%s", error)
                    where = f"rank {error.rank} ({devices[error.rank].label})"
                self.say(f"Out of memory on {where}: now {INSTEAD[following]}")
            try:
                return run(ways[-1]), ways[-1]
            except RankOutOfMemory as error:
                error.advise(ELSE)
                raise
