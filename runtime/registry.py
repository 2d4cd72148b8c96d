"""The registry: all groups of this host, by their devices, and the slots that somebody holds."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from .healing import Retries
from .slots import Slot, unload
from .spec import Cancelled, Device, Layout, ModelSpec

if TYPE_CHECKING:
    from .group import WorkerGroup

log = logging.getLogger("comfyui-sharded")


class Registry:
    """All groups of this host, by their devices; outlives every graph. A device belongs to one group at a time."""

    def __init__(self, make_group: Callable[[tuple[Device, ...]], WorkerGroup]) -> None:
        self._make_group = make_group
        self._lock = threading.RLock()
        self._ended = False
        self._groups: dict[tuple[str, ...], WorkerGroup] = {}
        self.retries = Retries()
        self._slots: weakref.WeakValueDictionary[str, Slot] = weakref.WeakValueDictionary()

    def group(self, devices: tuple[Device, ...]) -> WorkerGroup:
        """The group of exactly these devices; groups that hold one of them are closed first."""
        if self._ended:
            raise Cancelled("ComfyUI is ending.")
        key = _key(devices)
        with self._lock:
            for other_key in [k for k in self._groups if k != key and set(k) & set(key)]:
                self._groups.pop(other_key).close("Its devices were needed by another layout.")
            if key not in self._groups:
                self._groups[key] = self._make_group(devices)
            return self._groups[key]

    def find(self, devices: tuple[Device, ...]) -> WorkerGroup | None:
        return self._groups.get(_key(devices))

    def slot(self, layout: Layout, model: ModelSpec) -> Slot:
        """The slot for this model in this layout; the same object as long as anyone holds it."""
        content = msgspec.json.encode((layout.spec, _key(layout.devices), model))
        name = f"{os.path.basename(model.path)}-{hashlib.sha256(content).hexdigest()[:8]}"
        with self._lock:
            slot = self._slots.get(name)
            if slot is None:
                slot = self._slots[name] = Slot(self, name, layout, model)
            return slot

    def unload_unheld(self, group: WorkerGroup) -> None:
        """Unload what nothing refers to any more. A slot that was asked for again meanwhile stays as it is."""
        with group._lock:
            for name in [*group.slots, *group.parked]:
                if name not in self._slots:
                    log.info("Unloading %s: nothing refers to it any more.", name)
                    unload(group, name)

    # ---- what a person may want done with a group

    def park(self, group: WorkerGroup) -> dict[str, bool]:
        """Take every model off the group's devices. By name: whether it is in host RAM, or will be read again."""
        with group._lock:
            names = list(group.slots)
            for name in names:
                slot = self._slots.get(name)
                if slot is None:  # nobody holds it any more
                    unload(group, name)
                else:
                    slot.park()
            return {name: name in group.parked for name in names}

    def cannot_restore(self, group: WorkerGroup) -> str:
        """Why what a group has parked cannot go back to its devices now; "" if it can."""
        if not group.alive or not group.parked:
            return "Nothing is parked there."
        nbytes = sum(info.weight_bytes for info in group.parked.values())
        for rank in group.snapshot()["ranks"]:
            used, total = rank["memory"]["device_used"], rank["memory"]["device_total"]
            if total and total - (used or 0) < nbytes * 1.1:
                return f"{rank['label']} has no room for it now. The next workflow that needs it makes room."
        return ""

    def restore(self, group: WorkerGroup) -> None:
        """Bring what is parked back to the devices. Starts no rank. Raises RankError."""
        with group._lock:
            for name in list(group.parked):
                if (slot := self._slots.get(name)) is not None:
                    slot.restore()

    def with_id(self, group_id: str) -> WorkerGroup | None:
        """The group whose snapshot has that id."""
        return next((group for group in self.groups() if group.id == group_id), None)

    def groups(self) -> list[WorkerGroup]:
        # Without the lock: the server's thread asks too, and who holds it may be waiting for a group to end.
        return list(self._groups.values())

    def snapshot(self) -> list[dict[str, Any]]:
        return [group.snapshot() for group in self.groups()]

    def abandon(self) -> None:
        """In a process that another pack has forked from the host: forget the groups, which are the host's.

        Its exit would end them, and as long as it runs, their sockets would not close when the host dies.
        """
        groups, self._groups = self._groups, {}
        self._lock = threading.RLock()
        for group in groups.values():
            group.abandon()

    def end(self) -> None:
        """The host ends: end all ranks now. Waits for no lock, for a running call may hold them for minutes."""
        self._ended = True
        for group in self.groups():
            group.end()

    def close_all(self) -> None:
        with self._lock:
            for group in self._groups.values():
                group.close("The host ended.")
            self._groups.clear()


def _key(devices: tuple[Device, ...]) -> tuple[str, ...]:
    return tuple(device.key for device in devices)
