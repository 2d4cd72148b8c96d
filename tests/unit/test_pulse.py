"""A rank's pulse: what is counted, what a pause says of the slowest block, and where a call may be stopped."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from runtime.engine import attention
from runtime.engine import backend as backends
from runtime.engine import pulse as pulses
from runtime.engine.pulse import Pulse
from runtime.engine.tensor import Ranks, RowSplitLinear
from runtime.environment import RankEnvironment
from runtime.spec import Cancelled, Memory


class FakeClock:
    """A fake clock in the place of the module's `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(pulses, "time", clock)
    return clock


class Model(nn.Module):
    """Two lists of blocks, each with a list inside, and a layer around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.first = nn.ModuleList([Block(), Block()])
        self.second = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in (*self.first, *self.second):
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(2, 2), nn.GELU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            x = layer(x)
        return x


def run(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.zeros(1, 2))


@pytest.mark.parametrize(("closely", "count"), [(False, 3), (True, 7)])
def test_blocks_are_counted_or_every_leaf(closely: bool, count: int) -> None:
    pulse, model = Pulse(), Model()
    pulse.watch(model, closely=closely)
    before = pulse.progress
    run(model)
    assert pulse.progress - before == count


def test_a_model_without_lists_is_one_block() -> None:
    pulse = Pulse()
    layer = nn.Linear(2, 2)
    pulse.watch(layer)
    run(layer)
    assert pulse.progress == 1


def test_collectives_are_counted_from_the_start_of_each_operation() -> None:
    pulse = Pulse()
    pulse.begin("sampling")
    pulse.entered()
    pulse.agreed()
    progress = pulse.progress
    assert pulse.heartbeat().collectives == 2
    pulse.begin("sampling")
    assert pulse.heartbeat().collectives == 0
    assert pulse.heartbeat().progress > progress


def test_counting_a_collective_costs_less_than_two_microseconds() -> None:
    pulse = Pulse()
    best = min(_seconds_of(pulse, 10_000) for _ in range(5)) / 10_000
    assert best < 2e-6


def _seconds_of(pulse: Pulse, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        pulse.entered()
    return time.perf_counter() - start


def test_the_first_run_warms_up_and_is_no_measure(clock: FakeClock) -> None:
    pulse = Pulse()
    pulse.begin("sampling", "this size")
    clock.now += 50  # it compiles
    pulse.block_finished()
    assert pulse.heartbeat().slowest == 0.0
    pulse.warmed_up()
    clock.now += 3
    pulse.block_finished()
    clock.now += 1
    pulse.block_finished()
    assert pulse.heartbeat().slowest == 3.0


def test_what_was_measured_is_known_for_the_same_operation_only(clock: FakeClock) -> None:
    pulse = Pulse()
    for _ in range(2):
        pulse.begin("sampling", "small")
        clock.now += 2
        pulse.block_finished()
        pulse.warmed_up()
        pulse.end()
    pulse.begin("sampling", "large")
    assert pulse.heartbeat().slowest == 0.0
    pulse.end()
    pulse.begin("sampling", "small")
    assert pulse.heartbeat().slowest == 2.0


def test_an_operation_that_failed_while_it_warmed_up_warms_up_again() -> None:
    pulse = Pulse()
    pulse.begin("sampling", "small")
    pulse.end()
    pulse.begin("sampling", "small")
    assert pulse.heartbeat().slowest == 0.0


def test_the_memory_of_operations_has_an_end() -> None:
    pulse = Pulse()
    for size in range(200):
        pulse.begin("sampling", size)
        pulse.warmed_up()
        pulse.end()
    assert len(pulse._known) == 64
    pulse.begin("sampling", 199)
    assert pulse.slowest


def test_a_rank_alone_stops_inside_a_model_and_only_there() -> None:
    pulse, model = Pulse(), Model()
    pulse.watch(model, closely=True)
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with pytest.raises(Cancelled), pulse.stoppable(cancelled):
        run(model)
    assert asked == 4  # on entering, and after three of its seven layers
    run(model)


def test_a_call_that_is_cancelled_already_does_not_begin() -> None:
    with pytest.raises(Cancelled), Pulse().stoppable(lambda: True):
        pytest.fail("it has begun")


def test_a_heartbeat_says_what_is_there() -> None:
    pulse = Pulse()
    pulse.memory = Memory(host=5)
    pulse.begin("loading")
    first, second = pulse.heartbeat(), pulse.heartbeat()
    assert (first.doing, first.memory.host, second.beat - first.beat) == ("loading", 5, 1)
    pulse.end()
    assert pulse.heartbeat().doing == ""


# ---- on a device


class MockEvent:
    """Mock of a CUDA event: `reached` says whether the device has passed it."""

    def __init__(self) -> None:
        self.reached = False

    def record(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[MockEvent]:
    made: list[MockEvent] = []

    def make() -> MockEvent:
        made.append(MockEvent())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", make)
    return made


def test_on_a_device_nothing_counts_before_it_is_reached(events: list[MockEvent]) -> None:
    pulse = Pulse()
    pulse.count_on_device()
    pulse.begin("sampling")
    before = pulse.progress
    pulse.block_finished()
    pulse.entered()
    pulse.block_finished()
    pulse.poll()
    assert (pulse.progress - before, pulse.collectives) == (0, 0)
    events[0].reached = events[1].reached = True
    pulse.poll()
    assert (pulse.progress - before, pulse.collectives) == (2, 1)
    events[2].reached = True
    pulse.poll()
    assert pulse.progress - before == 3


def test_events_are_used_again(events: list[MockEvent]) -> None:
    pulse = Pulse()
    pulse.count_on_device()
    for _ in range(10):
        pulse.block_finished()
        events[-1].reached = True
        pulse.poll()
    assert len(events) == 1


def test_what_the_device_has_still_to_reach_of_an_earlier_call_does_not_count(
    events: list[MockEvent],
) -> None:
    pulse = Pulse()
    pulse.count_on_device()
    pulse.begin("sampling")
    pulse.entered()
    pulse.begin("sampling")
    events[0].reached = True
    pulse.poll()
    assert pulse.collectives == 0


# ---- what the engine counts


class MockGroup:
    """Mock of a process group with this rank alone in it."""

    def allreduce(self, tensors: list[torch.Tensor], _: object) -> MockGroup:
        return self

    def wait(self) -> None: ...


def test_the_tensor_axis_counts_its_collectives() -> None:
    pulse = Pulse()
    ranks = Ranks(MockGroup(), 0, (1,), pulse.entered)  # type: ignore[arg-type]
    RowSplitLinear(nn.Linear(2, 2), ranks)(torch.zeros(1, 2))
    assert pulse.collectives == 1
    ranks.sum(torch.zeros(1))
    assert pulse.collectives == 2


def test_the_context_axes_count_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks: ulysses exchanges on the way in and out, a ring passes on once, a join gathers once."""
    monkeypatch.setattr(attention.dist, "all_to_all_single", lambda out, given, *_, **__: out.copy_(given))
    monkeypatch.setattr(attention.dist, "P2POp", lambda *_, **__: None)
    monkeypatch.setattr(attention.dist, "batch_isend_irecv", lambda _: [])
    monkeypatch.setattr(attention, "all_gather", lambda out, given, **_: out.zero_())
    tokens = attention.Tokens(((3, 3),))
    own = torch.zeros(1, 3, 2, 4)
    for ring, ulysses, count in ((1, 2, 2), (2, 1, 1)):
        pulse = Pulse()
        axes = attention.ContextAxes(ring, ulysses, 0, 0, entered=pulse.entered)
        attention.context_attention(own, own, own, None, None, queries=tokens, keys=tokens, axes=axes)
        assert pulse.collectives == count, (ring, ulysses)
        attention.join_parts(own, 1, (3, 3), axes)
        assert pulse.collectives == count + 1, (ring, ulysses)


def test_an_agreement_of_the_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.dist, "all_reduce", lambda *_, **__: None)
    place = RankEnvironment(rank=0, local_rank=0, world_size=2)
    backend = backends.Backend(torch.device("cpu"), place)
    assert backend.any_rank(True)
    assert backend.pulse.collectives == 1
