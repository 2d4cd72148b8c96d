"""ComfyUI killed with SIGKILL in each stage, and two ComfyUI servers of one user beside each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.faults import control
from tests.faults.control import Order
from tests.faults.row import Row, Wanted
from tests.faults.scene import Scene, folder, served
from tests.support.processes import command_line, wait_gone, wait_until
from tools.client import PromptError
from tools.comfy import ServerError

SECONDS = 5.0  # after which nothing is left


def rows(wanted: Wanted) -> Iterator[Row]:
    stages = [stage for stage in control.STAGES if wanted("host killed", stage, None)]
    if stages:
        yield from _kills(stages)
    if wanted("two hosts", "idle", None):
        with folder() as place:
            yield _beside_each_other(place)


def _kills(stages: list[str]) -> Iterator[Row]:
    """The server of a stage is also the next start after the kill in the stage before."""
    with folder() as place:
        expected: bytes | None = None
        killed: tuple[str, float, list[str]] | None = None
        for stage in (*stages, ""):
            try:
                with served(place) as on:
                    picture = on.picture(on.client.run(on.undisturbed()))
                    if killed is not None:
                        yield _row(*killed, [] if picture == expected else ["the next picture is another"])
                    expected = expected or picture
                    killed = (stage, *_kill(on, stage)) if stage else None
            except (PromptError, ServerError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {str(error)[:400]}"
                yield _row(*(killed or (stage, 0.0, [])), [problem])
                killed = None


def _row(stage: str, seconds: float, left: list[str], problems: list[str]) -> Row:
    problems = [*(f"left after {SECONDS:g} s: {name}" for name in left), *problems]
    text = "; ".join(problems) or "nothing left, the next start works"
    return Row("host killed", stage, None, not problems, seconds, text)


def _kill(on: Scene, stage: str) -> tuple[float, list[str]]:
    """Kill the server while a rank is in the stage: seconds until all was gone, and what was not."""
    if stage == "starting":
        on.end_group()
    elif stage == "loading":
        on.unload()
    control.give(on.orders, Order("kill", stage, 0))  # it waits there, and no signal comes
    if stage != "idle":
        on.client.queue(on.fresh())
    wait_until(lambda: control.reached(on.orders), 60, f"rank 0 to come to {stage}", 0.005)
    family = on.server.offspring()
    on.server.kill9()
    start = time.monotonic()
    with suppress(TimeoutError):
        wait_until(
            lambda: not wait_gone(family, 0) and not _directories(on), SECONDS, "the group's end", 0.02
        )
    seconds = time.monotonic() - start
    control.withdraw(on.orders)
    left = [f"{one.pid} {command_line(one)[:120]}" for one in wait_gone(family, 0)]
    return seconds, [*left, *map(str, _directories(on))]


def _directories(on: Scene) -> list[Path]:
    return list(on.temporary.glob("comfyui-sharded-*"))


def _beside_each_other(place: Path) -> Row:
    """One of two servers is killed and started again; the other's ranks and pictures stay as they are."""
    problems = []
    with served(place, "one", faulty=False) as one:
        expected = one.picture(one.client.run(one.undisturbed()))
        before = one.pids()
        with served(place, "two", faulty=False) as two:
            if two.picture(two.client.run(two.undisturbed())) != expected:
                problems.append("the two make different pictures")
            running = [scene.client.queue(scene.fresh(steps=40)) for scene in (one, two)]
            one.client.wait(running[0])
            two.server.kill9()
        start = time.monotonic()
        with served(place, "two", faulty=False) as two:
            seconds = time.monotonic() - start
            two.client.run(two.undisturbed())
            one.client.run(one.fresh())
            if one.picture(one.client.run(one.undisturbed())) != expected:
                problems.append("the other's picture changed")
        if one.pids() != before:
            problems.append("the other's ranks changed")
    text = "; ".join(problems) or "neither touched the other"
    return Row("two hosts", "idle", None, not problems, seconds, text)
