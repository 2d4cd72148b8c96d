"""A slot: a model on a group of devices, as the host holds it. It survives its group and reloads as needed."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from . import wire
from .healing import Work, work_of
from .kept import KeptTensors
from .spec import (
    Device,
    Layout,
    Load,
    ModelSpec,
    Park,
    Parked,
    Progress,
    RankError,
    Request,
    SlotInfo,
    Unload,
)

if TYPE_CHECKING:
    import torch

    from .group import WorkerGroup
    from .registry import Registry

log = logging.getLogger("comfyui-sharded")

Report = Callable[[Progress, Mapping[str, "torch.Tensor"]], None]
IsCancelled = Callable[[], bool]
T = TypeVar("T")


class Slot:
    """A model on a group of devices. Survives its group: it starts, restarts and reloads as needed."""

    def __init__(self, registry: Registry, name: str, layout: Layout, model: ModelSpec):
        self.name, self.layout, self.model = name, layout, model
        self._registry = registry
        self.kept = KeptTensors()
        # Not at exit: the groups are closed then anyway, and no thread can be started any more.
        weakref.finalize(self, _release_later, registry, name, layout.devices).atexit = False

    def ensure(self, report: Report | None = None, cancelled: IsCancelled | None = None) -> SlotInfo:
        """Make the model resident; does nothing if it is. What rank 0 holds: another object after each load."""
        with self.held(report, cancelled) as (info, _):
            return info

    def call(
        self,
        request: Request,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        report: Report | None = None,
        cancelled: IsCancelled | None = None,
    ) -> wire.Message:
        """Run `request` on the loaded model; the reply of rank 0."""
        work = work_of(request, tensors, self.name)

        def once() -> wire.Message:
            with self.held(report, cancelled, work) as (_, group):
                return group.call(request, tensors, report=report, cancelled=cancelled)[0]

        return again_if_gone(once)

    @contextlib.contextmanager
    def held(
        self, report: Report | None = None, cancelled: IsCancelled | None = None, work: Work | None = None
    ) -> Iterator[tuple[SlotInfo, WorkerGroup]]:
        """The loaded model's group for several calls that nothing may come between; and what rank 0 holds.

        `work` is what the calls are for: raises RankError (kind "given up") if that has failed too often in a row.
        """
        retries, devices = self._registry.retries, self.layout.devices
        if work is not None:
            retries.check(work, devices)  # before anything is started or loaded for it
        # Before the group's lock: who closes a group holds the registry's and waits for the group's.
        group = self._registry.group(self.layout.devices)
        with group._lock, group.working(work, self._registry.current_run()):
            with retries.attempt(Work(slot=self.name, doing="loading"), devices):
                info = again_if_gone(lambda: self._loaded_on(group, report, cancelled))
            try:
                with retries.attempt(work, devices) if work else contextlib.nullcontext():
                    yield info, group
            except BaseException:
                # What came with the call may have reached the ranks or not: the next one starts from nothing.
                self.kept.belong_to(None)
                raise
            finally:
                group.used_at = time.monotonic()

    def _loaded_on(
        self, group: WorkerGroup, report: Report | None, cancelled: IsCancelled | None
    ) -> SlotInfo:
        group.start(report, cancelled)
        if self.name not in group.slots:
            self._registry.unload_unheld(group)
            self._load_on(group, report, cancelled)
        return group.slots[self.name]

    def _load_on(
        self, group: WorkerGroup, report: Report | None, cancelled: IsCancelled | None, start: bool = True
    ) -> None:
        comes_back = self.name in group.parked
        if comes_back and report is not None:
            report(Progress(phase="restoring", done=0, total=1), {})
        group.parked.pop(self.name, None)
        request = Load(slot=self.name, model=self.model, parallel=self.layout.spec)
        try:
            began = time.monotonic()
            replies = group.call(
                request,
                report=report,
                cancelled=cancelled,
                start=start,
                doing="restoring" if comes_back else "",
            )
        except BaseException:
            # Whoever was stopped may have been through already, and would hold what nobody here knows of.
            unload(group, self.name)
            raise
        info = replies[0].body
        assert isinstance(info, SlotInfo)
        if comes_back:
            group.restore_seconds[self.name] = time.monotonic() - began
        group.sizes[self.name] = tuple(
            one.body.weight_bytes for one in replies.values() if isinstance(one.body, SlotInfo)
        )
        group.parked_by = ""
        group.layouts[self.name] = self.layout
        group.slots[self.name] = info
        group.settle()

    def restore(self) -> None:
        """Bring a parked model back to its devices; does nothing if it is not parked. Starts no rank."""
        group = self._registry.find(self.layout.devices)
        if group is None:
            return
        with group._lock:
            if group.alive and self.name in group.parked:
                self._load_on(group, None, None, start=False)
                group.used_at = time.monotonic()

    def park(self, by: str = "comfyui") -> None:
        """Take the model off its devices, into host RAM if that has room. It comes back on the next use.

        `by` says who wants that: "idle", "user" or "comfyui".
        """
        group = self._registry.find(self.layout.devices)
        if group is None:
            return
        with group._lock:
            info = group.slots.pop(self.name, None)
            if info is None or not group.alive:
                return
            self.kept.belong_to(None)
            try:
                answers = [message.body for message in group.call(Park(slot=self.name), start=False).values()]
            except RankError as error:
                log.warning("%s could not be parked: %s", self.name, error.what)
                unload(group, self.name)
                return
            if all(isinstance(answer, Parked) and answer.in_host_memory for answer in answers):
                group.parked[self.name] = info
            group.parked_by = by
            group.settle()
            log.info("%s %s.", "Parked" if self.name in group.parked else "Dropped", self.name)

    def unload(self, by: str = "") -> None:
        """Give the model's memory back; the slot can be used again and then reloads. `by` as in `park`."""
        group = self._registry.find(self.layout.devices)
        if group is None:
            return
        with group._lock:
            self.kept.belong_to(None)
            if self.name in group.slots or self.name in group.parked:
                log.info("Unloading %s.", self.name)
                unload(group, self.name)
                group.parked_by = by if group.alive else ""

    @property
    def doubtful(self) -> bool:
        """Whether the next request may be one that has failed too often: loading ahead of it would be for nothing."""
        return self._registry.retries.doubts(self.name)

    @property
    def warming(self) -> bool:
        """Whether its group runs the first step of a size."""
        group = self._registry.find(self.layout.devices)
        return group is not None and group.state.current.warming

    @property
    def peak(self) -> int | None:
        """Bytes, the most that one rank's allocator held in the group's last run; None where none of them tells."""
        group = self._registry.find(self.layout.devices)
        run = group.activity.run if group is not None else None
        return run.peak if run is not None else None

    @property
    def loaded(self) -> bool:
        group = self._registry.find(self.layout.devices)
        return group is not None and group.alive and self.name in group.slots


def unload(group: WorkerGroup, name: str) -> None:
    """Empty a slot, on the ranks if they run. The caller holds the group's lock."""
    group.slots.pop(name, None)
    group.parked.pop(name, None)
    if group.alive:
        with contextlib.suppress(RankError):
            group.call(Unload(slot=name), start=False)


def again_if_gone(function: Callable[[], T]) -> T:
    """What `function` returns, called once more if a rank was gone before a request reached it: nobody need know."""
    try:
        return function()
    except RankError as error:
        if error.kind != "gone":
            raise
        log.warning("%s Starting the group again.", error.what)
    return function()


def _release_later(registry: Registry, name: str, devices: tuple[Device, ...]) -> None:
    """Unload a slot nobody holds any more. In a thread: a finalizer may run inside any other call."""
    group = registry.find(devices)
    if group is not None and (name in group.slots or name in group.parked):
        threading.Thread(target=registry.unload_unheld, args=(group,), daemon=True).start()
