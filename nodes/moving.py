"""A model that moves to a smaller layout when a rank runs out of memory: once for each request, said on the node.

Under the strategy `manual` the layout is only proposed, in ComfyUI's own out-of-memory error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ..runtime import planner
from ..runtime.group import GROUPS, Slot
from ..runtime.spec import Layout, RankOutOfMemory, SlotInfo, readable_bytes
from . import comfy_host

log = logging.getLogger("comfyui-sharded")
T = TypeVar("T")
ELSE = "A smaller picture or batch helps too, and closing other programs on that device."


class Moving:
    """What nodes hold of a slot. `wanted` is what was asked for; without it the layout stays as it is."""

    def __init__(self, slot: Slot, wanted: planner.Wanted | None):
        self.slot, self.wanted = slot, wanted

    def with_room(self, run: Callable[[], T]) -> T:
        """What `run` gives; on the next smaller layout if a rank had no room. Raises ComfyUI's own errors.

        `run` uses `self.slot` anew each time.
        """
        with comfy_host.comfy_errors():
            before, layout = self.slot.name, self.slot.layout
            try:
                return run()
            except RankOutOfMemory as error:
                if not self._step_down(error):
                    raise
            try:
                result = run()
            except RankOutOfMemory as error:
                error.advise(self._advice(self._smaller(error)))
                raise
            GROUPS.retries.forget(before)  # that there is no room in it costs nothing any more
            GROUPS.note_smaller(layout, self.slot)
            return result

    def _step_down(self, error: RankOutOfMemory) -> bool:
        """Move to the next smaller layout, if that may be and there is one; else the error says what would help."""
        layouts = self._smaller(error)
        if self.wanted is None or not self.wanted.may_change or not layouts:
            error.advise(self._advice(layouts))
            return False
        before, after = self.slot.layout.spec, layouts[0].spec
        log.warning("%s\nNow in %s instead.", error, after.describe())
        self.say(f"Out of memory in {before.describe()}: now {after.describe()}")
        self._move(layouts[0])
        return True

    def _smaller(self, error: RankOutOfMemory) -> tuple[Layout, ...]:
        if self.wanted is None:
            return ()
        return planner.smaller_layouts(
            self.wanted, self.slot.layout, tried=error.tried, allocated=error.allocated
        )

    def _advice(self, layouts: tuple[Layout, ...]) -> str:
        if self.wanted is None:
            return ELSE
        return f"{planner.smaller_advice(self.wanted, self.slot.layout, layouts)} {ELSE}"

    def _move(self, layout: Layout) -> None:
        """Leave the slot for one in `layout`, which the next use loads."""
        assert self.wanted is not None
        model = planner.model_spec(self.wanted.facts, self.wanted.dtype, layout)
        model = msgspec.structs.replace(self.slot.model, rank_bytes=model.rank_bytes)
        self.slot.unload()
        self.slot = GROUPS.slot(layout, model)
        self.moved()

    def say(self, *lines: str) -> None:
        """Text on the node that shows what becomes of the slot."""
        comfy_host.say(comfy_host.executing_node(), *lines)

    def say_held(self, info: SlotInfo, how: str) -> None:
        """What the ranks hold now and where, `how` it came there, and on a second line why in this layout."""
        layout = self.slot.layout
        size = readable_bytes(info.weight_bytes) + self._of_which()
        self.say(f"{layout.describe()}, {size}, {how}", layout.reason)

    def _of_which(self) -> str:
        """Of which ranks a size is that rank 0 reports."""
        spec = self.slot.layout.spec
        if spec.world_size == 1:
            return ""
        units = self.wanted.facts.units if self.wanted else 0
        return " on rank 0" if spec.tensor_shares or units % spec.tensor else " each"

    def moved(self) -> None:
        """Called when `slot` has become another one."""
