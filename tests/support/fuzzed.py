"""Both ends of the wire under fire: a decoder, a rank and a host that are sent mutants, all in this process.

Each end says what became of a mutant: "dropped" (its connection is closed), "read" or "answered". Anything else is a
fault, and so is a wait of PATIENCE seconds.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

from runtime import group, launch, session, spec, wire, worker
from runtime.devices import cpu_devices
from runtime.engine.backend import Backend
from runtime.environment import RankEnvironment
from tests.bench.echo_slot import EchoSlot
from tests.support.mutants import Mutant, deliver
from tests.support.wires import PATIENCE, frame

LAST_CALL = 1 << 40  # of the honest frame that follows a mutant
MOMENT = 0.03  # seconds after which an end that does not react is taken to wait for the rest of a frame


# ---- memory


class PeakMemory:
    """How far this process's resident memory rose above what it was at the start, in bytes."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the highest so far
        self._before = _status("VmRSS")

    def growth(self) -> int:
        return max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


# ---- the decoder


def decoded(mutant: Mutant, shared: bool = True) -> str:
    """What a Connection makes of a mutant."""
    near, far = socket.socketpair()
    far.settimeout(PATIENCE)
    connection = wire.Connection(far, wire.BufferPool(shared))
    try:
        deliver(mutant, near)
        near.close()
        try:
            while True:
                message = connection.receive()
                for tensor in message.tensors.values():
                    _touch(tensor)
        except wire.ConnectionLost as error:
            assert "timed out" not in str(error), "it waited although the peer had gone"
            return "read" if str(error) == "closed" else "dropped"
    finally:
        near.close()
        connection.close()
        connection.pool.close()


def _touch(tensor: torch.Tensor) -> None:
    """Read a tensor's first and last byte."""
    if tensor.numel():
        flat = tensor.reshape(-1).view(torch.uint8)
        flat[0].item(), flat[-1].item()


# ---- a rank


class FuzzedRank:
    """A rank's own loop with one slot that computes nothing; it is started again whenever it leaves."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._listener, address = wire.listen(directory)
        self._token = "ab" * 32
        file = spec.GroupFile(address=address, token=self._token, devices=cpu_devices(1))
        (directory / launch.GROUP_FILE).write_bytes(msgspec.json.encode(file))
        self._host: wire.Connection | None = None
        self._sock: socket.socket | None = None
        self.starts = 0

    def meet(self, mutant: Mutant) -> str:
        if self._host is None:
            self._start()
        assert self._host is not None and self._sock is not None
        deliver(mutant, self._sock)
        with contextlib.suppress(OSError):
            self._sock.sendall(frame({"call": LAST_CALL, "body": {"type": "Ping"}}))
        try:
            while (message := self._answer()).call != LAST_CALL:
                _check_reply(message)
        except wire.ConnectionLost as error:
            assert "timed out" not in str(error), "the rank neither answers nor leaves"
            self._end()
            return "dropped"
        return "answered"

    def _answer(self) -> wire.Message:
        """The rank's next frame; one that waits for the rest of a mutant hears that there is none."""
        assert self._host is not None and self._sock is not None
        if not select.select([self._sock], [], [], MOMENT)[0]:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
        return self._host.receive()

    def _start(self) -> None:
        self.starts += 1
        place = RankEnvironment(0, 0, 1)
        rank = worker.Worker(self._directory, place)
        rank.agent = -1  # or it would end what started these tests
        rank.backend = Backend(torch.device("cpu"), place)
        rank.backend.release_memory = lambda: None  # type: ignore  # collects garbage for longer than all the rest
        model = spec.ModelSpec(path="/nowhere", pipeline_class="", dtype="float32")
        rank._new_slot = lambda request: EchoSlot(request.model, request.parallel, rank.backend)  # type: ignore
        slot = rank.slots["a"] = EchoSlot(model, spec.ParallelSpec(), rank.backend)
        slot.load(lambda *_: None, lambda: False)
        self._left = rank
        threading.Thread(target=_serve, args=(rank,), daemon=True).start()
        self._sock, _ = self._listener.accept()
        assert wire.admit(self._sock, self._token) == 0
        self._sock.settimeout(PATIENCE)
        self._host = wire.Connection(self._sock)

    def _end(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()
            host.pool.close()
            self._left.requests.put(_End())  # type: ignore[arg-type]
        if self.starts % 100 == 0:
            gc.collect()  # a real rank's process ends, with all its cycles

    def close(self) -> None:
        self._end()
        self._listener.close()


def _serve(rank: worker.Worker) -> None:
    with contextlib.suppress(SystemExit):
        rank.serve()


class _End:
    """In a rank's queue of requests: ends the thread that takes it."""

    @property
    def call(self) -> int:
        raise SystemExit


def _check_reply(message: wire.Message) -> None:
    if message.body is not None:
        assert isinstance(message.body, spec.Reply), f"{message.body} is no reply"


@contextlib.contextmanager
def fuzzed_rank() -> Iterator[FuzzedRank]:
    """A rank that hangs up where a real one would end its process."""

    readers: list[threading.Thread] = []

    def leave(*_: object) -> None:
        raise SystemExit

    def read(self: worker.Worker) -> None:
        readers.append(threading.current_thread())
        with contextlib.suppress(SystemExit):
            original(self)
        self.connection.close()
        self.connection.pool.close()

    original = worker.Worker._read
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="sharded-fuzz-"))
        # Every failure prints its traceback into the rank's log.
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(mock.patch.object(worker, "_leave", leave))
        stack.enter_context(mock.patch.object(worker.Worker, "_read", read))
        rank = FuzzedRank(Path(directory))
        try:
            yield rank
        finally:
            rank.close()
            for reader in readers:  # one that came later would find the real `_leave`
                reader.join()


