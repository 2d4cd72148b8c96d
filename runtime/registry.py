"""The registry: all groups of this host, by their devices, and the slots that somebody holds."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from . import incidents, shown
from .cards import Cards
from .healing import Retries
from .journal import Journal
from .slots import Slot, unload
from .spec import Cancelled, Device, Layout, ModelSpec, model_name

if TYPE_CHECKING:
    from .group import WorkerGroup

log = logging.getLogger("comfyui-sharded")


class Hindrance(NamedTuple):
    """Why something cannot be done now: in a word for pages in other languages, and in a sentence."""

    code: str
    text: str
    device: str = ""


class Registry:
    """All groups of this host, by their devices; outlives every graph. A device belongs to one group at a time."""

    def __init__(self, make_group: Callable[[tuple[Device, ...], Journal], WorkerGroup]) -> None:
        self._make_group = make_group
        self._lock = threading.RLock()
        self._ended = False
        self._groups: dict[tuple[str, ...], WorkerGroup] = {}
        self.retries = Retries()
        self.journal = Journal()
        self.cards = Cards()
        self.current_run: Callable[[], str] = lambda: ""  # what the host calls the run of this thread
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
                self._groups[key] = self._make_group(devices, self.journal)
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

    def park(self, group: WorkerGroup, by: str = "user") -> dict[str, bool]:
        """Take every model off the group's devices, as wanted `by` "user", or by the group itself: "idle".

        By name: whether it is in host RAM, or will be read again. What nobody holds any more just goes.
        """
        kept = {}
        with group._lock:
            for name in list(group.slots):
                slot = self._slots.get(name)
                if slot is None:
                    unload(group, name)
                else:
                    slot.park(by)
                    kept[name] = name in group.parked
        return kept

    def cannot_restore(self, group: WorkerGroup) -> Hindrance | None:
        """Why what a group has parked cannot go back to its devices now; None if it can."""
        if not group.alive or not group.parked:
            return Hindrance("nothing_parked", "Nothing is parked there.")
        nbytes = sum(info.weight_bytes for info in group.parked.values())
        for rank in group.state.current.ranks:
            used, total, label = rank.memory.device_used, rank.memory.device_total, rank.device.label
            if used is not None and total is not None and total - used < nbytes * 1.1:
                return Hindrance(
                    "no_room",
                    f"{label} has no room for it now. The next workflow that needs it makes room.",
                    label,
                )
        return None

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

    # ---- what the pages are told

    def state(self, wall: float) -> dict[str, Any]:
        """What the panel shows, as plain data; `wall` makes unix time of the monotonic clock's."""
        return shown.state(self.journal, self.groups(), self.cards, wall)

    def news(self) -> tuple[dict[str, Any], float]:
        """What an event tells, and for how many seconds it stays so by itself: 0.0 is until something happens."""
        return shown.news(self.journal, self.groups())

    def look_at_cards(self) -> None:
        """Ask the driver what lies on the cards; may take as long as it likes. One thread at a time."""
        ranks = {rank.pid for group in self.groups() for rank in group.state.current.ranks if rank.pid}
        self.cards.look(frozenset(ranks))

    def note_smaller(self, before: Layout, slot: Slot) -> None:
        """A run has ended well in the layout of `slot`, after it ran out of memory in another."""
        group = self.find(slot.layout.devices)
        where = group.id if group else ""
        self.journal.note(
            incidents.smaller(where, slot.name, before.spec.describe(), slot.layout.spec.describe())
        )

    def note_failed(self, group: WorkerGroup, action: str, reason: str) -> None:
        """What a person asked for, "park" or "restore", has failed after it had begun."""
        self.journal.note(incidents.not_done(group.id, action, reason))

    def note_not_kept(self, group: WorkerGroup, names: list[str]) -> None:
        """Models that a person wanted parked had no room in host RAM."""
        if names:
            self.journal.note(incidents.not_kept(group.id, tuple(map(model_name, names))))

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
