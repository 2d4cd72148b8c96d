"""One life of a group: its processes, its connections, a reader for each, and the watch over all of them.

    reader thread per rank ── replies ──> inbox ──> the thread that waits for them (WorkerGroup)
                           ── heartbeats ──> supervision, state
    listener thread ── admits ranks that know the token, drops everyone else
    watch thread ── a rank is gone, silent or stuck: stacks of all ranks into their logs, an end to all of them

Never restarted, only replaced: a group that starts again has another session.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from . import launch, leftovers, wire
from .spec import Device, Heartbeat, Ready
from .state import StateMachine
from .supervision import Supervision, Verdict

log = logging.getLogger("comfyui-sharded")

POLL_SECONDS = 0.05
WATCH_SECONDS = 0.25
_STAGES = {"starting": 0, "joining": 1, "testing": 2}  # what ranks do while the group starts, in this order
STACKS_SECONDS = 1.0  # the longest wait for ranks that write down their stacks


class Session:
    """The processes of a group from their start to their end."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        state: StateMachine,
        variables: Mapping[str, str] | None = None,
        on_loss: Callable[[Session], None] | None = None,
    ):
        """`variables` go into the ranks' environment. `on_loss` is called after a rank was lost and all were ended."""
        self.devices, self.state = devices, state
        self._on_loss = on_loss
        self.directory = launch.private_directory()
        self.token = secrets.token_hex(32)
        self.inbox: queue.SimpleQueue[tuple[int, wire.Message | None]] = queue.SimpleQueue()
        self.connections: dict[int, wire.Connection] = {}
        self.ready: dict[int, Ready] = {}
        self.dead: int | None = None  # the first rank that was lost
        self.verdict: Verdict | None = None  # why, if it did not just end
        self.working: frozenset[int] = frozenset()  # ranks that owe an answer
        self.closed = False
        self._supervision = Supervision()
        self._loss = threading.Lock()
        self._ending = threading.Lock()
        self._wake = threading.Event()
        try:
            self._listener, address = wire.listen(self.directory)
        except OSError:
            leftovers.remove_directory(self.directory)
            raise
        self.pool = wire.BufferPool(address.startswith("unix:") and wire.shared_memory_available())
        try:
            self.processes = launch.Processes(self.directory, address, self.token, devices, variables)
        except BaseException:
            self._listener.close()
            leftovers.remove_directory(self.directory)
            raise
        threading.Thread(target=self._accept, name="sharded-listener", daemon=True).start()
        threading.Thread(target=self._watch, name="sharded-watch", daemon=True).start()

    # ---- threads

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
            self.processes.watch(pid)
        self.state.rank_joined(rank, pid)
        self._supervision.heard(rank, None, time.monotonic())
        connection = wire.Connection(newcomer, self.pool)
        self.connections[rank] = connection
        threading.Thread(
            target=self._read, args=(rank, connection), name=f"sharded-rank-{rank}", daemon=True
        ).start()

    def _read(self, rank: int, connection: wire.Connection) -> None:
        try:
            while True:
                message = connection.receive()
                if isinstance(message.body, Heartbeat):
                    now = time.monotonic()
                    self._supervision.heard(rank, message.body, now)
                    self.state.rank_heard(rank, message.body, now)
                elif message.body is not None:
                    self.inbox.put((rank, message))
                del message  # or the last preview would be held until the next frame
                connection.flush_releases()
        except wire.ConnectionLost:
            self.lose(rank)
            self.inbox.put((rank, None))

    def _watch(self) -> None:
        while not self.closed:
            self._wake.wait(WATCH_SECONDS)
            if self.dead is not None:
                break
            verdict = self._supervision.verdict(time.monotonic(), self.working)
            if verdict is not None and not self._is_importing(verdict):
                self._condemn(verdict)
            elif len(self.ready) == len(self.devices):  # before that libraries are loaded, in long silences
                self.state.suspected(self._supervision.suspicion(time.monotonic(), self.working))
        if not self.closed:
            self.end_processes()  # the others hold their memory for nothing
            if self._on_loss is not None:
                self._on_loss(self)

    # ---- what the watch finds

    def lose(self, rank: int, verdict: Verdict | None = None) -> bool:
        """Note that a rank is gone; False if another was lost before it."""
        with self._loss:
            if self.dead is not None or self.closed:
                return False
            self.dead, self.verdict = rank, verdict
        self.state.rank_lost(rank, f"was {verdict.kind}" if verdict else "died")
        self._wake.set()
        return True

    def _is_importing(self, verdict: Verdict) -> bool:
        """Whether a silent rank is only loading libraries: from a slow disk one alone can take longer than allowed."""
        if verdict.kind != "silent" or verdict.rank in self.ready:
            return False
        if _process_state(self.state.current.ranks[verdict.rank].pid) in "TtZX":
            return False
        self._supervision.heard(verdict.rank, None, time.monotonic())
        return True

    def _condemn(self, verdict: Verdict) -> None:
        """Lose the rank of the verdict: all write down their stacks first, whoever waits is told after."""
        if verdict.kind == "silent":
            state = _process_state(self.state.current.ranks[verdict.rank].pid)
            verdict = verdict._replace(why=f"{verdict.why}; {_STATES.get(state, 'its process still runs')}")
        if not self.lose(verdict.rank, verdict):
            return
        log.warning("Rank %d is %s: %s.", verdict.rank, verdict.kind, verdict.why)
        self.write_stacks()
        self.end_processes()
        self.inbox.put((verdict.rank, None))

    def write_stacks(self) -> None:
        """Have every rank write the stacks of its threads into its log, and wait until they have."""
        logs = [launch.rank_log(self.directory, rank) for rank in list(self.connections)]
        before = [_size(one) for one in logs]
        # A stopped process takes no signal but this: it then goes on for the moment it has left.
        self.processes.signal_ranks(signal.SIGUSR1, signal.SIGCONT)
        until = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < until and any(
            _size(one) == old for one, old in zip(logs, before, strict=True)
        ):
            time.sleep(POLL_SECONDS)
        time.sleep(POLL_SECONDS)  # for the last lines

    def find_lost(self) -> int | None:
        """A rank whose process is stopped, gone or on its way, which its socket does not tell yet."""
        for one in self.state.current.ranks:
            if one.pid is None:
                continue
            if _is_ending(one.pid):
                self.lose(one.rank)
                return one.rank
            if _process_state(one.pid) == "T":
                self.lose(one.rank, Verdict("silent", one.rank, 0.0, _STATES["T"]))
                return one.rank
        return None

    def late(self) -> list[int]:
        """The ranks that hold up the start: of those that are not ready, the ones that have come the least far."""
        stages = {
            one.rank: _STAGES.get(one.heartbeat.doing, 0) if one.heartbeat else -1
            for one in self.state.current.ranks
            if one.rank not in self.ready
        }
        return [rank for rank, stage in stages.items() if stage == min(stages.values())]

    # ---- calls

    @contextlib.contextmanager
    def call_on_all(self) -> Iterator[None]:
        """While it is open, the ranks owe an answer, and making no progress counts against them."""
        self._supervision.begin(time.monotonic())
        self.working = frozenset(self.connections)
        try:
            yield
        finally:
            self.working = frozenset()

    def answered(self, rank: int) -> None:
        self.working -= {rank}

    def next_event(self) -> tuple[int, wire.Message | None]:
        """The next message of any rank, or (rank, None) when it is gone; (-1, None) after a moment without one."""
        try:
            return self.inbox.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return -1, None

    # ---- the end

    def stop(self) -> None:
        """A person wants the end of it: end every process, which is no loss. Whoever runs a call finds them gone."""
        with self._loss:
            self.closed = True
            if self.dead is None:
                self.dead = 0
        self._wake.set()
        self.end_processes()

    def end_processes(self) -> None:
        """End every process of the group now. Idempotent."""
        with self._ending:
            self.processes.kill()

    def close(self) -> None:
        self.closed = True
        self._wake.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.end_processes()
        for connection in list(self.connections.values()):
            connection.close()
        self.pool.close()
        leftovers.remove_directory(self.directory)

    def abandon(self) -> None:
        """In a process that was forked from the host: close its copies of what only the host may hold."""
        self.closed = True
        self._listener.close()
        for connection in self.connections.values():
            connection.abandon()
        self.processes.abandon()

    def log_tail(self, rank: int, lines: int = 12) -> str:
        return launch.log_tail(launch.rank_log(self.directory, rank), lines)


def _peer_pid(sock: socket.socket) -> int | None:
    """The kernel's word on who is at the other end of a Unix socket; refuses nothing by itself."""
    if not hasattr(socket, "SO_PEERCRED") or sock.family != socket.AF_UNIX:
        return None
    pid, _, _ = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid


def _size(log_file: Path) -> int:
    try:
        return log_file.stat().st_size
    except OSError:
        return 0


# ---- what the kernel says of a process (proc_pid_stat(5))

_STATES = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "its process is stopped by a debugger",
    "D": "its process waits for a disk or a driver",
    "Z": "its process has ended",
    "X": "its process has ended",
}


def _process_state(pid: int | None) -> str:
    """Its letter; X when there is no such process, ? where that cannot be told."""
    try:
        found = leftovers.read_state(pid) if pid is not None else None
    except OSError:
        return "?"
    if found is not None:
        return found.state
    return "X" if leftovers.tells_processes() else "?"


def _is_ending(pid: int) -> bool:
    found = leftovers.process_state(pid)
    return found.ending if found is not None else _process_state(pid) == "X"
