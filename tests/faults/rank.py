"""A rank that fails when it is told to: the real one, run by torchrun in its place, with a word at each stage.

Nothing of the product knows of it. Stages are met in the midst of the work: at a slice of the weights, in the text
encoder's and the decoder's forward, at the third step.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from runtime import worker
from runtime.spec import Decode, Encode, Load, Progress
from tests.faults import control

STEP = 3


class _Idle:
    """In the queue of requests: the main thread fails here while it waits for work."""


class FaultyWorker(worker.Worker):
    folder = Path(os.environ[control.VARIABLE])
    steps = 0

    def meet(self, stage: str) -> None:
        fault = control.taken(self.folder, stage, self.place.rank)
        if fault is not None:
            commit(fault, self.folder)

    def start(self) -> None:
        from runtime.engine.backend import Backend

        join = Backend.join

        def joining(*arguments: Any, **named: Any) -> Backend:
            self.meet("starting")
            return join(*arguments, **named)

        Backend.join = joining  # type: ignore
        super().start()
        threading.Thread(target=self._watch_idle, daemon=True).start()

    def _watch_idle(self) -> None:
        while True:
            time.sleep(0.02)
            order = self.folder / "order"
            if order.exists() and '"idle"' in _read(order) and f'"rank": {self.place.rank}' in _read(order):
                self.requests.put(_Idle())  # type: ignore[arg-type]
                time.sleep(1)

    def _serve_one(self, message: Any) -> None:
        if isinstance(message, _Idle):
            self.meet("idle")
        else:
            self.steps = 0
            super()._serve_one(message)

    def _handle(self, message: Any) -> Any:
        if self.place.rank and isinstance(
            message.body, Encode | Decode
        ):  # it has no part in them but its answer
            self.meet("encoding" if isinstance(message.body, Encode) else "decoding")
        return super()._handle(message)

    def _new_slot(self, request: Load) -> Any:
        slot: Any = super()._new_slot(request)
        load = slot._load

        def loading(report: Any, cancelled: Any) -> None:
            def told(progress: Progress) -> None:
                report(progress)
                if progress.done:  # before the first slice it is not in the midst of it
                    self.meet("loading")

            load(told, cancelled)
            self._listen(slot)

        slot._load = loading
        return slot

    def _listen(self, slot: Any) -> None:
        """Come by in the forwards of a loaded slot."""

        def stepped(*_: Any) -> None:
            self.steps += 1
            if self.steps == STEP:
                self.meet("sampling")

        slot.transformer.register_forward_pre_hook(stepped)
        if not self.place.rank and hasattr(slot, "vae"):
            slot.vae.decoder.register_forward_pre_hook(lambda *_: self.meet("decoding"))
            slot.encoding.text_encoder_2.register_forward_pre_hook(lambda *_: self.meet("encoding"))


def commit(fault: str, folder: Path) -> None:
    """Fail in one of the ways of `control.FAULTS`."""
    import torch

    if fault in control.SIGNALS:
        control.wait_for_the_signal(folder)
    elif fault == "exit":
        sys.exit(1)
    elif fault == "exception":
        raise RuntimeError(control.MESSAGE)
    elif fault == "loop":
        while True:
            pass
    elif fault == "memory limit":
        _run_out_of_memory()
    elif fault == "memory":
        raise torch.OutOfMemoryError(f"tried to allocate 20.00 GiB, {control.MESSAGE}")


def _run_out_of_memory() -> None:
    """Ask for a gigabyte more than the system allows this process; afterwards it may have it again."""
    import torch

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    try:
        torch.empty(1 << 30, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    worker.Worker = FaultyWorker  # type: ignore[misc]
    worker.main()
