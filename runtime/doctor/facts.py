"""What this machine is, as far as it can be told without using its devices: system, versions, cards, links, room.

NVML answers for the cards. Whatever a driver does not tell is left out, never guessed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from .. import environment, launch, machine, nvml
from ..devices import physical_cards
from ..host_memory import host_memory
from ..spec import Device

PACKAGES = ("torch", "diffusers", "transformers", "safetensors", "msgspec", "numpy", "nvidia-ml-py")
# Levels of nvml.h's nvmlGpuTopologyLevel_t, as `nvidia-smi topo -m` abbreviates them, and what they mean.
_LEVELS = {0: "one board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
LEVELS_IN_WORDS = {
    "NVLink": "cables or a switch of NVIDIA's own",
    "one board": "two chips on one card",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe controller",
    "NODE": "two PCIe controllers of one CPU",
    "SYS": "the connection between two CPUs",
}
_MOST_NVLINKS, _SWITCH = 18, 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH


@dataclass(frozen=True)
class Card:
    """A card and what is said of it beside what a layout needs. None is unknown."""

    device: Device
    compute: str = ""  # its compute capability
    display: bool | None = None
    pcie: str = ""  # generation and lanes
    narrow: bool = False  # fewer lanes than the card has
    other_programs: int | None = None  # that compute on it, besides this process
    foreign_ranks: bool = False  # of a group that another process has started


@dataclass(frozen=True)
class Link:
    """How two cards reach each other: the way between them, and whether they read each other's memory.

    `cards` are their indices, the smaller first.
    """

    cards: tuple[int, int]
    way: str
    peers: bool | None


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes; `shared_memory` is /dev/shm's, None where there is none."""

    system: str
    python: str
    versions: dict[str, str]
    driver: str
    ram: tuple[int, int]  # total, available
    ram_limit: int | None  # of the container
    shared_memory: tuple[int, int] | None  # total, free
    temporary_free: int | None
    settings: dict[str, str]  # of the libraries, in the environment
    cards: tuple[Card, ...]
    links: tuple[Link, ...]  # between any two cards


def describe_machine(comfyui: str = "") -> Machine:
    """Everything that can be told at once. `comfyui` is ComfyUI's version, "" if it is not known."""
    devices = physical_cards()
    driver, cards, links = "", tuple(Card(device) for device in devices), tuple[Link, ...]()
    with nvml.opened() as library:
        if library is not None:
            driver = _driver(library)
            cards = tuple(_card(library, device) for device in devices)
            links = _links(library, devices)
    memory = host_memory()
    return Machine(
        system=_system(),
        python=platform.python_version(),
        versions=_versions(comfyui),
        driver=driver,
        ram=memory.machine,
        ram_limit=memory.container.total if memory.container else None,
        shared_memory=_room("/dev/shm"),
        temporary_free=_temporary_free(),
        settings=environment.library_settings(),
        cards=cards,
        links=links,
    )


def remembered(cards: Sequence[Card]) -> str:
    """What earlier starts of groups found that these cards need, "" if nothing."""
    labels = {card.device.uuid: f"GPU {card.device.index}" for card in cards}
    words = {setting.name: setting.words for setting in machine.SETTINGS}
    return "; ".join(
        f"{', '.join(sorted(labels[uuid] for uuid in entry.cards))} work {words.get(entry.setting, entry.setting)} "
        f"(driver {entry.driver}, torch {entry.torch})"
        for entry in machine.recall().entries
        if set(entry.cards) <= set(labels)
    )


# ---- system


def _system() -> str:
    parts = [f"{platform.system()} {platform.release()} {platform.machine()}"]
    with contextlib.suppress(OSError):
        parts.append(platform.freedesktop_os_release().get("PRETTY_NAME", ""))
    if any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")):
        parts.append("in a container")
    parts.append(f"{os.cpu_count()} CPU threads")
    return ", ".join(part for part in parts if part)


