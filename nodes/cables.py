"""The pack's own cable types, and the object that travels on the pipeline cable."""

from __future__ import annotations

from comfy_api.latest import io

from ..runtime.group import Slot
from ..runtime.spec import SlotInfo
from . import comfy_host

CATEGORY = "sharded"
ParallelConfigCable = io.Custom("PARALLEL_CONFIG")
PipelineCable = io.Custom("SHARDED_PIPELINE")


class ShardedPipeline:
    """A pipeline in a slot, as nodes pass it on. Holding it holds the slot; it reloads itself when it must."""

    def __init__(self, slot: Slot):
        self.slot = slot
        self._manager = comfy_host.ManagedSlot(slot)

    def ensure(self, progress: comfy_host.NodeProgress) -> SlotInfo:
        """Make the pipeline resident, asking ComfyUI for room first if it is not."""
        self._manager.make_room(0 if self.slot.loaded else self.slot.model.rank_bytes)
        info = self.slot.ensure(progress.report, comfy_host.interrupted)
        self._manager.note_loaded(info.weight_bytes)
        return info
