"""Twenty thousand damaged frames: dropped or answered by decoder, rank and host, without a crash, a hang or a flood."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator

from tests.faults.row import Row, Wanted
from tests.support import fuzzed, mutants

COUNTS = {
    "decoder": 10_000,
    "decoder without shared memory": 3_000,
    "rank": 3_000,
    "host": 3_000,
    "host, from strangers": 1_000,
}
SEEDS = {name: number for number, name in enumerate(COUNTS, 1)}
# A rank or a host that drops a frame is begun anew in this same process, which real ones are not: what thousands of
# them leave behind says nothing, a batch at a time does.
BATCH = 25
ALLOWED_BYTES = 64 << 20  # the longest header a few times, as it is read and as it is decoded
SLOWEST = 5.0  # seconds for one frame


def rows(wanted: Wanted) -> Iterator[Row]:
    for end in COUNTS:
        if wanted("mutated frames", end, None):
            yield _row(end)


def _row(end: str) -> Row:
    frames = {"rank": mutants.requests(), "host": mutants.replies()}.get(
        end, [*mutants.requests(), *mutants.replies()]
    )
    stream = iter(mutants.Mutator(frames, SEEDS[end]))
    start = time.monotonic()
    with _end(end) as meet:
        for mutant in itertools.islice(stream, 50):  # what is made once is made
            meet(mutant)
        outcomes, slowest, peak = _send(meet, itertools.islice(stream, COUNTS[end] - 50))
    problems = [] if peak < ALLOWED_BYTES else [f"memory rose by {peak >> 20} MB"]
    problems += [] if slowest < SLOWEST else [f"one frame took {slowest:.1f} s"]
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    text = "; ".join([*problems, f"{told}, slowest {slowest * 1e3:.0f} ms, memory +{peak >> 20} MB"])
    return Row("mutated frames", end, None, not problems, time.monotonic() - start, text)


def _send(
    meet: Callable[[mutants.Mutant], str], stream: Iterator[mutants.Mutant]
) -> tuple[Counter[str], float, int]:
    """What became of them, the seconds of the slowest, and how far memory rose during one batch."""
    outcomes: Counter[str] = Counter()
    slowest, peak = 0.0, 0
    while batch := list(itertools.islice(stream, BATCH)):
        memory = fuzzed.PeakMemory()
        for mutant in batch:
            begun = time.monotonic()
            outcomes[meet(mutant)] += 1
            slowest = max(slowest, time.monotonic() - begun)
        peak = max(peak, memory.growth())
    return outcomes, slowest, peak


@contextlib.contextmanager
def _end(name: str) -> Iterator[Callable[[mutants.Mutant], str]]:
    """What meets the mutants."""
    if name == "rank":
        with fuzzed.fuzzed_rank() as rank:
            yield rank.meet
    elif name == "host":
        with fuzzed.fuzzed_host() as host:
            yield host.meet
    elif name == "host, from strangers":
        with fuzzed.fuzzed_host() as host:
            yield host.meet_stranger
    else:
        yield lambda mutant: fuzzed.decoded(mutant, shared=name == "decoder")
