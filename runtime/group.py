"""The host half: a group of ranks that is started lazily, called, cancelled, watched and closed.

    node thread ── call ──> every rank's socket          one call at a time, the same request to all ranks
    reader thread per rank ── replies ──> one inbox ──> node thread
    listener thread ── admits ranks that know the token, drops everyone else

An idle rank waits on its socket, never inside a collective. What can break, and what happens then:
a rank reports an error       the others are cancelled; if they do not come back within a few seconds, all are killed
a rank's socket closes        the call ends at once with that rank's name; the whole group is killed
a rank is silent or stuck     the session's watch has all ranks write down their stacks and kills them (`supervision`)
a call is cancelled           the ranks agree on a step, stop there together and stay warm
the host dies                 every rank sees its socket close and exits by itself
After a kill nothing has to be done by hand: the next use of a slot starts the group again and reloads.
What the group is doing is one value, `state.current`; errors and `snapshot` are made from it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import environment, healing, launch, machine, requirements, wire
from .healing import Work
from .idle import IdleTimes, IdleWatch
from .registry import Registry
from .session import Session
from .slots import IsCancelled, Report, Slot, again_if_gone
from .spec import (
    Cancel,
    Cancelled,
    Device,
    Failure,
    Layout,
    Memory,
    Ping,
    Progress,
    RankError,
    Ready,
    Refusal,
    Request,
    SlotInfo,
    Stats,
)
from .state import GroupState, StateMachine, as_data, memory_lines

if TYPE_CHECKING:
    import torch

__all__ = [
    "GROUPS",
    "IdleTimes",
    "IdleWatch",
    "IsCancelled",
    "Report",
    "Slot",
    "Work",
    "WorkerGroup",
    "again_if_gone",
]

log = logging.getLogger("comfyui-sharded")

START_SECONDS = 60.0
GRACE_SECONDS = 3.0  # for the other ranks, after one has failed
FAILED_SECONDS = 0.5  # for another rank to be found dead, after one has failed while the group starts
PAUSE_SECONDS = 0.2  # between calls, after which ranks are looked at again


class WorkerGroup:
    """Ranks on `devices`, one each. Thread-safe; one call at a time."""

    def __init__(self, devices: tuple[Device, ...]):
        self.devices = devices
        self.state = StateMachine(devices)
        self.slots: dict[str, SlotInfo] = {}  # what the running session holds, as rank 0 reports it
        self.parked: dict[str, SlotInfo] = {}  # what it holds in host RAM instead
        self.layouts: dict[str, Layout] = {}
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._ended = False  # with its host, for good
        self._call = 0
        self._answered = 0.0  # when the last call ended, by the monotonic clock
        self.used_at = time.monotonic()  # when a slot was last used

    # ---- life

    @property
    def id(self) -> str:
        """What names the group to routes: its devices."""
        return ",".join(device.key for device in self.devices)

    @property
    def where(self) -> str:
        """Its devices as people read them."""
        return ", ".join(device.label for device in self.devices)

    @contextlib.contextmanager
    def unless_busy(self) -> Iterator[bool]:
        """Hold the group if nobody does, and say whether: never waits for a running call."""
        free = self._lock.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._lock.release()

    @property
    def alive(self) -> bool:
        """Whether all ranks run. What `slots` and `parked` say is true only then."""
        session = self._session
        return session is not None and session.dead is None

    @property
    def phase(self) -> str:
        """As `/sharded/state` has it: stopped, starting, ready, parked, or the name of the request that runs."""
        return self.state.current.legacy_phase

    @property
    def reason(self) -> str:
        """Why it is stopped; "" while it runs."""
        return self.state.current.reason

    def start(self, report: Report | None = None, cancelled: IsCancelled | None = None) -> None:
        """Start the ranks unless they run. Raises RankError (kind "start") within a minute, or Cancelled."""
        with self._lock:
            if self._ended:
                raise Cancelled("ComfyUI is ending.")
            if self.runs():
                return
            self._end()
            if problem := environment.unsupported_platform():
                raise Refusal(
                    problem,
                    "The ranks are started by torchrun and talk over a Unix socket with shared memory.",
                    "Works here: every stock loader; this pack's nodes stay in the workflow for a Linux machine.",
                )
            requirements.check()
            machine.first_that_works(self.devices, lambda setting: self._start(setting, report, cancelled))

    def runs(self) -> bool:
        """As `alive`; after a pause between calls the ranks' processes are looked at too, which has its price.

        One that was killed frees its memory before its socket closes.
        """
        session = self._session
        if session is None or session.dead is not None:
            return False
        return time.monotonic() - self._answered < PAUSE_SECONDS or session.find_lost() is None

    def settle(self) -> None:
        """Nothing runs now: say whether anything is on the devices. The caller holds the group."""
        self.state.ready(parked=bool(self.parked) and not self.slots)

    def _start(self, setting: machine.Setting, report: Report | None, cancelled: IsCancelled | None) -> None:
        self.state.starting()
        try:
            session = self._session = Session(
                self.devices, self.state, dict(setting.variables), self._clear_away
            )
            self._await_ready(session, report, cancelled)
        except RankError as error:
            self._break(str(error).partition("\n")[0])
            raise
        except BaseException as error:  # a cancel, or what the host's progress bar raises
            self.close(str(error).partition("\n")[0])
            raise
        self.settle()

    def _await_ready(self, session: Session, report: Report | None, cancelled: IsCancelled | None) -> None:
        deadline = time.monotonic() + START_SECONDS
        count = len(self.devices)
        failed: tuple[int, Failure] | None = None
        _tell(report, Progress(phase="starting", done=0, total=count))
        while len(session.ready) < count:
            rank, message = session.next_event()
            if message is not None and isinstance(message.body, Ready):
                session.ready[rank] = message.body
                self.state.rank_ready(rank)
                _tell(report, Progress(phase="starting", done=len(session.ready), total=count))
            elif message is not None and isinstance(message.body, Failure):
                if failed is None:
                    # A moment for another that has ended: then this one only lost its connection to it.
                    failed, deadline = (rank, message.body), time.monotonic() + FAILED_SECONDS
            elif rank >= 0 and message is None:
                raise self._lost(session, rank)
            elif rank < 0 and session.processes.agent_ended() is not None:
                tail = launch.log_tail(launch.agent_log(session.directory), 25)
                raise RankError(
                    f"torchrun ended while the group was starting.\nIts last lines:\n{tail}", kind="start"
                )
            if cancelled is not None and cancelled():
                raise Cancelled("Cancelled while the group was starting.")
            if time.monotonic() > deadline:
                if failed is not None:
                    raise self._failed_start(session, *failed)
                late = session.late()
                session.write_stacks()
                ranks = self.state.current.ranks
                tails = "\n".join(f"{ranks[r].name}:\n{session.log_tail(r, 25)}" for r in late)
                raise RankError(
                    f"Rank {', '.join(map(str, late))} of {count} was not ready after {START_SECONDS:.0f} s.\n"
                    f"Its last lines say what it waited for.\nQueue the prompt again to retry.\n\n{tails}",
                    rank=late[0],
                    kind="start",
                )

    def _failed_start(self, session: Session, rank: int, failure: Failure) -> ShardedException:
        if (lost := session.find_lost()) is not None:
            return self._lost(session, lost)
        kind = machine.BROKEN if failure.kind == machine.BROKEN else "start"
        return self._failed(session, rank, failure, kind=kind)

    def close(self, reason: str = "") -> None:
        """End all ranks at once; slots are empty afterwards. Idempotent."""
        with self._lock:
            self._end()
            self.state.ended(reason)

    def _clear_away(self, session: Session) -> None:
        """A rank was lost. Who runs a call sees it himself; an idle group has nobody else to end what is left."""
        with self.unless_busy() as free:
            if free and self._session is session:
                self._break(self.reason)

    def _break(self, reason: str) -> None:
        """End all ranks because of what happened; the next use starts them again."""
        self._end()
        self.state.broken(reason)

    def _end(self) -> None:
        session, self._session = self._session, None
        self.slots.clear()
        self.parked.clear()
        if session is not None:
            session.close()

    def end(self) -> None:
        """The host ends: end all ranks now, though a call may run in another thread. It starts none again."""
        self._ended = True
        if (session := self._session) is not None:
            session.close()

    def abandon(self) -> None:
        """In a process that was forked from the host: leave the ranks to the host, and never touch them."""
        session, self._session = self._session, None
        self._lock = threading.RLock()
        if session is not None:
            session.abandon()

    # ---- calls

    def call(
        self,
        request: Request,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        report: Report | None = None,
        cancelled: IsCancelled | None = None,
        start: bool = True,
    ) -> dict[int, wire.Message]:
        """Send `request` to every rank and wait; the replies by rank.

        Raises Cancelled when `cancelled` said so and the ranks agreed, RankError when a rank failed or died. What
        `report` raises is raised here too, after the ranks have stopped. The group starts if it does not run,
        unless `start` is False: then that is a RankError too (kind "died").
        """
        with self._lock:
            if start:
                self.start(report, cancelled)
            elif not self.alive:
                raise RankError("The group does not run.", kind="died")
            session = self._session
            assert session is not None
            self._call += 1
            name = type(request).__name__.lower()
            self.state.busy(name, _DOING.get(name, "answering"), getattr(request, "slot", ""))
            try:
                with session.call_on_all():
                    if unsent := self._send(session, request, tensors or {}):
                        raise self._lost(session, unsent[0], kind="gone")
                    return self._collect(session, report, cancelled)
            finally:
                self._answered = time.monotonic()
                if self._session is session:
                    self.settle()

    def _send(self, session: Session, request: Request, tensors: Mapping[str, torch.Tensor]) -> list[int]:
        """Send a request to all ranks; those that were gone before it reached them."""
        unsent = []
        with session.pool.stage(tensors) as staged:
            for rank, connection in session.connections.items():
                try:
                    connection.send(self._call, request, staged)
                except wire.ConnectionLost:
                    unsent.append(rank)
        return unsent

    def cancel(self) -> None:
        """Ask the ranks to stop the running call at the next boundary. Returns at once; safe from any thread."""
        if (session := self._session) is not None:
            for connection in list(session.connections.values()):
                with contextlib.suppress(wire.ConnectionLost):
                    connection.send(self._call, Cancel())

    def _collect(
        self, session: Session, report: Report | None, cancelled: IsCancelled | None
    ) -> dict[int, wire.Message]:
        replies: dict[int, wire.Message] = {}
        failures: dict[int, Failure] = {}
        progress: dict[int, Progress] = {}
        raised: BaseException | None = None
        asked_to_stop = False
        give_up = float("inf")
        while len(replies) + len(failures) < len(session.connections):
            rank, message = session.next_event()
            if message is None and rank >= 0:
                raise self._lost(session, rank)
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
                    session.answered(rank)
                else:
                    replies[rank] = message
                    session.answered(rank)
            real = [f for f in failures.values() if f.kind != "cancelled"]
            if not asked_to_stop and (real or raised is not None or (cancelled is not None and cancelled())):
                asked_to_stop = True
                self.cancel()
            if real and give_up == float("inf"):
                give_up = time.monotonic() + GRACE_SECONDS
            if time.monotonic() > give_up:
                if (lost := session.find_lost()) is not None:
                    raise self._lost(session, lost)  # what the others report follows from that
                break
        try:
            self._raise_failures(session, len(replies), failures)
            if raised is not None:
                raise raised
        finally:
            # Its traceback leads here, and a cycle would keep all that its frames hold until the collector comes.
            del raised
        if failures:
            raise Cancelled(f"Cancelled while {self.state.current.doing}.")
        return replies

    def _raise_failures(self, session: Session, replies: int, failures: dict[int, Failure]) -> None:
        """Raise what a rank has reported, unless all of them just stopped. Ends the group if one did not answer."""
        real = {rank: f for rank, f in failures.items() if f.kind != "cancelled"}
        if not real:
            return
        rank = min(real, key=lambda r: (real[r].kind != "memory", r))
        error = self._failed(session, rank, real[rank])
        if any(failure.kind == "empty" for failure in real.values()):
            # Host and ranks disagree about what is held: load again on the next use.
            self.slots.clear()
            self.parked.clear()
        if replies + len(failures) < len(session.connections):
            self._break(str(error).partition("\n")[0])
        try:
            raise error
        finally:
            del error  # as in _collect

    def _lost(self, session: Session, rank: int, kind: str = "") -> RankError:
        """The error for a rank that is gone, silent or stuck; ends the group."""
        state, verdict = self.state.current, session.verdict
        first = session.dead if session.dead is not None else rank
        doing = state.doing or state.phase
        name, when = state.ranks[first].name, f"{state.seconds:.1f} s after that began"
        if verdict is None:
            headline = f"{name} died while {doing}, {when}."
            cause = "Its process ended without an error of its own: killed from outside, or by the system for memory."
        else:
            headline = f"{name} was {verdict.kind} while {doing}, {when}: {verdict.why}."
            cause = "All ranks were ended; the log says where this one was, and what it had written before."
        text = f"{headline}\n{cause}\nQueue the prompt again: the group starts anew by itself."
        detail = _details(state, session.log_tail(first, 40))  # the stacks of its threads may be there
        self._break(headline)
        kind = kind or (verdict.kind if verdict else "died")
        return RankError(text + detail, rank=first, kind=kind)

    def _failed(
        self, session: Session, rank: int, failure: Failure, kind: str | None = None
    ) -> ShardedException:
        """The exception for what a rank reported."""
        if failure.kind == "refused":
            what, why, instead = (failure.message.split("\n") + ["", ""])[:3]
            return Refusal(what, why, instead)
        state = self.state.current
        one, doing = state.ranks[rank], state.doing or state.phase
        detail = f"\n\nOn the rank:\n{failure.traceback}" if failure.traceback else ""
        detail += _details(state, session.log_tail(rank))
        if failure.kind == "memory" and kind is None:
            pids = {other.rank: other.pid for other in state.ranks if other.pid is not None}
            return healing.out_of_memory(
                rank, one.name, self.devices[rank], doing, failure, one.memory, pids, detail
            )
        text = f"{one.name} failed while {doing}, {state.seconds:.1f} s after that began: {failure.message}"
        return RankError(text + detail, rank=rank, kind=kind or failure.kind, traceback=failure.traceback)

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
        return {
            "id": self.id,
            "agent_pid": session.processes.agent_pid if session else None,
            **as_data(self.state.current),
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

_DOING = {
    "load": "loading",
    "encode": "encoding",
    "sample": "sampling",
    "decode": "decoding",
    "forward": "sampling",
    "verify": "verifying",
    "park": "parking",
    "unload": "unloading",
    "measure": "measuring",
}


def _details(state: GroupState, tail: str) -> str:
    """What every error ends with: the memory of each device, and the last lines of the rank's log."""
    memory = memory_lines(state)
    told = f"\n\nMemory, as the ranks last told it:\n{memory}" if memory else ""
    return f"{told}\n\nLast lines of its log:\n{tail}" if tail else told


def _tell(report: Report | None, progress: Progress) -> None:
    if report is not None:
        report(progress, {})


def _together(progress: Mapping[int, Progress]) -> Progress:
    """Progress of the whole group: loading adds up over the ranks, everything else is counted by rank 0."""
    if all(p.phase == "loading" for p in progress.values()):
        done, total = (sum(getattr(p, name) for p in progress.values()) for name in ("done", "total"))
        return Progress(phase="loading", done=done, total=total)
    return progress[min(progress)]


GROUPS = Registry(WorkerGroup)
atexit.register(GROUPS.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=GROUPS.abandon)
