"""How far a group is, how fast, and what the last run took: from its requests and their progress, on a fake clock."""

from __future__ import annotations

import pytest

from runtime.activity import LINGER_SECONDS, STEPS_TOLD, Activity, Meter, thinned
from runtime.healing import Work
from runtime.spec import Memory, Progress

SLOT = "a model-12345678"


class FakeClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """An activity, its clock, and the requests of a group in few words."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.activity = Activity(self.clock)

    def call(self, name: str, seconds: float, *, well: bool = True, slot: str = SLOT) -> None:
        self.activity.begin(name, name, slot)
        self.clock.now += seconds
        self.activity.end(well=well)

    def sample(self, steps: int, *, first: float, other: float) -> None:
        """A pipeline samples, in one request."""
        self.activity.begin("sample", "sampling", SLOT)
        for step in range(steps):
            self.clock.now += other if step else first
            self.activity.told(Progress(phase="sampling", done=step + 1, total=steps))
        self.activity.end(well=True)

    def forward(self, seconds: float, work: Work, *, host: float = 0.0) -> None:
        """A stock sampler asks for one forward, and then computes on the host."""
        self.activity.begin("forward", "sampling", SLOT, work)
        self.clock.now += seconds
        self.activity.end(well=True)
        self.clock.now += host

    @property
    def run(self) -> dict[str, object]:
        assert self.activity.run is not None
        return self.activity.run.as_data(self.activity.running)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def step(number: int | None = None, of: int | None = None, run: str = "prompt 7") -> Work:
    return Work(slot=SLOT, doing="sampling", run=run, step=number, steps=of)


# ---- how far


def test_loading_is_told_in_bytes_with_what_is_left(desk: Desk) -> None:
    desk.activity.begin("load", "loading", SLOT)
    assert desk.activity.progress() is None  # libraries are imported
    for done in (0, 100, 200, 300):
        desk.activity.told(Progress(phase="loading", done=done, total=1000))
        desk.clock.now += 2
    assert desk.activity.progress() == {
        "phase": "loading",
        "done": 300,
        "total": 1000,
        "per_second": 50.0,
        "left": 12.0,  # 14 s for the rest, and 2 s have passed
        "unit": "bytes",
    }
    desk.activity.end(well=True)
    assert desk.activity.progress() is None


def test_the_first_step_is_no_measure_of_the_others(desk: Desk) -> None:
    desk.activity.begin("sample", "sampling", SLOT)
    desk.clock.now += 60
    desk.activity.told(Progress(phase="sampling", done=1, total=5))
    progress = desk.activity.progress()
    assert progress is not None
    assert (progress["done"], progress["per_second"], progress["left"]) == (1, None, None)
    assert desk.activity.step_seconds is None
    desk.clock.now += 2
    desk.activity.told(Progress(phase="sampling", done=2, total=5))
    progress = desk.activity.progress()
    assert progress is not None
    assert (progress["per_second"], progress["left"]) == (0.5, 6.0)
    assert desk.activity.step_seconds == 2
    assert desk.activity.step == (3, 5)  # the one that is being made


def test_what_is_left_never_falls_below_zero(desk: Desk) -> None:
    meter = Meter(phase="sampling", unit="steps").at(1, 3, 10.0).at(2, 3, 11.0)
    assert (meter.left(11.5), meter.left(99.0)) == (0.5, 0.0)


def test_progress_never_goes_back() -> None:
    meter = Meter(phase="loading", unit="bytes").at(10, 20, 1.0)
    assert meter.at(5, 20, 2.0).done == 10


def test_a_flood_of_small_pieces_leaves_few_marks_and_the_right_speed() -> None:
    meter = Meter(phase="loading", unit="bytes")
    for piece in range(10_000):
        meter = meter.at(piece * 1000, 10**9, piece * 0.001)
    assert len(meter.marks) <= 32
    assert meter.per_second == pytest.approx(1e6, rel=1e-3)


def test_ranks_that_come_up_have_no_speed(desk: Desk) -> None:
    desk.activity.starting()
    for done in range(3):
        desk.activity.told(Progress(phase="starting", done=done, total=4))
        desk.clock.now += 1
    progress = desk.activity.progress()
    assert progress is not None
    assert (progress["done"], progress["total"], progress["unit"], progress["per_second"]) == (
        2,
        4,
        "ranks",
        None,
    )
    desk.activity.started()
    assert desk.activity.progress() is None


# ---- stock samplers


def test_a_stock_sampler_that_tells_its_step_is_counted_in_steps(desk: Desk) -> None:
    for number in range(4):
        desk.forward(0.5, step(number, 10))  # once for the prompt
        desk.forward(0.5, step(number, 10), host=0.25)  # and once for the negative one
        assert desk.activity.between_steps
    progress = desk.activity.progress()
    assert progress is not None
    assert (progress["done"], progress["total"], progress["unit"]) == (3, 10, "steps")
    assert progress["per_second"] == pytest.approx(0.8)
    assert desk.activity.step_seconds == 1.25
    assert desk.run["steps"] == 4 and desk.run["unit"] == "steps"


def test_one_that_does_not_is_counted_in_calls(desk: Desk) -> None:
    for _ in range(3):
        desk.forward(0.5, step(), host=0.5)
    progress = desk.activity.progress()
    assert progress is not None
    assert (progress["done"], progress["total"], progress["unit"], progress["left"]) == (
        3,
        None,
        "calls",
        None,
    )
    assert desk.activity.step == (None, None)
    assert (desk.run["steps"], desk.run["unit"]) == (3, "calls")


def test_between_two_steps_it_is_still_sampling_and_soon_after_the_last_no_more(desk: Desk) -> None:
    desk.forward(0.5, step(0, 2))
    assert desk.activity.between_steps and desk.activity.open_for == LINGER_SECONDS
    desk.clock.now += LINGER_SECONDS / 2
    assert desk.activity.between_steps
    desk.clock.now += LINGER_SECONDS / 2
    assert not desk.activity.between_steps
    assert desk.activity.progress() is None and not desk.run["running"]


@pytest.mark.parametrize("name", ["park", "decode", "unload", "load"])
def test_another_request_ends_the_sampling_at_once(desk: Desk, name: str) -> None:
    desk.forward(0.5, step(0, 2))
    desk.call(name, 0.1)
    assert not desk.activity.between_steps


def test_a_forward_that_fails_ends_the_sampling_at_once(desk: Desk) -> None:
    desk.activity.begin("forward", "sampling", SLOT, step(0, 2))
    desk.activity.end(well=False)
    assert not desk.activity.between_steps and desk.activity.progress() is None


def test_a_step_back_begins_another_sampling(desk: Desk) -> None:
    """A node that a loop executes twice in one prompt."""
    for number in (0, 1, 2, 0):
        desk.forward(1.0, step(number, 3))
    assert desk.run["steps"] == 1


def test_a_sampler_that_adds_noise_again_goes_on(desk: Desk) -> None:
    """Restart sampling: what has been made is not unmade on the screen."""
    for number in (0, 1, 2, 3, 1, 2, 3, 4):
        desk.forward(1.0, step(number, 5))
    progress = desk.activity.progress()
    assert progress is not None
    assert (progress["done"], desk.run["steps"], desk.run["sampling"]) == (4, 5, 8.0)


def test_a_slow_host_does_not_cut_a_run_in_two(desk: Desk) -> None:
    for number in range(3):
        desk.forward(1.0, step(number, 3), host=5 * LINGER_SECONDS)
    assert (desk.run["steps"], desk.run["sampling"]) == (3, 3 + 10 * LINGER_SECONDS)


# ---- the last run


def test_a_run_is_loading_encoding_sampling_and_decoding(desk: Desk) -> None:
    desk.call("load", 12.4)
    desk.call("encode", 0.5)
    desk.sample(4, first=10.0, other=1.5)
    desk.call("decode", 1.8)
    assert desk.run == {
        "load": 12.4,
        "encode": 0.5,
        "steps": 4,
        "unit": "steps",
        "sampling": 14.5,
        "decode": 1.8,
        "step_seconds": [10.0, 1.5, 1.5, 1.5],
        "peak": None,
        "slot": SLOT,
        "running": False,
    }


def test_the_next_sampling_is_another_run_that_loaded_nothing(desk: Desk) -> None:
    desk.call("load", 12.4)
    desk.sample(4, first=10.0, other=1.5)
    desk.call("decode", 1.8)
    desk.sample(2, first=1.0, other=1.0)
    assert (desk.run["load"], desk.run["steps"], desk.run["decode"]) == (None, 2, None)


def test_a_run_that_fails_keeps_what_went_well(desk: Desk) -> None:
    desk.call("load", 12.4)
    desk.activity.begin("sample", "sampling", SLOT)
    desk.clock.now += 3
    desk.activity.told(Progress(phase="sampling", done=1, total=20))
    desk.activity.end(well=False)
    assert (desk.run["load"], desk.run["steps"], desk.run["sampling"]) == (12.4, 1, None)
    assert not desk.run["running"]


def test_what_does_not_compute_leaves_the_last_run_alone(desk: Desk) -> None:
    desk.sample(2, first=1.0, other=1.0)
    before = desk.run
    for name in ("park", "stats", "ping", "unload", "measure"):
        desk.call(name, 1.0)
    assert desk.run == before


def test_the_peak_is_the_most_that_any_rank_has_told_while_it_ran(desk: Desk) -> None:
    desk.activity.note_memory(Memory(reserved=99))
    desk.activity.begin("sample", "sampling", SLOT)
    for reserved in (5, 30, None, 7):
        desk.activity.note_memory(Memory(reserved=reserved))
    desk.activity.end(well=True)
    desk.activity.note_memory(Memory(reserved=50))
    assert desk.run["peak"] == 30


# ---- many steps


@pytest.mark.parametrize("count", [0, 1, 47, 48, 49, 1000])
def test_many_steps_are_told_in_few_numbers_with_the_same_mean(count: int) -> None:
    numbers = [float(1 + number % 7) for number in range(count)]
    few = thinned(numbers, STEPS_TOLD)
    assert len(few) == min(count, STEPS_TOLD)
    if count:
        assert sum(few) / len(few) == pytest.approx(sum(numbers) / count, rel=0.02)


def test_a_sampling_without_end_takes_no_memory_without_end(desk: Desk) -> None:
    for _ in range(9000):
        desk.forward(0.001, step())
    assert desk.activity.run is not None and desk.activity.run.sampling is not None
    assert len(desk.activity.run.sampling.seconds) <= 8192
    assert desk.run["steps"] == 9000
