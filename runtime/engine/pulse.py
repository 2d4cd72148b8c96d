"""How far this rank has come: counted by the engine as it works, and told to the host with every heartbeat.

The engine says what it begins, and counts bytes read, blocks finished and collectives entered. On CUDA the host runs
ahead of its device, so these are counted by events that the device reaches: `poll` looks at them, in a thread that may
wait for the driver, and never in the one that sends heartbeats.

Torch is not imported here: a rank has a pulse before it has torch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from ..spec import Cancelled, Heartbeat, Memory

_REMEMBERED = 64  # operations whose slowest block is known
_WARM = 1e-3  # seconds; what an operation that has warmed up says before it has been measured


class Pulse:
    """The counters of one rank. One thread works and counts, others read.

    An operation is known by a key: the same request for the same slot and sizes. While it runs for the first time it
    warms up, and its pauses are no measure; `warmed_up` ends that.
    """

    def __init__(self) -> None:
        self.doing = ""
        self.progress = 0
        self.collectives = 0
        self.slowest = 0.0  # as in Heartbeat
        self.memory = Memory()
        self._beat = 0
        self._last = time.monotonic()  # when progress last grew
        self._key: Hashable = None
        self._known: OrderedDict[Hashable, float] = OrderedDict()
        self._stop: Callable[[], bool] | None = None
        self._marks: Marks | None = None

    def count_on_device(self) -> None:
        """From now on blocks and collectives count when the current CUDA device has reached them."""
        self._marks = Marks()

    # ---- what the engine says

    def begin(self, doing: str, key: Hashable = None) -> None:
        """An operation begins. Without a `key` nothing is known of it from earlier ones."""
        if self._marks is not None:
            self._marks.forget()
        self.collectives = 0
        self._key = key
        self.slowest = self._known.get(key, 0.0) if key is not None else 0.0
        self._last = time.monotonic()
        self.progress += 1
        self.doing = doing

    def warmed_up(self) -> None:
        """The operation has been run once, or the first of its steps: from here on its pauses are a measure."""
        self.slowest = self.slowest or _WARM

    def unmeasured(self) -> None:
        """What comes next in this operation is of another kind: nothing can be said yet about its pauses."""
        self.slowest = 0.0

    def end(self) -> None:
        """The operation is over. What was measured is remembered under its key if it has warmed up."""
        if self._key is not None and self.slowest:
            self._known[self._key] = self.slowest
            self._known.move_to_end(self._key)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self.doing, self._key = "", None
        self.slowest = _WARM  # an idle rank has no reason not to begin at once with what it is asked next

    def advance(self, count: int = 1) -> None:
        """The host itself has come on by `count`: bytes, pieces, steps. Raises Cancelled inside `stoppable`."""
        self.progress += count
        self._note_pause()
        self._stop_if_asked()

    def block_finished(self, *_: object) -> None:
        """A block is computed; a forward hook as it is. Raises Cancelled inside `stoppable`."""
        if self._marks is not None:
            self._marks.add(collective=False)
        else:
            self.progress += 1
            self._note_pause()
        self._stop_if_asked()

    def entered(self) -> None:
        """A collective of device tensors begins. Costs well under a microsecond where the host computes."""
        if self._marks is not None:
            self._marks.add(collective=True)
        else:
            self.collectives += 1
            self.progress += 1

    def agreed(self) -> None:
        """A collective of the host's own memory begins: one that never waits for the device."""
        self.collectives += 1
        self.progress += 1

    @contextlib.contextmanager
    def stoppable(self, cancelled: Callable[[], bool]) -> Iterator[None]:
        """Inside, whatever is counted raises Cancelled once `cancelled` says so.

        Only for what a rank does alone, or what all ranks end together if one of them does not finish it.
        """
        self._stop = cancelled
        try:
            self._stop_if_asked()
            yield
        finally:
            self._stop = None

    def watch(self, model: Any, *, closely: bool = False) -> None:
        """Count the blocks of `model`: the elements of its outermost module lists, or `closely` every leaf."""
        for module in _leaves(model) if closely else _blocks(model) or [model]:
            module.register_forward_hook(self.block_finished)

    # ---- what the rank tells

    def poll(self) -> None:
        """Count what the device has reached since the last call. May wait for the driver."""
        if self._marks is None:
            return
        passed, collectives = self._marks.passed()
        if passed:
            self.collectives += collectives
            self.progress += passed
            self._note_pause()

    def heartbeat(self) -> Heartbeat:
        """The next one. Reads what is there and waits for nothing."""
        self._beat += 1
        return Heartbeat(
            memory=self.memory,
            beat=self._beat,
            doing=self.doing,
            progress=self.progress,
            collectives=self.collectives,
            slowest=self.slowest,
        )

    def _note_pause(self) -> None:
        now = time.monotonic()
        if self.slowest:
            self.slowest = max(self.slowest, now - self._last)
        self._last = now

    def _stop_if_asked(self) -> None:
        if self._stop is not None and self._stop():
            raise Cancelled(f"Cancelled while {self.doing}.")


class Marks:
    """Events in the order in which the host gave them to the current stream of the device."""

    def __init__(self) -> None:
        import torch

        self._new = torch.cuda.Event
        self._given: deque[tuple[Any, bool]] = deque()
        self._free: deque[Any] = deque()
        self._lock = threading.Lock()  # between `passed` and `forget`; `add` needs none

    def add(self, *, collective: bool) -> None:
        try:
            event = self._free.popleft()
        except IndexError:
            event = self._new()
        event.record()
        self._given.append((event, collective))

    def passed(self) -> tuple[int, int]:
        """How many the device has passed since the last call, and how many of these were collectives."""
        passed = collectives = 0
        with self._lock:
            while self._given and self._given[0][0].query():
                event, collective = self._given.popleft()
                self._free.append(event)
                passed += 1
                collectives += collective
        return passed, collectives

    def forget(self) -> None:
        """Begin anew: what the device has still to reach belongs to an operation that is over."""
        with self._lock:
            self._given.clear()


def _blocks(model: Any) -> list[Any]:
    found = []
    for child in model.children():
        # By its name: torch is not imported here.
        if type(child).__name__ == "ModuleList":
            found += list(child)
        else:
            found += _blocks(child)
    return found


def _leaves(model: Any) -> list[Any]:
    return [module for module in model.modules() if not any(True for _ in module.children())]
