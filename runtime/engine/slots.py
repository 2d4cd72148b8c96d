"""What all kinds of slots share: loading and parking that happen on all ranks or on none, and what was read."""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn

from ..spec import Cancelled, ModelSpec, ParallelSpec, Progress, SlotInfo
from .backend import Backend
from .copies import Copies

Report = Callable[..., None]
IsCancelled = Callable[[], bool]


class HeldSlot(ABC):
    """A model held by this rank under one layout."""

    parked = False  # the transformer is in host RAM
    transformer: Any
    copies: Copies

    def __init__(self, model: ModelSpec, parallel: ParallelSpec, backend: Backend):
        self.model, self.parallel, self.backend = model, parallel, backend
        self.seconds = 0.0

    def load(self, report: Report, cancelled: IsCancelled) -> None:
        """Read this rank's share. All ranks load or none does: one that fails or is cancelled tells the others."""
        start = time.monotonic()
        self._all_or_none(lambda: self._load(report, cancelled), "loading")
        self.seconds = time.monotonic() - start

    def _all_or_none(self, change: Callable[[], None], doing: str) -> None:
        """Make a change on all ranks. If it fails on one, all forget the model and raise."""
        problem: Exception | None = None
        try:
            change()
        except Exception as error:
            problem = error
        if self.backend.any_rank(problem is not None) and problem is None:
            problem = Cancelled(f"Another rank did not finish {doing}.")
        if problem is not None:
            self._forget()
            traceback.clear_frames(problem.__traceback__)  # they hold what was made so far
            self.backend.release_memory()
            raise problem

    @abstractmethod
    def _load(self, report: Report, cancelled: IsCancelled) -> None: ...

    @abstractmethod
    def _forget(self) -> None:
        """Let go of whatever `_load` has made so far."""

    def park(self) -> None:
        """Move the transformer to host RAM. Raises MemoryError where that has no room: no rank holds it then."""
        self._all_or_none(self._check_host, "parking")  # before any of them takes room
        self._all_or_none(self._to_host, "parking")
        self.parked = True

    def _check_host(self) -> None:
        total = parameter_bytes(self.transformer) * self.parallel.tensor * self.parallel.stage
        if not self.backend.host_has_room(total):
            raise MemoryError(f"no room in host RAM for {total} bytes of weights")

    def _to_host(self) -> None:
        if not self.copies.keeps:
            self.copies.let_go(self.transformer)
        self.backend.to_host(self.transformer)

    def unpark(self) -> None:
        """Move the weights back to the device. Raises what the device says: then no rank holds them any more."""
        start = time.monotonic()
        self._all_or_none(self._to_device, "loading")
        # Not all or none: who fails in the middle of a collective must not wait for the others.
        self.copies.hand_out(self.transformer, self.backend.pulse.entered)
        self.parked, self.seconds = False, time.monotonic() - start

    def _to_device(self) -> None:
        if not self.copies.keeps:
            self.copies.make_room(self.transformer, self.backend.device)
        self.transformer.to(self.backend.device)

    @abstractmethod
    def info(self) -> SlotInfo: ...


class ByteCounter:
    """Adds up bytes read and reports them, at most ten times a second."""

    def __init__(self, report: Report, total: int):
        self._report, self._total = report, total
        self._done, self._last = 0, 0.0
        self.add(0)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._last >= 0.1 or self._done >= self._total:
            self._last = now
            self._report(Progress(phase="loading", done=min(self._done, self._total), total=self._total))


def parameter_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.parameters())
