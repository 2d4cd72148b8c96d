"""The rank half: connect, serve requests, reply. Run by torchrun as `python -m runtime.worker <private directory>`.

    main thread     takes one request after the other; all work and all collectives happen here
    reader thread   receives frames; hears a cancel while the main thread works; ends the process when the host is gone
    heartbeat       says every second that this rank lives and how far it has come (`engine.pulse`); waits for nothing
    gauge           looks how much memory is used, and how far the device is; may wait for the driver

The rank dials before it imports torch: from then on the host sees its death, and it sees the host's.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from . import environment, launch, leftovers, wire
from .engine.pulse import Pulse
from .spec import (
    Body,
    Cancel,
    Cancelled,
    Decode,
    Done,
    Encode,
    Failure,
    Forward,
    Forwarded,
    GroupFile,
    Load,
    Measure,
    ModelSpec,
    Park,
    Parked,
    Ping,
    Progress,
    Ready,
    Refusal,
    Sample,
    Stats,
    Unload,
    Verified,
    Verify,
)

if TYPE_CHECKING:
    import torch

    from .engine.backend import Backend
    from .engine.denoiser import DenoiserSlot
    from .engine.pipelines import PipelineSlot
    from .engine.slots import HeldSlot

HEARTBEAT_SECONDS = 1.0
AGENT_SECONDS = 1.5  # in which the agent has ended all ranks once the host is gone
GAUGE_SECONDS = 0.5


class EmptySlot(RuntimeError):
    """A request for a slot this rank does not hold."""


class Worker:
    """One rank's state: its connection, its backend, and the slots it holds."""

    def __init__(self, directory: Path, place: environment.RankEnvironment):
        self.directory, self.place = directory, place
        self.file = msgspec.json.decode((directory / launch.GROUP_FILE).read_bytes(), type=GroupFile)
        self.agent = os.getppid()
        try:
            self.connection = wire.dial(self.file.address, self.file.token, place.rank)
        except OSError:
            _leave(directory, self.agent)
        self.requests: queue.SimpleQueue[wire.Message] = queue.SimpleQueue()
        self.cancelled_call = 0  # the newest call the host asked to stop
        self.pulse = Pulse()
        self.pulse.begin("starting")
        self.backend: Backend
        self.slots: dict[str, HeldSlot] = {}
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                message = self.connection.receive()
                if isinstance(message.body, Cancel):
                    self.cancelled_call = max(self.cancelled_call, message.call)
                elif message.body is not None:
                    self.requests.put(message)
                del message
        except wire.ConnectionLost:
            # The host is gone or has dropped us. The main thread may sit in a collective for ever: leave at once.
            _leave(self.directory, self.agent)

    # ---- start

    def start(self) -> None:
        """Import the engine, join the process group and say so; a failure goes to the host with its traceback."""
        try:
            with _no_collector():
                from .engine import selftest
                from .engine.backend import Backend

            device = self.file.devices[self.place.rank]
            self.backend = Backend.join(device, self.place, store=self.directory / "ranks", pulse=self.pulse)
            self.pulse.begin("testing")
            selftest.check(self.backend, self._collectives_hang)
        except Exception as error:
            self._reply(0, _failure(error))
            time.sleep(1.0)  # the host reads the reason, then ends the group
            raise
        threading.Thread(target=self._gauge, name="gauge", daemon=True).start()
        self.pulse.end()
        versions = self.backend.versions()
        self._reply(0, Ready(pid=os.getpid(), device=self.backend.device_name(), versions=versions))

    def _collectives_hang(self, what: str) -> None:
        self._reply(0, Failure(kind="collectives", message=what))

    def _heartbeat(self) -> None:
        with contextlib.suppress(wire.ConnectionLost):
            while True:
                with contextlib.suppress(MemoryError):  # the rank lives; its main thread tells of it
                    self.connection.send(0, self.pulse.heartbeat())
                time.sleep(HEARTBEAT_SECONDS)

    def _gauge(self) -> None:
        while True:
            # Of a device that is lost, or no memory: the main thread meets it too.
            with contextlib.suppress(RuntimeError, MemoryError):
                self.pulse.memory = self.backend.memory()
                self.pulse.poll()
            time.sleep(GAUGE_SECONDS)

    # ---- serve

    def serve(self) -> None:
        """Serve requests for ever: the process ends when the host closes the socket, or kills it."""
        while True:
            self._serve_one(self.requests.get())

    def _serve_one(self, message: wire.Message) -> None:
        call = message.call
        try:
            self.pulse.begin(*_operation(message))
            body, tensors = self._handle(message)
            self.pulse.warmed_up()
        except Cancelled as error:
            body, tensors = Failure(kind="cancelled", message=str(error)), {}
        except Exception as error:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            body, tensors = _failure(error), {}
            # They hold tensors, of which an out-of-memory wants the room.
            traceback.clear_frames(error.__traceback__)
        del message  # its views go back to the host with this reply
        self.backend.return_cache()
        self._reply(call, body, tensors)
        self.pulse.end()

    def _handle(self, message: wire.Message) -> tuple[Body, dict[str, torch.Tensor]]:
        request, tensors = message.body, message.tensors

        def cancelled() -> bool:
            return self.cancelled_call >= message.call

        def report(progress: Progress, images: dict[str, torch.Tensor] | None = None) -> None:
            self._reply(message.call, progress, images)

        match request:
            case Load():
                return self._load(request, report, cancelled), {}
            case Encode():
                pipeline = self._pipeline(request.slot)
                return self._done(pipeline.encode(request.prompt, cancelled, request.on_host))
            case Sample():
                return self._done(self._pipeline(request.slot).sample(request, tensors, report, cancelled))
            case Decode():
                pipeline, new = self._pipeline(request.slot), self.connection.pool.empty
                return self._done(pipeline.decode(request, tensors["samples"], new, report, cancelled))
            case Forward():
                slot = self._denoiser(request.slot)
                spans, outputs = slot.forward(request, tensors, self.connection.pool.empty)
                return Forwarded(spans=spans), outputs
            case Verify():
                return self._verify(request, tensors, cancelled)
            case Park():
                return self._park(request.slot), {}
            case Unload():
                self.slots.pop(request.slot, None)
                self.backend.release_memory()
                self.connection.pool.trim(keep=0)
                return self._done({})
            case Stats():
                return self.backend.memory(), {}
            case Measure():
                from .engine.doctor import measured

                return measured(request, self.backend, report, cancelled), {}
            case Ping():
                return self._done(self._inverted(tensors))
        raise TypeError(f"{type(request).__name__} is no request")

    def _load(self, request: Load, report, cancelled) -> Body:
        slot: Any = self.slots.pop(request.slot, None)
        # Asked of all: a rank that has lost it reads the file, and the others have to do so with it.
        if self.backend.any_rank(slot is None or not slot.parked):
            slot = None
            self.backend.release_memory()
            self._import_for(request.model, cancelled)
            slot = self._new_slot(request)
            slot.load(report, cancelled)
        else:
            slot.unpark()
            self.backend.release_memory()
        self.slots[request.slot] = slot
        return slot.info()

    def _import_for(self, model: ModelSpec, cancelled: Callable[[], bool]) -> None:
        """Import what a kind of model needs, for seconds the first time: a cancel does not wait for that.

        A collective: all ranks go on, or all raise Cancelled. An import that is under way then goes on by itself.
        """
        importing = threading.Thread(target=_import_slot, args=(bool(model.pipeline_class),), daemon=True)
        importing.start()
        while importing.is_alive() and not cancelled():
            importing.join(0.02)
        if self.backend.any_rank(importing.is_alive()):
            raise Cancelled("Cancelled before loading.")
        set_imports_apart(self.slots)

    def _new_slot(self, request: Load) -> HeldSlot:
        """Imports what its kind of model needs, and no more: a pipeline's classes take seconds."""
        if request.model.pipeline_class:
            from .engine.pipelines import PipelineSlot

            return PipelineSlot(request.model, request.parallel, self.backend)
        from .engine.denoiser import DenoiserSlot

        return DenoiserSlot(request.model, request.parallel, self.backend)

    def _park(self, name: str) -> Parked:
        slot = self._slot(name)
        try:
            slot.park()
        except Exception as error:  # it is no error to the host: the next use reads the file again
            print(f"'{name}' is not parked: {error}", file=sys.stderr, flush=True)
            del self.slots[name]
        del slot
        self.backend.release_memory()
        return Parked(in_host_memory=name in self.slots)

    def _verify(
        self, request: Verify, tensors: dict[str, torch.Tensor], cancelled: Callable[[], bool]
    ) -> tuple[Body, dict]:
        if self.place.rank:
            return Verified(), {}
        with self.pulse.stoppable(cancelled):
            missing, own_error, reference = self._denoiser(request.slot).verify(request, tensors)
        body = Verified(own_error=own_error, missing_bytes=missing)
        return body, {} if reference is None else {"reference": reference}

    def _pipeline(self, name: str) -> PipelineSlot:
        return self._slot(name)

    def _denoiser(self, name: str) -> DenoiserSlot:
        return self._slot(name)

    def _slot(self, name: str) -> Any:
        if name not in self.slots:
            raise EmptySlot(f"slot '{name}' is empty on rank {self.place.rank}")
        if self.slots[name].parked:
            raise EmptySlot(f"slot '{name}' is parked on rank {self.place.rank}")
        return self.slots[name]

    def _done(self, tensors: dict[str, torch.Tensor]) -> tuple[Body, dict[str, torch.Tensor]]:
        """Only rank 0 carries results; the others just say that they are through."""
        return Done(), tensors if self.place.rank == 0 else {}

    def _inverted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        import torch

        answers = {}
        for name, tensor in tensors.items():
            raw = tensor.reshape(-1).view(torch.uint8)
            answer = self.connection.pool.empty((raw.numel(),), torch.uint8)
            torch.bitwise_not(raw, out=answer)
            answers[name] = answer.view(tensor.dtype).reshape(tensor.shape)
        return answers

    def _reply(self, call: int, body: Body, tensors: dict[str, torch.Tensor] | None = None) -> None:
        with contextlib.suppress(wire.ConnectionLost):  # the reader ends the process
            self.connection.send(call, body, tensors)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """What an import makes stays: looking for garbage in it takes a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def set_imports_apart(slots: Mapping[str, object]) -> None:
    """Have the collector pass over what exists now, as long as no slot is among it.

    Looking through all that torch and diffusers have imported takes it half a second on a slow core, in which no other
    thread runs: a cancel would not even be heard. A slot would never be collected any more.
    """
    if not slots:
        gc.freeze()


def _import_slot(is_pipeline: bool) -> None:
    with contextlib.suppress(Exception), _no_collector():  # the main thread meets it where it can be told
        if is_pipeline:
            from .engine import pipelines  # noqa: F401
        else:
            from .engine import denoiser  # noqa: F401


def _operation(message: wire.Message) -> tuple[str, Hashable]:
    """What a request is in a word, and what its pauses are remembered by: its slot and the sizes it computes with."""
    request, tensors = message.body, message.tensors
    match request:
        case Encode():
            return "encoding", ("encode", request.slot)
        case Sample():
            return "sampling", ("sample", request.slot, request.batch_size, request.width, request.height)
        case Decode():
            return "decoding", ("decode", request.slot, tuple(tensors["samples"].shape[1:]))
        case Forward():
            # What is kept comes with the first step of a run only.
            sizes = sorted(tuple(one.shape) for name, one in tensors.items() if int(name) not in request.keep)
            return "sampling", ("forward", request.slot, tuple(sizes))
    return _DOING.get(type(request).__name__, "answering"), None


_DOING = {
    "Load": "loading",
    "Verify": "verifying",
    "Park": "parking",
    "Unload": "unloading",
    "Measure": "measuring",
}


def _leave(directory: Path, agent: int) -> NoReturn:
    """End this rank: the host is not there to do it.

    The agent has seen that too and ends all ranks, also those that see nothing. One that is stopped itself does not:
    then this rank ends it, the others, and what the group left on disk.
    """
    time.sleep(AGENT_SECONDS)
    if os.getppid() == agent:
        # Not to its end: it would wait for other agents at a barrier in the store in the directory, for minutes.
        for pid in (agent, *leftovers.descendants(agent)):
            if pid != os.getpid() and (found := leftovers.process_state(pid)) is not None:
                leftovers.end(found)
    leftovers.remove_directory(directory)
    os._exit(1)


def _failure(error: Exception) -> Failure:
    kind = "failed"
    if isinstance(error, Refusal):
        kind = "refused"
    elif isinstance(error, EmptySlot):
        kind = "empty"
    elif type(error).__name__ == "BrokenCollectives":
        kind = "collectives"
    elif _is_out_of_memory(error):
        kind = "memory"
    text = str(error) if kind == "refused" else f"{type(error).__name__}: {error}"
    return Failure(kind=kind, message=text, traceback=traceback.format_exc())


def _is_out_of_memory(error: Exception) -> bool:
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(
        error
    )  # torch has no class for it


def _redirect_output(log: Path) -> None:
    """This rank's output, of Python and native libraries alike, goes to its own log; nowhere if there can be none."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        descriptor = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout, sys.stderr = Output(1), Output(2)


class Output(io.TextIOBase):
    """Text to a descriptor, at once. Where it cannot be written (a full disk), that costs the line, not the request."""

    encoding = "utf-8"

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, "backslashreplace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]
        return len(text)


def main() -> None:
    directory = Path(sys.argv[1])
    place = environment.rank_environment()
    _redirect_output(launch.rank_log(directory, place.rank))
    # The host asks for the stacks of a rank that does not come on; native code cannot hold this up.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    worker = Worker(directory, place)
    worker.start()
    worker.serve()


if __name__ == "__main__":
    main()
