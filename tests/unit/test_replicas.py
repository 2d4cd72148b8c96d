"""Jobs of a step take turns, wait together and are answered together; whatever fails, nobody waits for ever."""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.processes import wait_until
from tests.support.wires import PATIENCE, background
from tools import ROOT


def _module() -> Any:
    """The file by itself: the rest of its package needs ComfyUI."""
    spec = importlib.util.spec_from_file_location("replicas", ROOT / "nodes" / "native" / "replicas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


replicas = _module()
Job = Callable[[], Any]


class Served:
    """Serves calls by adding 100 to each, and remembers which came together."""

    def __init__(self, fails_at: int = -1):
        self.calls: list[list[Any]] = []
        self.threads: set[threading.Thread] = set()
        self._fails_at = fails_at

    def __call__(self, calls: list[Any]) -> list[Any]:
        self.threads.add(threading.current_thread())
        if len(self.calls) == self._fails_at:
            raise ConnectionError("a rank died")
        self.calls.append(calls)
        return [call + 100 for call in calls]


def run(turns: Any, jobs: Sequence[Job]) -> list[Any]:
    """Their results, or what they raised. Jobs that hang fail here, and cannot keep the tests from ending."""
    before = threading.active_count()
    try:
        return background(lambda: turns.run(jobs)).result(PATIENCE)
    finally:
        wait_until(lambda: threading.active_count() <= before, PATIENCE, "the jobs' threads to end")


def calling(turns: Any, *calls: int) -> Job:
    """A job that makes `calls` one after the other; its result are the answers."""
    return lambda: [turns.answer(call) for call in calls]


# ---- turns


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_jobs_are_served_together_and_get_their_own_answers(count: int) -> None:
    served = Served()
    turns = replicas.Turns(served)
    jobs = [calling(turns, place, place + 10, place + 20) for place in range(count)]
    assert run(turns, jobs) == [[place + 100, place + 110, place + 120] for place in range(count)]
    rounds = 3 if count else 0
    assert served.calls == [[place + 10 * number for place in range(count)] for number in range(rounds)]


def test_only_one_job_runs_at_a_time_and_none_while_calls_are_served() -> None:
    inside: list[int] = []
    most = 0

    def busy(place: int) -> None:
        nonlocal most
        inside.append(place)
        most = max(most, len(inside))
        time.sleep(0.002)
        inside.remove(place)

    def serve(calls: list[int]) -> list[int]:
        assert not inside
        busy(-1)
        return calls

    def job(place: int) -> int:
        for _ in range(5):
            busy(place)
            turns.answer(place)
            busy(place)
        return place

    turns = replicas.Turns(serve)
    assert run(turns, [lambda place=place: job(place) for place in range(4)]) == [0, 1, 2, 3]
    assert most == 1


def test_jobs_with_unequal_numbers_of_calls_go_on_without_those_that_have_ended() -> None:
    """Areas and masks: one conditioning may need more calls than another, or none."""
    served = Served()
    turns = replicas.Turns(served)
    jobs = [calling(turns, 1, 2, 3), calling(turns), calling(turns, 7), calling(turns, 8, 9)]
    assert run(turns, jobs) == [[101, 102, 103], [], [107], [108, 109]]
    assert served.calls == [[1, 7, 8], [2, 9], [3]]


def test_calls_are_served_by_the_thread_that_runs_the_jobs() -> None:
    """Only there may ComfyUI's interrupt be raised: who raises it clears it."""
    served = Served()
    turns = replicas.Turns(served)
    own: list[threading.Thread] = []

    def all_of_it() -> None:
        own.append(threading.current_thread())
        turns.run([calling(turns, 1), calling(turns, 2)])

    background(all_of_it).result(PATIENCE)
    assert served.threads == set(own)


def test_jobs_have_the_context_of_their_caller_and_no_gradients() -> None:
    """ComfyUI keeps in the context which node is executing."""
    node: contextvars.ContextVar[str] = contextvars.ContextVar("node", default="none")
    turns = replicas.Turns(Served())

    def all_of_it() -> list[Any]:
        node.set("KSampler")
        return turns.run([lambda: (node.get(), torch.is_inference_mode_enabled())] * 2)

    assert background(all_of_it).result(PATIENCE) == [("KSampler", True)] * 2


# ---- what fails


class Interrupt(BaseException):
    """ComfyUI's interrupt is no Exception in newer releases."""


@pytest.mark.parametrize("error", [ValueError("a node's own"), Interrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_in_one_job_ends_all_and_is_the_one_that_is_raised(
    place: int, after: int, error: BaseException
) -> None:
    served = Served()
    turns = replicas.Turns(served)

    def failing() -> None:
        for call in range(after):
            turns.answer(call)
        raise error

    jobs: list[Job] = [calling(turns, 1, 2, 3) for _ in range(2)]
    jobs.insert(place, failing)
    with pytest.raises(type(error)) as raised:
        run(turns, jobs)
    assert raised.value is error
    assert len(served.calls) == after


def test_the_first_of_several_errors_is_raised() -> None:
    turns = replicas.Turns(Served())

    def late() -> None:
        turns.answer(1)
        raise KeyError("late")

    def early() -> None:
        raise ValueError("early")

    with pytest.raises(ValueError, match="early"):
        run(turns, [late, early])


@pytest.mark.parametrize("round_", [0, 1])
def test_an_error_in_serving_ends_all_jobs_and_is_raised(round_: int) -> None:
    served = Served(fails_at=round_)
    turns = replicas.Turns(served)
    came_through: list[int] = []

    def job() -> None:
        for call in range(3):
            turns.answer(call)
            came_through.append(call)

    with pytest.raises(ConnectionError, match="a rank died"):
        run(turns, [job, job])
    assert len(came_through) == 2 * round_


def test_too_few_answers_are_an_error() -> None:
    turns = replicas.Turns(lambda calls: calls[1:])
    with pytest.raises(ValueError, match="zip"):
        run(turns, [calling(turns, 1), calling(turns, 2)])


def test_a_job_that_swallows_the_end_of_the_others_cannot_hold_them_up() -> None:
    """A custom node may catch every exception of a model call and try again."""
    turns = replicas.Turns(Served())

    def stubborn() -> str:
        for _ in range(3):
            try:
                turns.answer(1)
            except RuntimeError:
                continue
        return "done"

    def failing() -> None:
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        run(turns, [stubborn, failing])


def test_what_a_job_leaves_behind_does_not_reach_the_next_turns() -> None:
    served = Served()
    for number in range(3):
        turns = replicas.Turns(served)
        assert run(turns, [calling(turns, number), calling(turns, number + 1)]) == [
            [number + 100],
            [number + 101],
        ]


# ---- rows


def _shares(rows: Sequence[tuple[int, int]]) -> dict[int, range]:
    return {replica: range(*part) for replica, part in enumerate(rows) if part[1] > part[0]}


@pytest.mark.parametrize("copies", range(1, 6))
@pytest.mark.parametrize("batches", [(1,), (2,), (3,), (8,), (1, 1), (2, 3), (1, 1, 1), (4, 1, 2), (1,) * 7])
def test_every_row_goes_to_one_replica_in_order(batches: tuple[int, ...], copies: int) -> None:
    """The answers are put together in the order of the replicas."""
    for batch, rows in zip(batches, replicas.rows_for(batches, copies), strict=True):
        assert len(rows) == copies
        assert [row for part in _shares(rows).values() for row in part] == list(range(batch))


@pytest.mark.parametrize("copies", range(1, 6))
@pytest.mark.parametrize("batches", [(1, 1), (2, 3), (1, 1, 1), (4, 1, 2), (1,) * 7])
def test_no_replica_has_two_calls_while_another_has_none(batches: tuple[int, ...], copies: int) -> None:
    found = [set(_shares(rows)) for rows in replicas.rows_for(batches, copies)]
    loads = [sum(replica in shares for shares in found) for replica in range(copies)]
    assert max(loads) <= 1 or min(loads) >= 1


def test_rows_by_example() -> None:
    assert replicas.rows_for([4], 2) == [((0, 2), (2, 4))]  # both conditionings in one batch
    assert replicas.rows_for([3], 2) == [((0, 1), (1, 3))]
    assert replicas.rows_for([1, 1], 2) == [((0, 1), (0, 0)), ((0, 0), (0, 1))]  # one each
    assert replicas.rows_for([2, 2], 4) == [
        ((0, 1), (1, 2), (0, 0), (0, 0)),
        ((0, 0), (0, 0), (0, 1), (1, 2)),
    ]


# ---- which conditionings run side by side


class Condition:
    """Stands for one of ComfyUI's CONDs, of which only the size is asked."""

    def __init__(self, *size: int):
        self._size = size

    def size(self) -> list[int]:
        return list(self._size)


class Batch:
    """Stands for ComfyUI's calc_cond_batch: makes one call for each entry of the conditionings it is given."""

    def __init__(self) -> None:
        self.served: list[list[Any]] = []
        self.noted: list[tuple[int, int]] = []
        self.turns: Any = None
        remote = SimpleNamespace(note_calls=lambda *noted: self.noted.append(noted), turns=self._turns)
        self.model = SimpleNamespace(diffusion_model=SimpleNamespace(sharded=remote))

    def _turns(self) -> Any:
        self.turns = replicas.Turns(self._serve)
        return contextlib.nullcontext(self.turns)

    def _serve(self, calls: list[Any]) -> list[Any]:
        self.served.append(calls)
        return [f"answer to {call}" for call in calls]

    def executor(self, _model: Any, conds: list[Any], *_: Any) -> list[Any]:
        if self.turns is None:
            return self._serve([entry["name"] for cond in conds for entry in cond or ()])
        return [[self.turns.answer(entry["name"]) for entry in cond] if cond else None for cond in conds]

    def run(self, *conds: Any) -> Any:
        given = (self.executor, self.model, list(conds), torch.zeros(2, 1), None, {})
        return background(lambda: replicas.calc_cond_batch(*given)).result(PATIENCE)


def entry(name: str, length: int = 8, **more: Any) -> dict[str, Any]:
    return {"name": name, "model_conds": {"c_crossattn": Condition(1, length, 4)}, **more}


@pytest.mark.parametrize(
    "other",
    [
        [entry("negative", length=9)],
        [entry("negative", area=(1, 1, 0, 0))],
        [entry("negative", control=object())],
        [entry("negative"), entry("negative of an area")],
        [{"name": "negative", "model_conds": {}}],
    ],
    ids=["length", "area", "control", "two entries", "other conditions"],
)
def test_conditionings_that_cannot_be_one_batch_run_side_by_side(other: list[dict[str, Any]]) -> None:
    batch = Batch()
    positive, negative = batch.run([entry("positive")], other)
    assert positive == ["answer to positive"]
    assert negative == [f"answer to {one['name']}" for one in other]
    assert batch.served[0] == ["positive", "negative"]
    assert batch.noted == [(2, 2)]


def test_a_conditioning_that_is_none_has_no_call() -> None:
    """Guiders leave one out where its weight is zero."""
    batch = Batch()
    answers = batch.run([entry("positive")], None, [entry("negative", length=9)])
    assert answers == [["answer to positive"], None, ["answer to negative"]]
    assert batch.served == [["positive", "negative"]]


@pytest.mark.parametrize(
    "conds",
    [
        ([entry("positive")], None),
        ([entry("positive")], [entry("negative")]),
        ([entry("positive", hooks=object())], [entry("negative", length=9)]),
    ],
    ids=["one alone", "alike", "hooks"],
)
def test_all_others_are_left_to_comfyui(conds: tuple[Any, ...]) -> None:
    batch = Batch()
    batch.run(*conds)
    assert len(batch.served) == 1
    assert batch.turns is None
