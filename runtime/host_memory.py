"""Host RAM as both sides see it: the machine's, and what a container may take of it. Sizes in bytes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

_CGROUP = Path("/sys/fs/cgroup")  # version 2; a container finds its own there


class Room(NamedTuple):
    """How much there is, and how much of it can still be taken."""

    total: int
    available: int


class HostMemory(NamedTuple):
    """The machine's RAM, and the container's where that has less."""

    machine: Room
    container: Room | None

    @property
    def room(self) -> Room:
        """What this process can have."""
        if self.container is None:
            return self.machine
        return self.container._replace(available=min(self.machine.available, self.container.available))


def host_memory() -> HostMemory:
    """Ask the kernel."""
    import psutil  # when it is wanted: ComfyUI's start does without

    memory = psutil.virtual_memory()
    container = _container()
    if container is not None and container.total >= memory.total:
        container = None
    return HostMemory(Room(memory.total, memory.available), container)


def _container() -> Room | None:
    """By cgroup's files. What it keeps of files is let go where room is wanted, and so can be taken."""
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        files = re.search(r"^inactive_file (\d+)$", (_CGROUP / "memory.stat").read_text(), re.MULTILINE)
        return Room(limit, max(0, limit - used + (int(files[1]) if files else 0)))
    return None
