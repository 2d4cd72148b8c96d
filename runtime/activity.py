"""What the calls of a group amount to, in numbers that people ask for: how far, how fast, what is left, the last run.

    Load, Sample, Decode ...   one call each: their progress frames count bytes, steps, images
    Forward                    one step of a stock sampler, or a part of one; a run of them is one sampling

Written by the thread that holds the group, only the peak by those that hear ranks; read by any other. A meter is
replaced as a whole, a run is added to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .healing import Work
from .spec import Memory, Progress

LINGER_SECONDS = 1.0  # after a step of a stock sampler: it computes on the host, and then the next one comes
STEPS_TOLD = 48
_STEPS_KEPT = 8192
_MARKS = 32  # the newest, from which the speed is told
_MARK_SECONDS = 0.1  # between two of them: bytes are told in pieces of a few milliseconds
_UNITS = {"starting": "ranks", "loading": "bytes", "sampling": "steps", "decoding": "images"}


# --------------------------------------------------------------------------------------------------------------
# How far


@dataclass(frozen=True)
class Meter:
    """How far an operation has come: `done` of `total` (None: unknown) since its marks, as (time, done)."""

    phase: str
    unit: str
    total: int | None = None
    done: int = 0
    marks: tuple[tuple[float, int], ...] = ()

    def at(self, done: int, total: int | None, now: float) -> Meter:
        """The meter when so much is done. It never goes back."""
        done = max(done, self.done)
        marks = self.marks
        if not marks or done > self.done:
            settled = len(marks) < 2 or marks[-1][0] - marks[-2][0] >= _MARK_SECONDS
            marks = (*(marks if settled else marks[:-1]), (now, done))[-_MARKS:]
        return replace(self, done=done, total=total, marks=marks)

    @property
    def per_second(self) -> float | None:
        """What was done between the first mark and the last, in a second: the first step is not in it."""
        if self.unit == "ranks" or len(self.marks) < 2:
            return None
        (start, before), (end, after) = self.marks[0], self.marks[-1]
        return (after - before) / (end - start) if end > start else None

    def left(self, now: float) -> float | None:
        """Seconds that the rest takes at this speed."""
        speed = self.per_second
        if not speed or self.total is None:
            return None
        return max(0.0, (self.total - self.done) / speed - (now - self.marks[-1][0]))

    def as_data(self, now: float) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "per_second": rounded(self.per_second, 3),
            "left": rounded(self.left(now), 1),
            "unit": self.unit,
        }


# --------------------------------------------------------------------------------------------------------------
# The last run


@dataclass
class Sampling:
    """One sampling: by a pipeline in one call, or by a stock sampler in many.

    `step` is the one that is being made, from 0, if the sampler tells it; `seconds` those of each step or call.
    """

    key: str
    unit: str
    began: float
    step_began: float
    ended: float | None = None
    step: int = 0
    completed: int = 0
    seconds: list[float] = field(default_factory=list)

    def note(self, steps: int, now: float) -> None:
        """So many steps have been made since the last one that was noted."""
        each = (now - self.step_began) / steps
        self.seconds += [each] * min(steps, _STEPS_KEPT - len(self.seconds))
        self.step_began = now

    @property
    def usual(self) -> float | None:
        """Seconds of a step, the median without the first one: that warms up."""
        return statistics.median(self.seconds[1:]) if len(self.seconds) > 1 else None


@dataclass
class Run:
    """What the group did for one picture: at most one loading, one sampling, and what belongs to them. Seconds."""

    slot: str
    began: float
    load: float | None = None
    encode: float | None = None
    decode: float | None = None
    sampling: Sampling | None = None
    peak: int | None = None  # bytes, the most that one rank's allocator held

    def as_data(self, running: bool) -> dict[str, Any]:
        sampling = self.sampling
        took = sampling.ended - sampling.began if sampling and sampling.ended is not None else None
        return {
            "load": rounded(self.load, 2),
            "encode": rounded(self.encode, 2),
            "steps": sampling.completed if sampling else None,
            "unit": sampling.unit if sampling else "steps",
            "sampling": rounded(took, 2),
            "decode": rounded(self.decode, 2),
            "step_seconds": thinned(sampling.seconds if sampling else (), STEPS_TOLD),
            "peak": self.peak,
            "slot": self.slot,
            "running": running,
        }


def thinned(numbers: Sequence[float], most: int) -> list[float]:
    """At most so many numbers, each the mean of its neighbours where there are more."""
    numbers = list(numbers)
    count = min(most, len(numbers))
    edges = [len(numbers) * place // count for place in range(count + 1)] if count else []
    parts = [numbers[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]
    return [round(sum(part) / len(part), 4) for part in parts]


def rounded(number: float | None, digits: int) -> float | None:
    """`number` in few characters; None, which is unknown, stays that."""
    return None if number is None else round(number, digits)


# --------------------------------------------------------------------------------------------------------------
# What the group tells


class Activity:
    """What one group is doing and did last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.meter: Meter | None = None
        self.run: Run | None = None
        self._name = ""  # of the running request, "" between two
        self._began = 0.0
        self._open_until = 0.0  # a stock sampler may go on until then

    # ---- what is read

    @property
    def between_steps(self) -> bool:
        """Whether nothing runs only because a stock sampler is computing on the host."""
        return self.open_for > 0

    @property
    def open_for(self) -> float:
        """For how many seconds that may still be so."""
        return 0.0 if self._name else max(0.0, self._open_until - self._clock())

    @property
    def running(self) -> bool:
        return bool(self._name) or self.between_steps

    @property
    def step(self) -> tuple[int | None, int | None]:
        """The step that is being made, from 1, and of how many; None where that is not known."""
        meter = self.meter
        if meter is None or meter.unit != "steps":
            return None, None
        return min(meter.done + 1, meter.total or meter.done + 1), meter.total

    @property
    def step_seconds(self) -> float | None:
        meter, sampling = self.meter, self.run.sampling if self.run else None
        return sampling.usual if sampling and meter and meter.phase == "sampling" else None

    def progress(self) -> dict[str, Any] | None:
        meter = self.meter
        return meter.as_data(self._clock()) if meter is not None and self.running else None

    # ---- what is written

    def begin(self, name: str, doing: str, slot: str, work: Work | None = None) -> None:
        """A request of that name is sent to the ranks; `work` is what it is one step of."""
        now = self._clock()
        self._name, self._began, self._open_until = name, now, 0.0
        if name == "forward":
            self._begin_forward(slot, work, now)
            return
        self.meter = None
        if name in ("load", "encode", "sample") or (name == "decode" and self.run is None):
            self._run_for(slot, name, now)
        if name == "sample":
            assert self.run is not None
            self.run.sampling = Sampling(key="", unit="steps", began=now, step_began=now)

    def told(self, progress: Progress) -> None:
        """The group has come so far with the running request, or with its start."""
        now, phase = self._clock(), progress.phase
        meter = self.meter
        if meter is None or meter.phase != phase:
            meter = Meter(phase=phase, unit=_UNITS.get(phase, "measurements"))
        sampling = self.run.sampling if self.run else None
        if phase == "sampling" and sampling is not None and (made := progress.done - sampling.completed) > 0:
            sampling.note(made, now)
            sampling.completed = progress.done
        self.meter = meter.at(progress.done, progress.total, now)

    def end(self, *, well: bool) -> None:
        """The running request has ended, `well` or not."""
        now, name, run = self._clock(), self._name, self.run
        if run is not None and name == "forward":
            self._end_forward(run.sampling, well, now)
        elif run is not None and name in ("load", "encode", "sample", "decode"):
            self.meter = None
            if well:
                self._note(run, name, now)
        self._name = ""  # last: until then it runs, or between two steps it would seem to be over

    def _note(self, run: Run, name: str, now: float) -> None:
        """What a request of that name took."""
        took = now - self._began
        if name == "sample":
            assert run.sampling is not None
            run.sampling.ended = now
        elif name == "load":
            run.load = took
        else:
            setattr(run, name, (getattr(run, name) or 0.0) + took)

    def starting(self) -> None:
        """The ranks are started; nothing that was open goes on."""
        self.meter, self._open_until, self._name = None, 0.0, "start"

    def started(self) -> None:
        """They run, or have failed to."""
        self.meter, self._name = None, ""

    def note_memory(self, memory: Memory) -> None:
        """A rank has told its memory."""
        run = self.run
        if run is not None and memory.reserved is not None and self.running:
            run.peak = max(run.peak or 0, memory.reserved)

    # ---- stock samplers

    def _begin_forward(self, slot: str, work: Work | None, now: float) -> None:
        key = f"{slot} {work.run if work else ''}"
        step, steps = (work.step, work.steps) if work else (None, None)
        sampling = self.run.sampling if self.run else None
        goes_on = (
            sampling is not None
            and sampling.key == key
            and (step != 0 or sampling.step == 0)  # back to the first: a loop executes the node again
            and (sampling.ended is None or bool(work and work.run) or now - sampling.ended < LINGER_SECONDS)
        )
        if not goes_on:
            self._run_for(slot, "forward", now)
            assert self.run is not None
            unit = "steps" if steps else "calls"
            sampling = self.run.sampling = Sampling(key=key, unit=unit, began=now, step_began=now)
            self.meter = None
        assert sampling is not None
        if step is not None and step > sampling.step:
            sampling.note(step - sampling.step, now)
            sampling.step = step
        if self.meter is None or self.meter.phase != "sampling":
            self.meter = Meter(phase="sampling", unit=sampling.unit)
        done = sampling.step if sampling.unit == "steps" else sampling.completed
        # Where the first step is not over, the time it takes is no measure: no mark yet.
        self.meter = self.meter.at(done, steps, now) if done else replace(self.meter, total=steps)

    def _end_forward(self, sampling: Sampling | None, well: bool, now: float) -> None:
        if sampling is None:
            return
        if not well:
            self.meter = None
            return
        sampling.ended, self._open_until = now, now + LINGER_SECONDS
        if sampling.unit == "steps":
            sampling.completed = sampling.step + 1
        else:
            sampling.note(1, now)
            sampling.completed += 1
            if self.meter is not None:
                self.meter = self.meter.at(sampling.completed, None, now)

    def _run_for(self, slot: str, name: str, now: float) -> None:
        """Go on with the run, or begin another: loading and encoding come before sampling, and one samples once."""
        run = self.run
        began = run is not None and (run.sampling is not None or run.slot != slot or name == "load")
        if run is None or began:
            self.run = Run(slot=slot, began=now)
