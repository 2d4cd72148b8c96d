"""What a group is doing, as one value: its phase with the reason for it, and what is known of each rank.

    stopped ── starting ── ready ── busy ── ready ...        parked: ready, with all it holds in host RAM
                  └───────────┴───────┴──── broken           the next use starts it again

Everything that tells of a group, its errors and `/sharded/state`, is made from this value.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from .spec import Device, Heartbeat, Memory, in_gigabytes
from .supervision import Suspicion

log = logging.getLogger("comfyui-sharded")

PHASES = ("stopped", "starting", "ready", "busy", "parked", "broken")


@dataclass(frozen=True)
class RankState:
    """One rank. `phase` is "stopped", "starting", "ready" or "dead"; `heard` a reading of the monotonic clock."""

    rank: int
    device: Device
    phase: str = "stopped"
    pid: int | None = None
    heard: float | None = None
    heartbeat: Heartbeat | None = None

    @property
    def name(self) -> str:
        """As errors begin with it: "Rank 1 (GPU 1 NVIDIA L40, pid 4711)"."""
        pid = f", pid {self.pid}" if self.pid is not None else ""
        return f"Rank {self.rank} ({self.device.label}{pid})"

    @property
    def memory(self) -> Memory:
        return self.heartbeat.memory if self.heartbeat else Memory()


@dataclass(frozen=True)
class GroupState:
    """The state of a group since `since`, a reading of the monotonic clock.

    While it is busy, `request` is the kind of request in small letters, `doing` the operation as people say it, and
    `slot` the model's slot or "". `reason` says why a group is stopped or broken. `cancelling`: the ranks were asked
    to stop at the next boundary. `late` is a rank that gives cause for worry.
    """

    phase: str
    ranks: tuple[RankState, ...]
    since: float = field(default_factory=time.monotonic)
    request: str = ""
    doing: str = ""
    slot: str = ""
    reason: str = ""
    cancelling: bool = False
    late: Suspicion | None = None

    @property
    def seconds(self) -> float:
        """For how long it has been so."""
        return time.monotonic() - self.since

    @property
    def legacy_phase(self) -> str:
        """`phase` as `/sharded/state` has always named it: a busy group by its request, a broken one as stopped."""
        return {"busy": self.request, "broken": "stopped"}.get(self.phase, self.phase)

    @property
    def warming(self) -> bool:
        """Whether the first step of a size runs, of which nobody can say how long it takes."""
        heard = [one.heartbeat for one in self.ranks if one.heartbeat and (one.heard or 0.0) >= self.since]
        return (
            self.phase == "busy"
            and self.doing == "sampling"
            and any(one.doing == "sampling" and one.slowest == 0.0 for one in heard)
        )


Listener = Callable[[GroupState], None]


class StateMachine:
    """Holds the current state of one group. Thread-safe; the only place where it changes."""

    def __init__(self, devices: tuple[Device, ...], on_memory: Callable[[Memory], None] | None = None):
        """`on_memory` is called with the memory that any rank tells, by one thread at a time."""
        self._on_memory = on_memory
        self._lock = threading.RLock()
        self._listeners: list[Listener] = []
        self._current = GroupState("stopped", _ranks(devices, "stopped"))

    @property
    def current(self) -> GroupState:
        return self._current

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every new phase, in the thread that changes it; it must return at once.

        Also when a cancel goes out, and when a rank begins to be late or is so no more.
        """
        self._listeners.append(listener)

    # ---- of the group

    def starting(self) -> None:
        devices = tuple(one.device for one in self._current.ranks)
        self._enter(GroupState("starting", _ranks(devices, "starting")))

    def ready(self, *, parked: bool = False) -> None:
        """Nothing runs. A group that is broken or stopped stays so."""
        with self._lock:
            if self._current.phase not in ("stopped", "broken"):
                self._enter(GroupState("parked" if parked else "ready", self._current.ranks))

    def busy(self, request: str, doing: str, slot: str = "") -> None:
        with self._lock:
            self._enter(GroupState("busy", self._current.ranks, request=request, doing=doing, slot=slot))

    def cancelling(self) -> None:
        """The ranks were asked to stop what they do."""
        with self._lock:
            if self._current.phase == "busy" and not self._current.cancelling:
                self._enter(replace(self._current, cancelling=True))

    def suspected(self, late: Suspicion | None) -> None:
        """A rank gives cause for worry, or (None) none does."""
        with self._lock:
            if self._current.phase not in ("ready", "parked", "busy"):
                return
            before = self._current.late
            if before is None and late is None:
                return
            new = replace(self._current, late=late)
            if before and late and before[:2] == late[:2]:
                self._current = new  # only the seconds have changed
            else:
                self._enter(new)

    def ended(self, reason: str) -> None:
        """Its processes were ended on purpose."""
        self._end("stopped", reason)

    def broken(self, reason: str) -> None:
        """A rank was lost, or the start failed: its processes are gone, or about to be."""
        self._end("broken", reason)

    def _end(self, phase: str, reason: str) -> None:
        with self._lock:
            devices = tuple(one.device for one in self._current.ranks)
            self._enter(GroupState(phase, _ranks(devices, "stopped"), reason=reason))

    # ---- of its ranks

    def rank_joined(self, rank: int, pid: int | None) -> None:
        self._change(rank, pid=pid)

    def rank_ready(self, rank: int) -> None:
        self._change(rank, phase="ready")

    def rank_heard(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        with self._lock:
            before = self._current.warming
            self._change(rank, heard=now, heartbeat=heartbeat)
            if self._current.warming != before:
                self._enter(self._current)
            if self._on_memory is not None:
                self._on_memory(heartbeat.memory)

    def rank_lost(self, rank: int, why: str) -> None:
        """A rank is gone. A group that was idle is broken by it; who runs a call says himself what became of it."""
        with self._lock:
            self._change(rank, phase="dead")
            if self._current.phase in ("ready", "parked"):
                reason = f"{self._current.ranks[rank].name} {why} while the group was idle."
                self._enter(GroupState("broken", self._current.ranks, reason=reason))

    def _change(self, rank: int, **changes: Any) -> None:
        with self._lock:
            ranks = tuple(replace(one, **changes) if one.rank == rank else one for one in self._current.ranks)
            self._current = replace(self._current, ranks=ranks)

    def _enter(self, new: GroupState) -> None:
        with self._lock:
            self._current = new
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(new)
            except Exception:  # whoever listens must not change what becomes of a group
                log.exception("A listener of a group's state failed.")


def _ranks(devices: tuple[Device, ...], phase: str) -> tuple[RankState, ...]:
    return tuple(RankState(rank, device, phase) for rank, device in enumerate(devices))


def as_data(state: GroupState) -> dict[str, Any]:
    """The state as plain data, as `/sharded/state` answers it. Times are seconds."""
    now = time.monotonic()
    return {
        "phase": state.legacy_phase,
        "state": state.phase,
        "doing": state.doing,
        "slot": state.slot,
        "seconds": round(now - state.since, 1),
        "reason": state.reason,
        "warming": state.warming,
        "cancelling": state.cancelling,
        "stalled": _stalled(state),
        "ranks": [
            {
                "rank": one.rank,
                "pid": one.pid,
                "device": one.device.key,
                "label": one.device.label,
                "state": one.phase,
                "doing": one.heartbeat.doing if one.heartbeat else "",
                "memory": {name: getattr(one.memory, name) for name in Memory.__struct_fields__},
                "memory_age": round(now - one.heard, 1) if one.heard is not None else None,
            }
            for one in state.ranks
        ],
    }


def _stalled(state: GroupState) -> dict[str, Any] | None:
    """The rank that is late, as people read it; seconds."""
    if (late := state.late) is None:
        return None
    heartbeat = state.ranks[late.rank].heartbeat
    return {
        "rank": late.rank,
        "kind": late.kind,
        "seconds": round(late.seconds, 1),
        "limit": round(late.limit, 1),
        "doing": heartbeat.doing if heartbeat else "",
    }


def memory_lines(state: GroupState) -> str:
    """The memory of each device as its rank last told it, a line each; "" if none has."""
    return "\n".join(
        f"{one.name}: {', '.join(words)}" for one in state.ranks if (words := _memory_words(one.memory))
    )


def _memory_words(memory: Memory) -> list[str]:
    words = []
    if memory.device_used is not None and memory.device_total is not None:
        words.append(f"device {memory.device_used / 2**30:.1f} of {in_gigabytes(memory.device_total)} used")
    if memory.weights is not None:
        words.append(f"{in_gigabytes(memory.weights)} of it by this rank's tensors")
    if memory.host is not None:
        words.append(f"{in_gigabytes(memory.host)} of host RAM")
    return words
