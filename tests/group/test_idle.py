"""A group of real ranks that parks and stops by itself, and comes back with the same picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from runtime.group import GROUPS, IdleTimes, IdleWatch, Slot
from runtime.spec import RankError, Stats
from tests.support.groups import decode, layout_of, sample, slot_on_ranks
from tests.support.models import make_flux
from tests.support.processes import wait_until
from tests.support.reference import Run

RUN = Run(steps=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux(tmp_path_factory.mktemp("idle") / "flux", seed=2)


@pytest.fixture
def slot(folder: Path, request: pytest.FixtureRequest) -> Iterator[Slot]:
    with slot_on_ranks(folder, layout_of(**{request.param: 2})) as slot:
        yield slot


def look(times: IdleTimes, minutes: float) -> None:
    """A look at the groups so many minutes after their last use."""
    (group,) = GROUPS.groups()
    IdleWatch(GROUPS, lambda: times, lambda: group.used_at + 60 * minutes).look()


@pytest.mark.parametrize("slot", ["tensor", pytest.param("ulysses", marks=pytest.mark.slow)], indirect=True)
def test_a_pipeline_parks_by_itself_comes_back_and_stops(slot: Slot) -> None:
    (group,) = GROUPS.groups()
    before = decode(slot, sample(slot, RUN))
    pids = [rank["pid"] for rank in group.snapshot()["ranks"]]
    weights = group.memory()
    times = IdleTimes(park_after=600, stop_after=3600)
    look(times, 9)
    assert slot.loaded
    look(times, 11)
    assert group.state.current.phase == "parked"
    assert [one["state"] for one in group.snapshot()["slots"]] == ["parked"]
    if slot.layout.spec.ulysses == 2:  # both had all weights: now one has them
        freed = [(weights[rank].host or 0) - (now.host or 0) for rank, now in group.memory().items()]
        print(f"host memory given back by the ranks: {[f'{one >> 10} KiB' for one in freed]}")
    assert torch.equal(decode(slot, sample(slot, RUN)), before)
    assert slot.loaded
    look(times, 11)
    GROUPS.restore(group)
    assert slot.loaded
    assert torch.equal(decode(slot, sample(slot, RUN)), before)
    assert [rank["pid"] for rank in group.snapshot()["ranks"]] == pids
    look(times, 61)
    assert group.state.current.phase == "stopped"
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 5, "the ranks to end")
    with pytest.raises(RankError, match="does not run"):
        group.call(Stats(), start=False)
    assert group.state.current.phase == "stopped"