def _versions(comfyui: str) -> dict[str, str]:
    found = {"ComfyUI-Sharded": launch.pack_version(), "ComfyUI": comfyui or "unknown"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return {name: text for name, text in found.items() if text}


def _room(folder: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(folder)
        return usage.total, usage.free
    return None


def _temporary_free() -> int | None:
    """Where groups keep their sockets and logs."""
    for folder in environment.runtime_directories():
        if room := _room(str(folder)):
            return room[1]
    return None


# ---- cards


def _ask(library: Any, question: str, *arguments: Any) -> Any:
    """The driver's answer, None if it has none: older libraries and drivers lack calls, and cards lack features."""
    try:
        return getattr(library, question)(*arguments)
    except Exception:
        return None


def _driver(library: Any) -> str:
    driver, cuda = (
        _ask(library, "nvmlSystemGetDriverVersion"),
        _ask(library, "nvmlSystemGetCudaDriverVersion"),
    )
    driver = nvml.text(driver or "")
    return f"{driver}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}" if driver and cuda else driver


def _card(library: Any, device: Device) -> Card:
    handle = _ask(library, "nvmlDeviceGetHandleByIndex", device.index)

    def told(what: str) -> Any:
        return _ask(library, f"nvmlDeviceGet{what}", handle)

    compute, display, running = (
        told("CudaComputeCapability"),
        told("DisplayActive"),
        told("ComputeRunningProcesses"),
    )
    # The generation falls while a card is idle, the lanes do not.
    generation, lanes, most = (
        told("MaxPcieLinkGeneration"),
        told("CurrPcieLinkWidth"),
        told("MaxPcieLinkWidth"),
    )
    others = None if running is None else {process.pid for process in running} - {os.getpid()}
    return Card(
        device=device,
        compute=".".join(map(str, compute)) if compute else "",
        display=None if display is None else bool(display),
        pcie=f"PCIe {generation}.0 x{lanes}" if generation and lanes else "",
        narrow=bool(lanes and most and lanes < most),
        other_programs=None if others is None else len(others),
        foreign_ranks=any(_is_foreign_rank(pid) for pid in others or ()),
    )


def _is_foreign_rank(pid: int) -> bool:
    """Whether a process is a rank that another host started. In a container the driver's numbers may name nobody."""
    try:
        process = psutil.Process(pid)
        return launch.WORKER in process.cmdline() and os.getpid() not in {
            one.pid for one in process.parents()
        }
    except psutil.Error:
        return False


# ---- links


def _links(library: Any, devices: Sequence[Device]) -> tuple[Link, ...]:
    return tuple(
        Link(
            cards=(one.index, other.index),
            way=_way(library, one.index, other.index),
            peers=None if one.peers is None else other.index in one.peers,
        )
        for one, other in combinations(devices, 2)
    )


def _way(library: Any, one: int, other: int) -> str:
    first, second = (_ask(library, "nvmlDeviceGetHandleByIndex", index) for index in (one, other))
    if count := _nvlinks(library, first, second):
        return f"NVLink x{count}"
    return _LEVELS.get(_ask(library, "nvmlDeviceGetTopologyCommonAncestor", first, second), "unknown")


def _nvlinks(library: Any, first: Any, second: Any) -> int:
    """How many NVLinks of the first card are up and lead to the second, or to a switch: behind it are all cards."""
    target = _ask(library, "nvmlDeviceGetPciInfo", second)
    count = 0
    for number in range(_MOST_NVLINKS):
        if not _ask(library, "nvmlDeviceGetNvLinkState", first, number):
            continue
        remote = _ask(library, "nvmlDeviceGetNvLinkRemotePciInfo", first, number)
        same = remote and target and (remote.domain, remote.bus) == (target.domain, target.bus)
        switch = _ask(library, "nvmlDeviceGetNvLinkRemoteDeviceType", first, number) == _SWITCH
        count += bool(same or switch)
    return count
