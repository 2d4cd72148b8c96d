"""The host half: a group of ranks that is started lazily, called, cancelled, watched and closed; and its slots.

    node thread ── call ──> every rank's socket          one call at a time, the same request to all ranks
    reader thread per rank ── replies ──> one inbox ──> node thread
    listener thread ── admits ranks that know the token, drops everyone else

An idle rank waits on its socket, never inside a collective. What can break, and what happens then:
a rank reports an error       the others are cancelled; if they do not come back within a few seconds, all are killed
a rank's socket closes        the call ends at once with that rank's name; the whole group is killed
a call is cancelled           the ranks agree on a step, stop there together and stay warm
the host dies                 every rank sees its socket close and exits by itself
After a kill nothing has to be done by hand: the next use of a slot starts the group again and reloads.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from . import environment, launch, wire
from .kept import KeptTensors
from .spec import (
    Cancel,
    Cancelled,
    Device,
    Failure,
    Layout,
    Load,
    Memory,
    ModelSpec,
    Park,
    Parked,
    Ping,
    Progress,
    RankError,
    RankOutOfMemory,
    Ready,
    Refusal,
    Request,
    SlotInfo,
    Stats,
    Unload,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger("comfyui-sharded")

START_SECONDS = 60.0
GRACE_SECONDS = 3.0  # for the other ranks, after one has failed
POLL_SECONDS = 0.05

Report = Callable[[Progress, Mapping[str, "torch.Tensor"]], None]
IsCancelled = Callable[[], bool]


class _Session:
    """One life of a group: its processes, connections and readers. Never restarted, only replaced."""

    def __init__(self, devices: tuple[Device, ...]):
        self.devices = devices
        self.directory = launch.private_directory()
        self.token = secrets.token_hex(32)
        self.inbox: queue.SimpleQueue[tuple[int, wire.Message | None]] = queue.SimpleQueue()
        self.connections: dict[int, wire.Connection] = {}
        self.pids: dict[int, int] = {}
        self.ready: dict[int, Ready] = {}
        self.memory: dict[int, tuple[float, Memory]] = {}
        self.dead: int | None = None  # the first rank whose socket closed
        self.closed = False
        self._listener, address = wire.listen(self.directory)
        self.pool = wire.BufferPool(address.startswith("unix:") and wire.shared_memory_available())
        threading.Thread(target=self._accept, name="sharded-listener", daemon=True).start()
        try:
            self.processes = launch.Processes(self.directory, address, self.token, devices)
        except BaseException:
            self._listener.close()
            launch.remove_directory(self.directory)
            raise

    def _accept(self) -> None:
        while not self.closed:
            try:
                newcomer, _ = self._listener.accept()
            except OSError:
                return
            # In a thread of its own: a client that connects and says nothing must not hold up the ranks.
            threading.Thread(target=self._admit, args=(newcomer,), daemon=True).start()

    def _admit(self, newcomer: socket.socket) -> None:
        rank = wire.admit(newcomer, self.token)
        if rank is None or rank in self.connections or rank >= len(self.devices) or self.closed:
            log.warning("Dropped a client on the group's socket that is not one of its ranks.")
            newcomer.close()
            return
        pid = _peer_pid(newcomer)
        if pid is not None:
            self.pids[rank] = pid
            self.processes.watch(pid)
        connection = wire.Connection(newcomer, self.pool)
        self.connections[rank] = connection
        threading.Thread(
            target=self._read, args=(rank, connection), name=f"sharded-rank-{rank}", daemon=True
        ).start()

    def _read(self, rank: int, connection: wire.Connection) -> None:
        try:
            while True:
                message = connection.receive()
                if isinstance(message.body, Memory) and message.call == 0:
                    self.memory[rank] = (time.monotonic(), message.body)
                elif message.body is not None:
                    self.inbox.put((rank, message))
                del message  # or the last preview would be held until the next frame
                connection.flush_releases()
        except wire.ConnectionLost:
            if self.dead is None:
                self.dead = rank
            self.inbox.put((rank, None))

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.processes.kill()
        for connection in list(self.connections.values()):
            connection.close()
        self.pool.close()
        launch.remove_directory(self.directory)

    def log_tail(self, rank: int) -> str:
        return launch.log_tail(launch.rank_log(self.directory, rank))

    def name(self, rank: int) -> str:
        pid = f", pid {self.pids[rank]}" if rank in self.pids else ""
        return f"rank {rank} ({self.devices[rank].label}{pid})"


def _peer_pid(sock: socket.socket) -> int | None:
    """The kernel's word on who is at the other end of a Unix socket; refuses nothing by itself."""
    if not hasattr(socket, "SO_PEERCRED") or sock.family != socket.AF_UNIX:
        return None
    pid, _, _ = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid


