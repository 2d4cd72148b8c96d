"""Copies of a model at work at the same time: CFG's conditionings side by side instead of one after the other.

ComfyUI runs the conditionings of a step in turn, unless they can be put into one batch (which the copies then divide).
Its hook for the batch of conditionings is used to run it once for each of them, in threads that take turns: only one
runs at a time, so nothing in ComfyUI or in a custom node is ever entered twice; what overlaps is the waiting.

    thread of the positive  ── host code ──> call ... waits ────────────> host code
    thread of the negative                    ── host code ──> call ... waits ──> host code
    the sampler's thread    ── waits until all wait ──> one request for all calls ──> hands out the answers
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Abandoned(RuntimeError):
    """Another thread of the same step has failed; its error is the one that counts."""


class Turns:
    """Jobs in threads of their own, of which one runs at a time; calls they make together are served together."""

    def __init__(self, serve: Callable[[list[Any]], Sequence[Any]]):
        self._serve = serve
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._calls: dict[int, Any] = {}  # of the jobs that wait, by the job's place
        self._answers: dict[int, Any] = {}
        self._running = 0
        self._failed = False
        self._place = threading.local()

    def run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of all jobs, in their order. Raises what the first of them to fail raised."""
        results: dict[int, Any] = {}
        errors: list[BaseException] = []
        self._running = len(jobs)

        def work(place: int, job: Callable[[], Any]) -> None:
            self._place.value = place
            try:
                # Threads inherit neither the mode nor the context that tells which node is executing.
                with self._turn, torch.inference_mode():
                    if not self._failed:
                        results[place] = job()
            except Abandoned:
                pass
            except BaseException as error:  # ComfyUI's interrupt is one, in newer releases
                errors.append(error)
                self._failed = True
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(work, place, job), name=f"sharded-cond-{place}"
            )
            for place, job in enumerate(jobs)
        ]
        started = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            self._serve_all()
        except BaseException as error:
            errors.insert(0, error)
            with self._changed:
                self._failed = True
                self._changed.notify_all()
        for thread in started:
            thread.join()
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # its frames would hold the error, and the error them: a cycle that holds the model
        return [results[place] for place in range(len(jobs))]

    def _serve_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._failed or len(self._calls) == self._running)
                if self._failed:
                    self._changed.notify_all()
                    return
                if not self._running:
                    return
                places = sorted(self._calls)
                calls = [self._calls[place] for place in places]
            answers = self._serve(calls)
            with self._changed:
                self._calls.clear()
                self._answers.update(zip(places, answers, strict=True))
                self._changed.notify_all()

    def answer(self, call: Any) -> Any:
        """Called by a job: wait until every other job waits or has ended, and for the answer."""
        place = self._place.value
        self._turn.release()
        try:
            with self._changed:
                self._calls[place] = call
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._failed or place in self._answers)
                if place not in self._answers:
                    raise Abandoned
                return self._answers.pop(place)
        finally:
            self._turn.acquire()


def rows_for(batches: Sequence[int], replicas: int) -> list[tuple[tuple[int, int], ...]]:
    """For each call, which rows of its batch each replica takes.

    One call is divided over all; several go to a replica each, or to a share of them where there are more replicas
    than calls.
    """
    count, found = len(batches), []
    for place, batch in enumerate(batches):
        if count >= replicas:
            mine = [place % replicas]
        else:
            mine = list(range(replicas * place // count, replicas * (place + 1) // count))
        bounds = [batch * n // len(mine) for n in range(len(mine) + 1)]
        stretches = dict(zip(mine, zip(bounds[:-1], bounds[1:], strict=True), strict=True))
        found.append(tuple(stretches.get(replica, (0, 0)) for replica in range(replicas)))
    return found


def calc_cond_batch(
    executor: Callable[..., Any], model: Any, conds: list[Any], x_in: Any, timestep: Any, model_options: Any
) -> Any:
    """ComfyUI's CALC_COND_BATCH wrapper: conditionings that cannot be one batch run side by side."""
    remote = model.diffusion_model.sharded
    present = [place for place, cond in enumerate(conds) if cond]
    remote.note_calls(len(present), x_in.shape[0])
    if len(present) < 2 or _have_hooks(conds) or _fit_together([conds[place] for place in present]):
        return executor(model, conds, x_in, timestep, model_options)

    def job(place: int) -> Any:
        alone = [cond if other == place else None for other, cond in enumerate(conds)]
        return executor(model, alone, x_in, timestep, model_options)[place]

    jobs = [lambda place=place: job(place) for place in range(len(conds))]
    with remote.turns() as turns:
        return turns.run(jobs)


def _have_hooks(conds: list[Any]) -> bool:
    """Hooks change the model between the conditionings: these must stay in turn."""
    return any(entry.get("hooks") is not None for cond in conds for entry in cond or ())


def _fit_together(conds: list[Any]) -> bool:
    """Whether ComfyUI will put the conditionings into one batch: one entry each, alike in every shape."""
    return all(len(cond) == 1 for cond in conds) and len({_shape(cond[0]) for cond in conds}) == 1


def _shape(entry: dict[str, Any]) -> tuple[Any, ...]:
    conditions = entry.get("model_conds", {})
    sizes = tuple(sorted((name, tuple(_size(value))) for name, value in conditions.items()))
    return (
        sizes,
        entry.get("area"),
        id(entry.get("control")),
        entry.get("timestep_start"),
        entry.get("timestep_end"),
    )


def _size(condition: Any) -> tuple[Any, ...]:
    return tuple(condition.size())
