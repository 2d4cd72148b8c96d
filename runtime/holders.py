"""Who holds the memory of a card, as the driver tells: the answer to "but this card should have room for it"."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import msgspec

from . import nvml
from .spec import Device

_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a card. `name` is "" and `nbytes` None where the driver does not tell."""

    pid: int
    name: str
    nbytes: int | None


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A card's memory in bytes, and the processes on it, the largest first. `display`: a screen is on it, if known."""

    total_bytes: int
    free_bytes: int
    holders: tuple[Holder, ...]
    display: bool | None = None


def card_memory(device: Device, own: Mapping[int, str]) -> Card | None:
    """What lies on a card now; None for other devices, or without a driver that tells.

    `own` are names for processes by pid: this one, and the ranks. In a container the driver may tell pids of
    the machine outside, which are other processes here; they are not looked up if none of ours is among them.
    """
    if device.kind != "cuda":
        return None
    with nvml.opened() as library:
        if library is None:
            return None
        try:
            handle = library.nvmlDeviceGetHandleByUUID(device.uuid)
            memory = library.nvmlDeviceGetMemoryInfo(handle)
            return Card(
                total_bytes=memory.total,
                free_bytes=memory.free,
                holders=_holders(library, bytes_by_pid(library, handle), own),
                display=_shows_something(library, handle),
            )
        except (AttributeError, library.NVMLError):  # a library or a driver that lacks the call
            return None


def bytes_by_pid(library, handle) -> dict[int, int | None]:
    """What each process holds on a card. One that computes and draws is in both lists of the driver."""
    found: dict[int, int | None] = {}
    for name in _LISTS:
        with contextlib.suppress(AttributeError, library.NVMLError):
            for process in getattr(library, name)(handle):
                found[process.pid] = max(
                    (found.get(process.pid), process.usedGpuMemory), key=lambda n: n or 0
                )
    return found


def _shows_something(library, handle) -> bool | None:
    try:
        return bool(library.nvmlDeviceGetDisplayActive(handle))
    except (AttributeError, library.NVMLError):
        return None


def _holders(library, sizes: Mapping[int, int | None], own: Mapping[int, str]) -> tuple[Holder, ...]:
    ours_are_there = any(pid in own for pid in sizes)
    found = [
        Holder(pid=pid, name=own.get(pid) or _name(library, pid, ours_are_there), nbytes=nbytes)
        for pid, nbytes in sizes.items()
    ]
    return tuple(sorted(found, key=lambda one: (-(one.nbytes or 0), one.pid)))


def _name(library, pid: int, pids_are_ours: bool) -> str:
    if not pids_are_ours:
        return ""
    with contextlib.suppress(AttributeError, library.NVMLError):
        name = library.nvmlSystemGetProcessName(pid)
        return os.path.basename(nvml.text(name).split("\0")[0].strip())
    import psutil

    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return ""
