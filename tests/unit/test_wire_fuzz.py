"""Damaged frames: the connection is dropped or an error is told, whoever receives them; nothing crashes or waits.

A small part of what `python -m tests.faults --only frames` sends.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest

from runtime import wire
from tests.support import fuzzed, mutants
from tests.support.threads import one_torch_thread
from tests.support.wires import PATIENCE, background, frame, header, no_descriptor_left, tensor_header

COUNT = 500  # for each end
ALLOWED_BYTES = 2 * wire._MAX_HEADER + (32 << 20)  # the longest header twice, and what allocators keep


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread():
        yield


def row(frames: list[mutants.Frame], seed: int, count: int = COUNT) -> Iterator[mutants.Mutant]:
    return itertools.islice(mutants.Mutator(frames, seed), count)


def both_happen(outcomes: Counter[str], other: str) -> None:
    """A fuzzer whose frames are all dropped at the first byte, or all accepted, tests nothing."""
    print(dict(outcomes))
    assert outcomes["dropped"] > 50
    assert outcomes[other] > 50


def test_the_same_seed_gives_the_same_mutants_and_each_kind_of_damage() -> None:
    first, again = (list(row(mutants.requests(), 5, 200)) for _ in range(2))
    assert first == again
    assert first != list(row(mutants.requests(), 6, 200))
    assert {mutant.kind for mutant in first} == set(mutants._DAMAGE)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "socket only"])
def test_the_decoder_reads_a_mutant_or_drops_its_connection(shared: bool) -> None:
    peak = fuzzed.PeakMemory()
    with no_descriptor_left():
        frames = [*mutants.requests(), *mutants.replies()]
        both_happen(Counter(fuzzed.decoded(mutant, shared) for mutant in row(frames, 1)), "read")
    assert peak.growth() < ALLOWED_BYTES


def test_a_rank_answers_a_mutant_or_leaves() -> None:
    with fuzzed.fuzzed_rank() as rank:
        for mutant in row(mutants.requests(), 20, 20):
            rank.meet(mutant)
        peak = fuzzed.PeakMemory()
        outcomes = Counter(rank.meet(mutant) for mutant in row(mutants.requests(), 2, COUNT // 2))
    both_happen(outcomes, "answered")
    assert peak.growth() < ALLOWED_BYTES


def test_a_host_ends_the_call_of_a_rank_that_answers_with_a_mutant() -> None:
    with fuzzed.fuzzed_host() as host:
        for mutant in row(mutants.replies(), 30, 20):
            host.meet(mutant)
        peak = fuzzed.PeakMemory()
        outcomes = Counter(host.meet(mutant) for mutant in row(mutants.replies(), 3, COUNT // 2))
    both_happen(outcomes, "read")
    assert peak.growth() < ALLOWED_BYTES


def test_strangers_with_mutants_are_dropped_and_the_ranks_go_on() -> None:
    with fuzzed.fuzzed_host() as host:
        assert {host.meet_stranger(mutant) for mutant in row(mutants.replies(), 7, 50)} == {"dropped"}


# ---- what the mutators found, each by itself


def dropped_within(seconds: float, mutant: mutants.Mutant) -> bool:
    start = time.monotonic()
    return fuzzed.decoded(mutant) == "dropped" and time.monotonic() - start < seconds


def test_a_tensor_of_a_million_dims_is_dropped_at_once() -> None:
    """Its size would be a number of sixty million bits, and take an hour to compute."""
    near, far = socket.socketpair()
    written = frame(header(tensor_header(shape=[2**62] * 1_000_000)))
    receiver = wire.Connection(far)
    with near:
        sending = background(lambda: near.sendall(written))
        start = time.monotonic()
        with pytest.raises(wire.ConnectionLost, match="a tensor of uint8"):
            receiver.receive()
        assert time.monotonic() - start < 5
        sending.result(PATIENCE)
    receiver.close()
    receiver.pool.close()


@pytest.mark.parametrize("kind", ["unsealed", "shrinking", "null", "read only", "socket"])
def test_a_buffer_that_its_owner_can_make_smaller_is_not_mapped(kind: str) -> None:
    """Whoever reads where a file no longer is dies of SIGBUS."""
    written = frame(header(tensor_header(shape=(4096,), buffer=1), opened=[(1, 4096)]))
    assert dropped_within(1, mutants.Mutant("", written, (kind,)))
    assert fuzzed.decoded(mutants.Mutant("", written, ("shared",))) == "read"


def test_promised_gigabytes_cost_nothing_before_they_come() -> None:
    size = 4 << 30
    packed = msgspec.msgpack.encode(header(tensor_header(shape=(size,))))
    written = frame(packed, b"the first few bytes", lengths=(len(packed), size))
    fuzzed.decoded(mutants.Mutant("", frame(header(tensor_header()), b"warm")))
    peak = fuzzed.PeakMemory()
    assert dropped_within(1, mutants.Mutant("", written))
    assert peak.growth() < 16 << 20