class WorkerGroup:
    """Ranks on `devices`, one each. Thread-safe; one call at a time."""

    def __init__(self, devices: tuple[Device, ...]):
        self.devices = devices
        self.phase = "stopped"  # stopped, starting, ready, or the name of the request that runs
        self.reason = ""
        self.slots: dict[str, SlotInfo] = {}  # what the running session holds, as rank 0 reports it
        self.parked: dict[str, SlotInfo] = {}  # what it holds in host RAM instead
        self.layouts: dict[str, Layout] = {}
        self._lock = threading.RLock()
        self._session: _Session | None = None
        self._call = 0

    # ---- life

    @property
    def alive(self) -> bool:
        """Whether all ranks run. What `slots` and `parked` say is true only then."""
        session = self._session
        return session is not None and session.dead is None

    def start(self, report: Report | None = None, cancelled: IsCancelled | None = None) -> None:
        """Start the ranks unless they run. Raises RankError (kind "start") within a minute, or Cancelled."""
        with self._lock:
            if self.alive:
                return
            self.close(self.reason)
            if problem := environment.unsupported_platform():
                raise Refusal(
                    problem,
                    "The ranks are started by torchrun and talk over a Unix socket with shared memory.",
                    "Works here: every stock loader; this pack's nodes stay in the workflow for a Linux machine.",
                )
            self.phase = "starting"
            session = self._session = _Session(self.devices)
            try:
                self._await_ready(session, report, cancelled)
            except BaseException as error:
                self.close(str(error).partition("\n")[0])
                raise
            self.phase, self.reason = "ready", ""

    def _await_ready(self, session: _Session, report: Report | None, cancelled: IsCancelled | None) -> None:
        deadline = time.monotonic() + START_SECONDS
        count = len(self.devices)
        _tell(report, Progress(phase="starting", done=0, total=count))
        while len(session.ready) < count:
            rank, message = _next(session)
            if message is not None and isinstance(message.body, Ready):
                session.ready[rank] = message.body
                _tell(report, Progress(phase="starting", done=len(session.ready), total=count))
            elif message is not None and isinstance(message.body, Failure):
                raise self._failed(session, rank, message.body, "starting", kind="start")
            elif rank >= 0 and message is None:
                raise self._died(session, rank, "starting")
            elif rank < 0 and session.processes.agent_ended() is not None:
                tail = launch.log_tail(launch.agent_log(session.directory), 25)
                raise RankError(
                    f"torchrun ended while the group was starting.\nIts last lines:\n{tail}", kind="start"
                )
            if cancelled is not None and cancelled():
                raise Cancelled("Cancelled while the group was starting.")
            if time.monotonic() > deadline:
                late = [r for r in range(count) if r not in session.ready]
                tails = "\n".join(f"{session.name(r)}:\n{session.log_tail(r)}" for r in late)
                raise RankError(
                    f"Rank {', '.join(map(str, late))} of {count} was not ready after {START_SECONDS:.0f} s.\n"
                    f"Its last lines say what it waited for.\nQueue the prompt again to retry.\n\n{tails}",
                    rank=late[0],
                    kind="start",
                )

    def close(self, reason: str = "") -> None:
        """End all ranks at once; slots are empty afterwards. Idempotent."""
        with self._lock:
            session, self._session = self._session, None
            self.slots.clear()
            self.parked.clear()
            self.phase, self.reason = "stopped", reason
            if session is not None:
                session.close()

    # ---- calls

    def call(
        self,
        request: Request,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        report: Report | None = None,
        cancelled: IsCancelled | None = None,
    ) -> dict[int, wire.Message]:
        """Send `request` to every rank and wait; the replies by rank.

        Raises Cancelled when `cancelled` said so and the ranks agreed, RankError when a rank failed or died. What
        `report` raises is raised here too, after the ranks have stopped. The group starts if it does not run.
        """
        with self._lock:
            self.start(report, cancelled)
            session = self._session
            assert session is not None
            self._call += 1
            self.phase = type(request).__name__.lower()
            try:
                with session.pool.stage(tensors or {}) as staged:
                    for connection in session.connections.values():
                        with contextlib.suppress(
                            wire.ConnectionLost
                        ):  # the reader reports it with the rank's name
                            connection.send(self._call, request, staged)
                return self._collect(session, report, cancelled)
            finally:
                if self._session is session:
                    self.phase = "ready"

    def cancel(self) -> None:
        """Ask the ranks to stop the running call at the next boundary. Returns at once; safe from any thread."""
        if (session := self._session) is not None:
            for connection in list(session.connections.values()):
                with contextlib.suppress(wire.ConnectionLost):
                    connection.send(self._call, Cancel())

    def _collect(
        self, session: _Session, report: Report | None, cancelled: IsCancelled | None
    ) -> dict[int, wire.Message]:
        doing = self.phase
        replies: dict[int, wire.Message] = {}
        failures: dict[int, Failure] = {}
        progress: dict[int, Progress] = {}
        raised: BaseException | None = None
        asked_to_stop = False
        give_up = float("inf")
        while len(replies) + len(failures) < len(session.connections):
            rank, message = _next(session)
            if message is None and rank >= 0:
                raise self._died(session, rank, doing)
            if message is not None and message.call == self._call:
                if isinstance(message.body, Progress):
                    progress[rank] = message.body
                    told = len(progress) == len(session.connections) or message.body.phase != "loading"
                    if (
                        report is not None and raised is None and told
                    ):  # or the total would grow as ranks join
                        try:
                            report(_together(progress), message.tensors)
                        except (
                            BaseException
                        ) as error:  # ComfyUI raises its interrupt from inside a progress bar
                            raised = error
                elif isinstance(message.body, Failure):
                    failures[rank] = message.body
                else:
                    replies[rank] = message
            real = [f for f in failures.values() if f.kind != "cancelled"]
            if not asked_to_stop and (real or raised is not None or (cancelled is not None and cancelled())):
                asked_to_stop = True
                self.cancel()
            if real and give_up == float("inf"):
                give_up = time.monotonic() + GRACE_SECONDS
            if time.monotonic() > give_up:
                break
        try:
            self._raise_failures(session, len(replies), failures, doing)
            if raised is not None:
                raise raised
        finally:
            # Its traceback leads here, and a cycle would keep all that its frames hold until the collector comes.
            del raised
        if failures:
            raise Cancelled(f"Cancelled while {_ing(doing)}.")
        return replies

    def _raise_failures(
        self, session: _Session, replies: int, failures: dict[int, Failure], doing: str
    ) -> None:
        """Raise what a rank has reported, unless all of them just stopped. Ends the group if one did not answer."""
        real = {rank: f for rank, f in failures.items() if f.kind != "cancelled"}
        if not real:
            return
        rank = min(real, key=lambda r: (real[r].kind != "memory", r))
        error = self._failed(session, rank, real[rank], doing)
        if any(failure.kind == "empty" for failure in real.values()):
            # Host and ranks disagree about what is held: load again on the next use.
            self.slots.clear()
            self.parked.clear()
        if replies + len(failures) < len(session.connections):
            self.close(str(error).partition("\n")[0])
        try:
            raise error
        finally:
            del error  # as in _collect

    def _died(self, session: _Session, rank: int, doing: str) -> RankError:
        """The error for a rank whose socket closed; ends the group."""
        first = session.dead if session.dead is not None else rank
        name, tail = session.name(first), session.log_tail(first)
        text = (
            f"{name[0].upper()}{name[1:]} died while {_ing(doing)}.\n"
            "Its process ended without an error of its own: killed from outside, or by the system for memory.\n"
            "Queue the prompt again: the group starts anew by itself."
        )
        self.close(text.partition("\n")[0])
        return RankError(
            f"{text}\n\nLast lines of its log:\n{tail}" if tail else text, rank=first, kind="died"
        )

    def _failed(
        self, session: _Session, rank: int, failure: Failure, doing: str, kind: str | None = None
    ) -> ShardedException:
        """The exception for what a rank reported."""
        if failure.kind == "refused":
            what, why, instead = (failure.message.split("\n") + ["", ""])[:3]
            return Refusal(what, why, instead)
        name = session.name(rank)
        tail = session.log_tail(rank)
        text = f"{name[0].upper()}{name[1:]} failed while {_ing(doing)}: {failure.message}"
        detail = f"\n\nOn the rank:\n{failure.traceback}" if failure.traceback else ""
        detail += f"\n\nLast lines of its log:\n{tail}" if tail else ""
        error = RankOutOfMemory if failure.kind == "memory" else RankError
        return error(text + detail, rank=rank, kind=kind or failure.kind, traceback=failure.traceback)

    # ---- what a person may want to know

    def memory(self) -> dict[int, Memory]:
        """Ask every rank for its memory now."""
        return {rank: m.body for rank, m in self.call(Stats()).items() if isinstance(m.body, Memory)}

    def ping(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Send tensors to every rank; rank 0's answer has each byte inverted."""
        return self.call(Ping(), tensors)[0].tensors

    def snapshot(self) -> dict[str, Any]:
        """The group as plain data, from what is known already: never waits for a rank."""
        session = self._session
        ranks = []
        for rank, device in enumerate(self.devices):
            age, memory = session.memory.get(rank, (0.0, Memory())) if session else (0.0, Memory())
            ranks.append(
                {
                    "rank": rank,
                    "pid": session.pids.get(rank) if session else None,
                    "device": device.key,
                    "label": device.label,
                    "state": _rank_state(session, rank),
                    "memory": msgspec.to_builtins(memory),
                    "memory_age": round(time.monotonic() - age, 1) if age else None,
                }
            )
        return {
            "phase": self.phase,
            "reason": self.reason,
            "agent_pid": session.processes.agent_pid if session and hasattr(session, "processes") else None,
            "ranks": ranks,
            "slots": [
                {
                    "name": name,
                    "state": state,
                    "layout": self.layouts[name].spec.describe(),
                    "degrees": self.layouts[name].spec.degrees(),
                    "weight_bytes": info.weight_bytes,
                    "load_seconds": round(info.seconds, 2),
                }
                for state, held in (("loaded", self.slots), ("parked", self.parked))
                for name, info in list(held.items())
                if self.alive
            ],
        }


ShardedException = RankError | Refusal

_ING = {
    "load": "loading",
    "encode": "encoding",
    "sample": "sampling",
    "decode": "decoding",
    "forward": "sampling",
    "verify": "verifying",
    "park": "parking",
    "unload": "unloading",
}


def _ing(phase: str) -> str:
    return _ING.get(phase, phase)


def _rank_state(session: _Session | None, rank: int) -> str:
    if session is None:
        return "stopped"
    if session.dead == rank:
        return "dead"
    return "ready" if rank in session.ready else "starting"


def _next(session: _Session) -> tuple[int, wire.Message | None]:
    """The next event of any rank; (-1, None) after a moment without one."""
    try:
        return session.inbox.get(timeout=POLL_SECONDS)
    except queue.Empty:
        return -1, None


def _tell(report: Report | None, progress: Progress) -> None:
    if report is not None:
        report(progress, {})


def _together(progress: Mapping[int, Progress]) -> Progress:
    """Progress of the whole group: loading adds up over the ranks, everything else is counted by rank 0."""
    if all(p.phase == "loading" for p in progress.values()):
        done, total = (sum(getattr(p, name) for p in progress.values()) for name in ("done", "total"))
        return Progress(phase="loading", done=done, total=total)
    return progress[min(progress)]


# --------------------------------------------------------------------------------------------------------------
# Slots and the registry


class Slot:
    """A model on a group of devices. Survives its group: it starts, restarts and reloads as needed."""

    def __init__(self, name: str, layout: Layout, model: ModelSpec):
        self.name, self.layout, self.model = name, layout, model
        self.kept = KeptTensors()
        # Not at exit: the groups are closed then anyway, and no thread can be started any more.
        weakref.finalize(self, _release_later, name, layout.devices).atexit = False

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
        with self.held(report, cancelled) as (_, group):
            return group.call(request, tensors, report=report, cancelled=cancelled)[0]

    @contextlib.contextmanager
    def held(
        self, report: Report | None = None, cancelled: IsCancelled | None = None
    ) -> Iterator[tuple[SlotInfo, WorkerGroup]]:
        """The loaded model's group for several calls that nothing may come between; and what rank 0 holds."""
        # Before the group's lock: who closes a group holds the registry's and waits for the group's.
        group = GROUPS.group(self.layout.devices)
        with group._lock:
            info = self._loaded_on(group, report, cancelled)
            try:
                yield info, group
            except BaseException:
                # What came with the call may have reached the ranks or not: the next one starts from nothing.
                self.kept.belong_to(None)
                raise

    def _loaded_on(
        self, group: WorkerGroup, report: Report | None, cancelled: IsCancelled | None
    ) -> SlotInfo:
        group.start(report, cancelled)
        if self.name not in group.slots:
            GROUPS.unload_unheld(group)
            group.parked.pop(self.name, None)
            request = Load(slot=self.name, model=self.model, parallel=self.layout.spec)
            try:
                info = group.call(request, report=report, cancelled=cancelled)[0].body
            except BaseException:
                # Whoever was stopped may have been through already, and would hold what nobody here knows of.
                _unload(group, self.name)
                raise
            assert isinstance(info, SlotInfo)
            group.layouts[self.name] = self.layout
            group.slots[self.name] = info
        return group.slots[self.name]

    def park(self) -> None:
        """Take the model off its devices, into host RAM if that has room. It comes back on the next use."""
        group = GROUPS.find(self.layout.devices)
        if group is None:
            return
        with group._lock:
            info = group.slots.pop(self.name, None)
            if info is None or not group.alive:
                return
            self.kept.belong_to(None)
            try:
                answers = [message.body for message in group.call(Park(slot=self.name)).values()]
            except RankError as error:
                log.warning("%s could not be parked: %s", self.name, str(error).partition("\n")[0])
                _unload(group, self.name)
                return
            if all(isinstance(answer, Parked) and answer.in_host_memory for answer in answers):
                group.parked[self.name] = info
            log.info("%s %s.", "Parked" if self.name in group.parked else "Dropped", self.name)

    def unload(self) -> None:
        """Give the model's memory back; the slot can be used again and then reloads."""
        group = GROUPS.find(self.layout.devices)
        if group is None:
            return
        with group._lock:
            self.kept.belong_to(None)
            if self.name in group.slots or self.name in group.parked:
                log.info("Unloading %s.", self.name)
                _unload(group, self.name)

    @property
    def loaded(self) -> bool:
        group = GROUPS.find(self.layout.devices)
        return group is not None and group.alive and self.name in group.slots


def _unload(group: WorkerGroup, name: str) -> None:
    """Empty a slot, on the ranks if they run. The caller holds the group's lock."""
    group.slots.pop(name, None)
    group.parked.pop(name, None)
    if group.alive:
        with contextlib.suppress(RankError):
            group.call(Unload(slot=name))


def _release_later(name: str, devices: tuple[Device, ...]) -> None:
    """Unload a slot nobody holds any more. In a thread: a finalizer may run inside any other call."""
    group = GROUPS.find(devices)
    if group is not None and (name in group.slots or name in group.parked):
        threading.Thread(target=GROUPS.unload_unheld, args=(group,), daemon=True).start()


class Registry:
    """All groups of this host, by their devices; outlives every graph. A device belongs to one group at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._groups: dict[tuple[str, ...], WorkerGroup] = {}
        self._slots: weakref.WeakValueDictionary[str, Slot] = weakref.WeakValueDictionary()

    def group(self, devices: tuple[Device, ...]) -> WorkerGroup:
        """The group of exactly these devices; groups that hold one of them are closed first."""
        key = _key(devices)
        with self._lock:
            for other_key in [k for k in self._groups if k != key and set(k) & set(key)]:
                self._groups.pop(other_key).close("Its devices were needed by another layout.")
            if key not in self._groups:
                self._groups[key] = WorkerGroup(devices)
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
                slot = self._slots[name] = Slot(name, layout, model)
            return slot

    def unload_unheld(self, group: WorkerGroup) -> None:
        """Unload what nothing refers to any more. A slot that was asked for again meanwhile stays as it is."""
        with group._lock:
            for name in [*group.slots, *group.parked]:
                if name not in self._slots:
                    log.info("Unloading %s: nothing refers to it any more.", name)
                    _unload(group, name)

    def groups(self) -> list[WorkerGroup]:
        with self._lock:
            return list(self._groups.values())

    def snapshot(self) -> list[dict[str, Any]]:
        return [group.snapshot() for group in self.groups()]

    def close_all(self) -> None:
        with self._lock:
            for group in self._groups.values():
                group.close("The host ended.")
            self._groups.clear()


def _key(devices: tuple[Device, ...]) -> tuple[str, ...]:
    return tuple(device.key for device in devices)


GROUPS = Registry()
atexit.register(GROUPS.close_all)
