"""Cancels at random moments of all stages: no hang, warm ranks, and right pictures afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from tests.faults.row import Row, Wanted
from tests.faults.scene import STAGE_NODES, Scene, scene
from tools.client import ComfyClient, PromptError, PromptInterrupted

ROUNDS, EACH = 10, 20  # a row for every round
SECONDS = 1.0  # from Cancel to its effect
STAGES = ("starting", "loading", "encoding", "sampling", "decoding")
WEIGHTS = (1, 4, 4, 7, 4)
LONG = {"steps": 3000}
HEAVY = {"steps": 1, "width": 512, "height": 512}  # its decoding takes a while


def rows(wanted: Wanted) -> Iterator[Row]:
    rounds = [number for number in range(ROUNDS) if wanted("cancel", f"round {number}", None)]
    if rounds:
        with scene(faulty=False) as on:
            expected = on.picture(on.client.run(on.undisturbed()))
            for number in rounds:
                yield _round(on, number, expected)


def _round(on: Scene, number: int, expected: bytes) -> Row:
    moment = random.Random(number)
    problems: list[str] = []
    waits: list[float] = []
    effects = {"cancelled": 0, "too late": 0}
    for _ in range(EACH):
        (stage,) = moment.choices(STAGES, WEIGHTS)
        try:
            waited = _cancelled(on, stage, moment.uniform(0, 0.5), problems)
        except (PromptError, TimeoutError) as error:
            problems.append(f"{stage}: {type(error).__name__}: {str(error)[:300]}")
            continue
        effects["too late" if waited is None else "cancelled"] += 1
        if waited is not None:
            waits.append(waited)
            if waited > SECONDS:
                problems.append(f"{stage}: {waited:.2f} s")
    on.client.run(on.fresh())
    if on.picture(on.client.run(on.undisturbed())) != expected:
        problems.append("the picture is another")
    longest = max(waits, default=0.0)
    text = "; ".join([*problems, ", ".join(f"{count} {effect}" for effect, count in effects.items())])
    return Row("cancel", f"round {number}", None, not problems, longest, text)


def _cancelled(on: Scene, stage: str, delay: float, problems: list[str]) -> float | None:
    """Cancel a prompt `delay` seconds into a stage: seconds to its end, None if it was through before."""
    if stage == "starting":
        on.end_group()
    elif stage == "loading":
        on.unload()
    before = on.pids()
    prompt = on.client.queue(
        on.fresh(**(HEAVY if stage == "decoding" else LONG if stage == "sampling" else {}))
    )
    if stage in STAGE_NODES:
        node = STAGE_NODES[stage]
        on.client.wait_for(
            prompt, lambda e: e.kind == "executing" and e.data.get("node") == node, 60, f"{stage} to begin"
        )
    time.sleep(delay if stage != "encoding" else delay / 10)
    asked = time.monotonic()
    on.client.interrupt()
    try:
        on.client.wait(prompt, 60)
    except PromptInterrupted:
        waited = _shown(on.client, "execution_interrupted") - asked
        # None before: a start that was cancelled has left none, and this prompt has started them.
        if stage != "starting" and before and on.pids() != before:
            problems.append(f"{stage}: other ranks than before")
        return waited
    return None


def _shown(client: ComfyClient, kind: str) -> float:
    return next(event.at for event in reversed(client.events) if event.kind == kind)
