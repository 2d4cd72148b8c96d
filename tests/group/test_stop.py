"""A person stops a group of real ranks in the middle of what it does; and what it told of itself until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from runtime.devices import cpu_devices
from runtime.group import GROUPS, Slot, WorkerGroup
from runtime.spec import RankError
from tests.support.groups import layout_of, make_slot, sample, sampling
from tests.support.models import make_flux
from tests.support.processes import wait_until
from tests.support.reference import Run

RUN = Run(width=64, height=64, steps=4)
LONG = Run(width=64, height=64, steps=3000, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux(tmp_path_factory.mktemp("stop") / "flux", seed=31)


@pytest.fixture
def slot(folder: Path) -> Iterator[Slot]:
    slot = make_slot(folder, layout_of(tensor=2))
    slot.ensure()
    yield slot
    GROUPS.close_all()


def group() -> WorkerGroup:
    (one,) = GROUPS.groups()
    return one


def pids() -> list[int]:
    return [rank["pid"] for rank in group().snapshot()["ranks"] if rank["pid"]]


def when(holds: Callable[[], bool], act: Callable[[], Any]) -> threading.Thread:
    """A thread that acts as soon as something holds."""

    def run() -> None:
        wait_until(holds, 30, "what to wait for")
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_stop_ends_sampling_within_seconds_and_the_next_call_works(slot: Slot) -> None:
    expected = sample(slot, RUN)
    request, tensors = sampling(slot, LONG)
    before, incidents = pids(), GROUPS.journal.incidents
    stopped: list[float] = []

    def stop() -> None:
        stopped.append(time.monotonic())
        group().stop("Stopped by request.")

    stopper = when(lambda: (group().activity.step[0] or 0) > 20, stop)
    with pytest.raises(RankError, match="^Stopped by request while sampling, ") as caught:
        slot.call(request, tensors)
    print(f"ended after {time.monotonic() - stopped[0]:.2f} s")
    assert time.monotonic() - stopped[0] < 2
    assert caught.value.kind == "stopped"
    stopper.join(15)
    assert not stopper.is_alive() and not group().stopping
    assert (group().phase, group().reason) == ("stopped", "Stopped by request.")
    wait_until(lambda: not any(map(psutil.pid_exists, before)), 5, "the ranks to end")
    assert GROUPS.journal.incidents == incidents
    assert torch.equal(sample(slot, RUN), expected)


def test_a_stop_ends_a_start(folder: Path) -> None:
    one = WorkerGroup(cpu_devices(2))
    stopper = when(lambda: one.stage == "starting", lambda: one.stop("Stopped by request."))
    try:
        with pytest.raises(RankError, match="^Stopped by request while starting"):
            one.start()
        stopper.join(15)
        assert (one.phase, one.reason) == ("stopped", "Stopped by request.")
    finally:
        one.close()


@pytest.mark.slow
def test_three_stops_in_a_row_are_no_failures(slot: Slot) -> None:
    """Or the fourth run would be refused for having failed too often."""
    for _ in range(3):
        request, tensors = sampling(slot, LONG)
        stopper = when(lambda: group().stage == "sampling", lambda: group().stop("Stopped by request."))
        with pytest.raises(RankError, match="^Stopped by request"):
            slot.call(request, tensors)
        stopper.join(15)
    sample(slot, RUN)


@pytest.mark.slow
def test_a_group_tells_what_its_last_run_took(slot: Slot) -> None:
    sample(slot, RUN)
    told = GROUPS.state(0.0)
    run = told["last_run"]
    assert (run["steps"], run["unit"], run["slot"], run["running"]) == (RUN.steps, "steps", slot.name, False)
    assert run["load"] > 0 and run["sampling"] > 0 and len(run["step_seconds"]) == RUN.steps
    (one,) = told["groups"]
    assert one["start_seconds"] > 0 and one["degrees"]["tensor"] == 2
    (held,) = one["slots"]
    # Two ranks hold about half of the split weights each, and what is not split twice.
    assert held["weight_bytes"] < held["total_bytes"] <= 2 * held["weight_bytes"]
    assert [row["rank"] for row in told["devices"] if row["group"] == one["id"]] == [0, 1]


def test_what_comes_back_from_ram_is_told_as_that(slot: Slot) -> None:
    GROUPS.park(group())
    assert (group().stage, group().parked_by) == ("parked", "user")
    stages: list[str] = []
    group().state.listen(lambda _: stages.append(group().stage))
    slot.ensure()
    assert "restoring" in stages and "loading" not in stages
    assert group().restore_seconds[slot.name] > 0 and group().parked_by == ""
