"""The host half: a group of ranks that is started lazily, called, cancelled, watched and closed.

    node thread ── call ──> every rank's socket          one call at a time, the same request to all ranks
    reader thread per rank ── replies ──> one inbox ──> node thread
    listener thread ── admits ranks that know the token, drops everyone else

An idle rank waits on its socket, never inside a collective. What can break, and what happens then:
a rank reports an error       the others are cancelled; if they do not come back within a few seconds, all are killed
a rank's socket closes        the call ends at once with that rank's name; the whole group is killed
a rank is silent or stuck     the session's watch has all ranks write down their stacks and kills them (`supervision`)
a call is cancelled           the ranks agree on a step, stop there together and stay warm
a person stops the group      all are killed; the running call, and the rest of its run, end with an error that says so
the host dies                 every rank sees its socket close and exits by itself
After a kill nothing has to be done by hand: the next use of a slot starts the group again and reloads.
What the group is doing is one value, `state.current`; errors and `snapshot` are made from it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from . import environment, healing, incidents, launch, machine, requirements, wire
from .activity import Activity
from .healing import Work
from .idle import IdleTimes, IdleWatch
from .incidents import UNKNOWN, Incident, Params
from .journal import Journal
from .registry import Hindrance, Registry
from .session import Session
from .shown import fitted, group_as_data, incident_as_data
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
    describe_devices,
)
from .state import GroupState, StateMachine, memory_lines

if TYPE_CHECKING:
    import torch

__all__ = [
    "GROUPS",
    "IN_USE_SECONDS",
    "PACK_VERSION",
    "Hindrance",
    "IdleTimes",
    "IdleWatch",
    "Incident",
    "IsCancelled",
    "Report",
    "Slot",
    "Work",
    "WorkerGroup",
    "again_if_gone",
    "fitted",
    "incident_as_data",
]

PACK_VERSION = launch.pack_version()
START_SECONDS = 60.0
GRACE_SECONDS = 3.0  # for the other ranks, after one has failed
FAILED_SECONDS = 0.5  # for another rank to be found dead, after one has failed while the group starts
PAUSE_SECONDS = 0.2  # between calls, after which ranks are looked at again
IN_USE_SECONDS = 30.0  # after its last use in a run, which may need it again
LET_GO_SECONDS = 10.0  # for whoever holds a group that was stopped to let go of it


class WorkerGroup:
    """Ranks on `devices`, one each. Thread-safe; one call at a time."""

    def __init__(self, devices: tuple[Device, ...], journal: Journal | None = None):
        self.devices = devices
        self.id = _id_of(devices)
        self.journal = journal or Journal()
        self.activity = Activity()
        self.state = StateMachine(devices, self.activity.note_memory)
        self.state.listen(lambda _: self.journal.touch())
        self.slots: dict[str, SlotInfo] = {}  # what the running session holds, as rank 0 reports it
        self.parked: dict[str, SlotInfo] = {}  # what it holds in host RAM instead
        self.layouts: dict[str, Layout] = {}
        self.sizes: dict[str, tuple[int, ...]] = {}  # bytes of a slot's weights by rank
        self.restore_seconds: dict[str, float] = {}  # what its last return from host RAM took
        self.start_seconds: float | None = None  # what the last start took
        self.parked_by = ""  # who took the models off the devices: "idle", "user", "comfyui"
        self.work: Work | None = None  # what the calls of who holds the group are for
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._ended = False  # with its host, for good
        self._call = 0
        self._answered = 0.0  # when the last call ended, by the monotonic clock
        self.used_at = time.monotonic()  # when a slot was last used
        self._stop = ""  # why all has to end, until whoever holds the group has heard of it
        self._run = ""  # the host's run that used it last
        self._stopped_run = ""  # the last that was stopped
        self._untold: int | None = None  # a rank found dead, of which no error tells

    # ---- life

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
    def stage(self) -> str:
        """What a person should read: the operation while it is busy, and also between two steps of a sampler."""
        state = self.state.current
        if state.phase == "busy":
            return state.doing
        return "sampling" if state.phase == "ready" and self.activity.between_steps else state.phase

    @property
    def stopping(self) -> bool:
        """Whether a person has stopped it, and who holds it has not let go of it yet."""
        return bool(self._stop)

    @property
    def reason(self) -> str:
        """Why it is stopped; "" while it runs."""
        return self.state.current.reason

    def start(self, report: Report | None = None, cancelled: IsCancelled | None = None) -> None:
        """Start the ranks unless they run. Raises RankError (kind "start") within a minute, or Cancelled."""
        with self._lock:
            if self._ended:
                raise Cancelled("ComfyUI is ending.")
            self._raise_if_stopped()
            if self.runs():
                return
            self._note_found_dead()
            self._end()
            if problem := environment.unsupported_platform():
                raise Refusal(
                    problem,
                    "The ranks are started by torchrun and talk over a Unix socket with shared memory.",
                    "Works here: every stock loader; this pack's nodes stay in the workflow for a Linux machine.",
                )
            requirements.check()
            try:
                machine.first_that_works(
                    self.devices, lambda setting: self._start(setting, report, cancelled)
                )
            except RankError as error:
                if error.kind in ("start", machine.BROKEN):
                    self.journal.note(self._failed_incident("start", error))
                raise

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
        began = time.monotonic()
        self.activity.starting()
        self.state.starting()
        try:
            session = self._session = Session(
                self.devices, self.state, dict(setting.variables), self._clear_away
            )
            self._await_ready(session, report, cancelled)
        except RankError as error:
            if error.kind != "stopped":
                self._break(str(error))
            raise
        except BaseException as error:  # a cancel, or what the host's progress bar raises
            self.close(incidents.one_line(str(error)))
            raise
        finally:
            self.activity.started()
        self.start_seconds = time.monotonic() - began
        self.settle()

    def _await_ready(self, session: Session, report: Report | None, cancelled: IsCancelled | None) -> None:
        deadline = time.monotonic() + START_SECONDS
        count = len(self.devices)
        failed: tuple[int, Failure] | None = None
        self._tell(report, Progress(phase="starting", done=0, total=count))
        while len(session.ready) < count:
            rank, message = session.next_event()
            self._raise_if_stopped()  # or its end would be told as torchrun's own
            if message is not None and isinstance(message.body, Ready):
                session.ready[rank] = message.body
                self.state.rank_ready(rank)
                self._tell(report, Progress(phase="starting", done=len(session.ready), total=count))
            elif message is not None and isinstance(message.body, Failure):
                if failed is None:
                    # A moment for another that has ended: then this one only lost its connection to it.
                    failed, deadline = (rank, message.body), time.monotonic() + FAILED_SECONDS
            elif rank >= 0 and message is None:
                raise self._lost(session, rank)
            elif rank < 0 and session.processes.agent_ended() is not None:
                tail = launch.log_tail(launch.agent_log(session.directory), 25)
                raise RankError(
                    f"torchrun ended while the group on {describe_devices(self.devices)} was starting.\n"
                    "Its last lines say why: they are in ComfyUI's log and in the panel.\n"
                    "Queue the prompt again to retry; Doctor (Sharded) tests what a group needs.",
                    detail=f"Its last lines:\n{tail}",
                    kind="start",
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
                who = (
                    " and ".join(ranks[r].name for r in late)
                    if len(late) < 3
                    else f"{len(late)} of {count} ranks"
                )
                raise RankError(
                    f"{who} {'was' if len(late) == 1 else 'were'} not ready after {START_SECONDS:.0f} s.\n"
                    "The last lines of the log say what was waited for: they are in ComfyUI's log and in the panel.\n"
                    "Queue the prompt again to retry; Doctor (Sharded) tests what a group needs.",
                    detail=tails,
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

    def stop(self, reason: str) -> None:
        """A person wants it to end: end all ranks now, though a call may run in another thread.

        That call raises RankError (kind "stopped"), and so does the next one of the same run, which must not start the
        group again: unless that has not used it for a while. Waits until who holds the group has let go of it, for
        some seconds at most. Idempotent.
        """
        if self.state.current.phase == "busy" or time.monotonic() - self.used_at < IN_USE_SECONDS:
            self._stopped_run = self._run
        self._stop = reason
        self.journal.touch()
        if (session := self._session) is not None:
            session.stop()
        if not self._lock.acquire(timeout=LET_GO_SECONDS):
            return  # it ends as soon as the group is asked for something again
        try:
            if self._stop:
                self._stop = ""
                self.close(reason)
        finally:
            self._lock.release()

    def _raise_if_stopped(self) -> None:
        if self._stop:
            raise self._stopped()

    def _stopped(self) -> RankError:
        """The error for who was interrupted by `stop`; ends the group."""
        reason, self._stop = self._stop, ""
        state = self.state.current
        doing = state.doing or ("starting" if state.phase == "starting" else "")
        while_doing = f" while {doing}, {state.seconds:.1f} s after that began" if doing else ""
        self._end()
        self.state.ended(reason)
        return _stopped_error(reason, while_doing)

    @contextlib.contextmanager
    def working(self, work: Work | None, run: str = "") -> Iterator[None]:
        """What the calls inside are for, and in which run of the host ("": in none that it knows of).

        Raises RankError (kind "stopped") if a person has stopped that run.
        """
        if run and run == self._stopped_run:
            raise _stopped_error(self.reason or "Stopped by request.", " between two steps")
        before, self.work, self._run = self.work, work, run
        try:
            yield
        finally:
            self.work = before

    def _clear_away(self, session: Session) -> None:
        """A rank was lost. Who runs a call sees it himself; an idle group has nobody else to end what is left."""
        with self.unless_busy() as free:
            if free and self._session is session and not self._stop:
                incident = self._lost_incident(session, session.dead or 0, UNKNOWN)
                self._break(self.reason)
                self.journal.note(incident)

    def _break(self, reason: str) -> None:
        """End all ranks because of what happened; the next use starts them again."""
        self._end()
        self.state.broken(incidents.one_line(reason))

    def _end(self) -> None:
        session, self._session = self._session, None
        self.slots.clear()
        self.parked.clear()
        self.parked_by = ""
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
        doing: str = "",
    ) -> dict[int, wire.Message]:
        """Send `request` to every rank and wait; the replies by rank.

        Raises Cancelled when `cancelled` said so and the ranks agreed, RankError when a rank failed or died. What
        `report` raises is raised here too, after the ranks have stopped. The group starts if it does not run,
        unless `start` is False: then that is a RankError too (kind "died"). `doing` is what people read, if the kind
        of the request does not say it.
        """
        with self._lock:
            self._raise_if_stopped()
            if start:
                self.start(report, cancelled)
            elif not self.alive:
                raise RankError("The group does not run.", kind="died")
            session = self._session
            assert session is not None
            self._call += 1
            name, slot = type(request).__name__.lower(), getattr(request, "slot", "")
            doing = doing or _DOING.get(name, "answering")
            self.activity.begin(name, doing, slot, self.work)
            self.state.busy(name, doing, slot)
            well = False
            try:
                with session.call_on_all():
                    if unsent := self._send(session, request, tensors or {}):
                        raise self._lost(session, unsent[0], kind="gone")
                    replies = self._collect(session, report, cancelled)
                    well = True
                    return replies
            finally:
                self.activity.end(well=well)
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
            self._raise_if_stopped()
            rank, message = session.next_event()
            if message is None and rank >= 0:
                raise self._lost(session, rank)
            if message is not None and message.call == self._call:
                if isinstance(message.body, Progress):
                    progress[rank] = message.body
                    told = len(progress) == len(session.connections) or message.body.phase != "loading"
                    if told:  # or the total would grow as ranks join
                        together = _together(progress)
                        self.activity.told(together)
                        if report is not None and raised is None:
                            try:
                                report(together, message.tensors)
                            except BaseException as error:  # ComfyUI's progress bar raises its interrupt
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
                if not real:
                    self.state.cancelling()
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
        self._raise_if_stopped()  # what ranks report then follows from that
        real = {rank: f for rank, f in failures.items() if f.kind != "cancelled"}
        if not real:
            return
        rank = min(real, key=lambda r: (real[r].kind != "memory", r))
        error = self._failed(session, rank, real[rank])
        if any(failure.kind == "empty" for failure in real.values()):
            # Host and ranks disagree about what is held: load again on the next use.
            self.slots.clear()
            self.parked.clear()
        incident = self._incident_of(error, real[rank])
        if replies + len(failures) < len(session.connections):
            self._break(str(error))
        if incident is not None and incident.kind != "memory":
            self.journal.note(incident)
        elif isinstance(error, RankError):
            error.incident = incident  # it may run in less yet, and then there is nothing to tell
        try:
            raise error
        finally:
            del error  # as in _collect

    def _lost(self, session: Session, rank: int, kind: str = "") -> RankError:
        """The error for a rank that is gone, silent or stuck; ends the group."""
        if self._stop:
            return self._stopped()
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
        incident = self._lost_incident(session, first, self._params(doing), cause + detail)
        self._break(headline)
        if kind == "gone":
            self._untold = first
        else:
            self.journal.note(incident)
        kind = kind or (verdict.kind if verdict else "died")
        return RankError(text, detail=detail, rank=first, kind=kind)

    def _failed(
        self, session: Session, rank: int, failure: Failure, kind: str | None = None
    ) -> ShardedException:
        """The exception for what a rank reported."""
        if failure.kind == "refused":
            what, why, instead = (failure.message.split("\n") + ["", ""])[:3]
            return Refusal(what, why, instead)
        state = self.state.current
        one, doing = state.ranks[rank], state.doing or state.phase
        detail = f"On the rank:\n{failure.traceback}" if failure.traceback else ""
        detail += _details(state, session.log_tail(rank))
        if failure.kind == "memory" and kind is None:
            pids = {other.rank: other.pid for other in state.ranks if other.pid is not None}
            return healing.out_of_memory(
                rank, one.name, self.devices[rank], doing, failure, one.memory, pids, detail
            )
        said = healing.brief(failure.message)
        text = (
            f"{one.name} failed while {doing}, {state.seconds:.1f} s after that began: {said}\n"
            "All ranks have stopped; where this one was is in ComfyUI's log and in the panel.\n"
            "Queue the prompt again. If it fails again, another layout or dtype may do; please report it then."
        )
        return RankError(
            text, detail=detail, rank=rank, kind=kind or failure.kind, traceback=failure.traceback
        )

    # ---- what the journal is told

    def _params(self, doing: str, wanted: int = 0, seconds: float | None = None) -> Params:
        step, steps = self.activity.step
        return Params(doing=doing, step=step, steps=steps, wanted=wanted or None, seconds=seconds)

    def _lost_incident(self, session: Session, rank: int, params: Params, detail: str = "") -> Incident:
        verdict = session.verdict
        if verdict is not None:
            params = msgspec.structs.replace(params, seconds=round(verdict.seconds, 1))
        if not detail:
            detail = _details(self.state.current, session.log_tail(rank, 40))
        kind = verdict.kind if verdict else "died"
        return incidents.lost(self.id, kind, rank, self.devices[rank].label, params, detail)

    def _incident_of(self, error: RankError | Refusal, failure: Failure) -> Incident | None:
        """What there is to tell of what a rank has reported; None for what mends itself, or is a refusal."""
        if not isinstance(error, RankError) or error.kind not in ("memory", "failed", machine.BROKEN):
            return None
        params = self._params(self.state.current.doing, wanted=healing.tried_bytes(failure.message))
        if error.kind != "memory":
            return self._failed_incident("failed", error, params)
        label = self.devices[error.rank].label
        detail = f"{error.why}\n\n{error.detail}"
        return incidents.lost(self.id, "memory", error.rank, label, params, detail)

    def _failed_incident(
        self, kind: Literal["failed", "start"], error: RankError, params: Params = UNKNOWN
    ) -> Incident:
        rank = error.rank if error.rank >= 0 else None
        label = self.devices[rank].label if rank is not None else None
        return incidents.failed(self.id, kind, error.what, error.detail, rank, label, params)

    def _note_found_dead(self) -> None:
        """The group starts again: say why, if a rank was lost and nobody has been told."""
        session, rank = self._session, self._untold
        if rank is None and session is not None:
            rank = session.dead
        self._untold = None
        if rank is not None:
            self.journal.note(incidents.restarted(self.id, rank, self.devices[rank].label))

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
        return group_as_data(self, session.processes.agent_pid if session else None)

    def _tell(self, report: Report | None, progress: Progress) -> None:
        self.activity.told(progress)
        if report is not None:
            report(progress, {})


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


def _id_of(devices: tuple[Device, ...]) -> str:
    """What names the group to routes and pages: its devices, or in place of cards' serial numbers what they give."""
    keys = ",".join(device.key for device in devices)
    if all(device.kind == "cpu" for device in devices):
        return keys
    return f"{devices[0].kind}:{len(devices)}-{hashlib.sha256(keys.encode()).hexdigest()[:16]}"


def _stopped_error(reason: str, while_doing: str) -> RankError:
    return RankError(
        f"{reason.rstrip('.')}{while_doing}.\n"
        "All ranks of the group were ended, and so is this run.\n"
        "Queue the prompt again: the group starts anew by itself.",
        kind="stopped",
    )


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
