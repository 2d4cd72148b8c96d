"""The devices of this machine, found without touching them: NVML for the cards, a count for the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import msgspec

from . import nvml
from .environment import visible_cuda_devices
from .holders import bytes_by_pid
from .leftovers import descendants, sees_all_processes
from .spec import Device, Refusal

_READ, _P2P_OK = 0, 0  # numbers of nvml.h: pynvml's own NVML_P2P_CAPS_INDEX_READ is the tuple (0,) by a slip
CPU_SLOTS = 8  # CPU ranks are for tests and the demo; a workflow asks for more only by mistake


def physical_cards() -> tuple[Device, ...]:
    """Every NVIDIA card in PCI order, also those hidden from ComfyUI by CUDA_VISIBLE_DEVICES.

    Free bytes are the driver's, so they see other processes. Empty without a driver; a card that the driver has
    lost is left out, one that does not tell its memory has 0 bytes, one that does not tell its links has no `peers`.
    """
    with nvml.opened() as library:
        if library is None:
            return ()
        cards = []
        ours = {os.getpid(), *descendants(os.getpid())}
        try:
            for index in range(library.nvmlDeviceGetCount()):
                with contextlib.suppress(library.NVMLError):
                    cards.append(_card(library, index, ours))
            return tuple(msgspec.structs.replace(card, peers=_peers(library, card, cards)) for card in cards)
        except library.NVMLError:
            return ()


def driver_version() -> str:
    """The version of NVIDIA's driver, "" without one."""
    with nvml.opened() as library:
        if library is None:
            return ""
        try:
            return nvml.text(library.nvmlSystemGetDriverVersion())
        except (AttributeError, library.NVMLError):
            return ""


def _card(library, index: int, ours: set[int]) -> Device:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    uuid, name = library.nvmlDeviceGetUUID(handle), library.nvmlDeviceGetName(handle)
    total = free = taken = 0
    # Cards that share the host's memory have none of their own to tell.
    with contextlib.suppress(library.NVMLError):
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        total, free = memory.total, memory.free
        taken = min(_taken(library, handle, ours), total - free)
    return Device(
        kind="cuda",
        index=index,
        uuid=nvml.text(uuid),
        name=nvml.text(name),
        total_bytes=total,
        free_bytes=free,
        taken_bytes=taken,
    )


def _taken(library, handle, ours: set[int]) -> int:
    """Bytes of a card that other programs hold: all but `ours`, this process and what it has started.

    0 where that cannot be said: the driver does not tell, or tells ids that are other processes in this container.
    """
    sizes = bytes_by_pid(library, handle)
    if not ours & sizes.keys() and not sees_all_processes():
        return 0
    return sum(nbytes or 0 for pid, nbytes in sizes.items() if pid not in ours)


def _peers(library, card: Device, cards: Sequence[Device]) -> tuple[int, ...] | None:
    """The cards that `card` and they each read from the other's memory; None where the driver does not tell."""
    others = [other.index for other in cards if other.index != card.index]
    try:
        return tuple(n for n in others if _reads(library, card.index, n) and _reads(library, n, card.index))
    except (AttributeError, library.NVMLError):  # a library or a driver that lacks the call
        return None


def _reads(library, reader: int, other: int) -> bool:
    first, second = library.nvmlDeviceGetHandleByIndex(reader), library.nvmlDeviceGetHandleByIndex(other)
    return library.nvmlDeviceGetP2PStatus(first, second, _READ) == _P2P_OK


def _renumbered() -> str:
    visible = visible_cuda_devices()
    return f"; CUDA_VISIBLE_DEVICES ({visible}) renumbers them for ComfyUI only" if visible else ""


def cpu_devices(count: int = CPU_SLOTS) -> tuple[Device, ...]:
    """CPU "devices": one rank each. `auto` takes as many as there are cores, at most two."""
    return tuple(Device(kind="cpu", index=index, name="CPU") for index in range(count))


def default_cpu_ranks() -> int:
    return min(2, os.cpu_count() or 1)


def choose_devices(wanted: str, cards: Sequence[Device]) -> tuple[Device, ...]:
    """The devices that "auto", "cpu" or a list such as "0,1,3" of physical cards stands for.

    Raises Refusal for cards that do not exist, are named twice, or text that is neither.
    """
    wanted = " ".join(wanted.split())
    text = wanted.lower()
    if text in ("", "auto"):
        return tuple(cards) or cpu_devices()
    if text == "cpu":
        return cpu_devices()
    there = (
        ", ".join(f"{card.index} ({card.name})" for card in cards) or "none, so only auto or cpu work here"
    )
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise Refusal(
            f"Devices '{wanted}' cannot be read.",
            "Devices are auto, cpu, or the numbers of physical cards in PCI order, such as 0,1,3.",
            f"Cards of this machine: {there}.",
        )
    numbers = [int(part) for part in parts]
    missing = sorted({n for n in numbers if n not in {card.index for card in cards}})
    if missing:
        raise Refusal(
            f"There is no GPU {', '.join(map(str, missing))} in this machine.",
            f"Devices '{wanted}' names physical cards in PCI order, and each must exist{_renumbered()}.",
            f"Cards of this machine: {there}.",
        )
    if len(set(numbers)) != len(numbers):
        raise Refusal(
            f"Devices '{wanted}' names a card twice.",
            "Every rank owns one card of its own.",
            f"Works here: {','.join(map(str, sorted(set(numbers))))}.",
        )
    return tuple(card for number in numbers for card in cards if card.index == number)
