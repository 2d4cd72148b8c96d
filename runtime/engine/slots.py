"""What all kinds of slots share: loading that happens on all ranks or on none, and the count of what was read."""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import nn

from ..spec import Cancelled, ModelSpec, ParallelSpec, Progress, SlotInfo
from .backend import Backend

Report = Callable[..., None]
IsCancelled = Callable[[], bool]


class HeldSlot(ABC):
    """A model held by this rank under one layout."""

    parked = False  # in host RAM; not every kind can be

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