# ---- a host


class _Impostors:
    """In the place of torchrun and its ranks: threads that dial, say they are ready, and answer with mutants."""

    mutants: Iterator[Mutant]  # set by `fuzzed_host`
    agent_pid = 0

    def __init__(self, _directory: Path, address: str, token: str, devices: tuple[spec.Device, ...], *_: Any):
        for rank in range(len(devices)):
            threading.Thread(target=self._serve, args=(address, token, rank), daemon=True).start()

    def _serve(self, address: str, token: str, rank: int) -> None:
        with contextlib.suppress(OSError):
            connection = wire.dial(address, token, rank)
            sock = connection._socket
            sock.settimeout(PATIENCE)
            connection.send(0, spec.Ready(pid=0, device="CPU", versions={}))
            with contextlib.suppress(wire.ConnectionLost):
                while True:
                    call = connection.receive().call
                    mutant = next(self.mutants) if rank == 0 else None
                    if mutant is not None:
                        deliver(mutant, sock)
                    connection.send(call, spec.Memory())
                    if mutant is not None and mutant.data and not select.select([sock], [], [], MOMENT)[0]:
                        break  # the host waits for the rest of a frame, and this rank dies
            connection.close()
            connection.pool.close()

    def watch(self, _pid: int) -> None: ...

    def agent_ended(self) -> None:
        return None

    def kill(self) -> None: ...

    def signal_ranks(self, *_numbers: int) -> None: ...

    def abandon(self) -> None: ...


class FuzzedHost:
    """A group of two ranks, of which one answers every call with a mutant before its own answer."""

    def __init__(self) -> None:
        self._group = group.WorkerGroup(cpu_devices(2))
        self._asked = threading.Event()

    def meet(self, mutant: Mutant) -> str:
        _Impostors.mutants = itertools.repeat(mutant)
        try:
            self._group.call(spec.Stats(), report=lambda *_: None)
        except (spec.RankError, spec.Refusal, spec.Cancelled):
            return "answered" if self._group.alive else "dropped"
        return "read"

    def meet_stranger(self, mutant: Mutant) -> str:
        """A mutant from a client that knows no token; the ranks go on as if nothing were."""
        _Impostors.mutants = itertools.repeat(Mutant("", b""))
        self._group.start()
        session_now = self._group._session
        assert session_now is not None
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(PATIENCE)
            stranger.connect(str(session_now.directory / "host"))
            if len(mutant.data) % 2:
                stranger.sendall(wire._HELLO.pack(wire._MAGIC, bytes(32), 0))
            deliver(mutant, stranger)
            with contextlib.suppress(OSError):  # closed already
                stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # closed with bytes unread
                assert stranger.recv(1) == b"", "a stranger was answered"
        self._group.call(spec.Stats())
        assert self._group._session is session_now, "a stranger ended the group"
        return "dropped"

    def close(self) -> None:
        self._group.close()


@contextlib.contextmanager
def fuzzed_host() -> Iterator[FuzzedHost]:
    # The impostors are this process, which nobody shall watch or kill.
    nobody = mock.patch.object(session, "_peer_pid", lambda _sock: None)
    with mock.patch.object(launch, "Processes", _Impostors), nobody:
        host = FuzzedHost()
        try:
            yield host
        finally:
            host.close()
