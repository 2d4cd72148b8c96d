"""Every fault of a rank in every stage: the error on the node in time with the right rank in it, and what follows."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from tests.faults import control
from tests.faults.control import Order
from tests.faults.row import Row, Wanted
from tests.faults.scene import Scene, scene
from tests.support.processes import wait_until
from tools.client import NodeFailed, PromptError

RANKS = (0, 1)
MEMORY = ("memory limit", "memory")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
# Seconds from the fault to the error on the node.
DIES, FAILS, SILENT, STUCK = 3.0, 6.0, 14.0, 16.0
LIMITS = dict(zip(control.FAULTS, (DIES, SILENT, DIES, FAILS, STUCK, FAILS, FAILS), strict=True))
WARM_UP = 125.0  # for a rank that is stuck while it starts: it might be compiling
LONGEST = 150.0  # seconds until a prompt counts as hanging


def rows(wanted: Wanted) -> Iterator[Row]:
    orders = [
        Order(fault, stage, rank)
        for stage in control.STAGES
        for fault in control.FAULTS
        for rank in RANKS
        if wanted(fault, stage, rank)
    ]
    if orders:
        with scene() as on:
            expected = on.picture(on.client.run(on.undisturbed()))
            _settle_down(on)
            before = on.holds()
            for order in orders:
                yield _row(on, order, expected, before)


def _settle_down(on: Scene) -> None:
    """Go through one failure and one success: what is made once in a server's life is there afterwards."""
    on.end_group()
    on.client.run(on.fresh())
    on.unload()
    on.client.run(on.fresh())
    on.client.run(on.undisturbed())


def _row(on: Scene, order: Order, expected: bytes, before: Counter[str]) -> Row:
    started, problems, seconds, detail = time.monotonic(), [], 0.0, ""
    try:
        seconds, detail = _idle(on, order) if order.stage == "idle" else _busy(on, order)
        problems += _judged(order, seconds, detail)
        if on.picture(on.client.run(on.undisturbed(), LONGEST)) != expected:
            problems.append("the next picture is another")
        if more := on.more_than(before):
            problems.append(f"left behind: {more}")
    except (PromptError, TimeoutError, AssertionError) as error:
        problems.append(f"{type(error).__name__}: {str(error)[:600]}")
    finally:
        control.withdraw(on.orders)
    took = time.monotonic() - started
    text = "; ".join([*problems, detail.partition("\n")[0]]) + f" (case {took:.1f} s)"
    return Row(order.fault, order.stage, order.rank, not problems, seconds, text)


def _judged(order: Order, seconds: float, error: str) -> list[str]:
    problems = []
    limit = LIMITS[order.fault]
    if order.fault == "loop" and order.stage == "starting":
        limit = WARM_UP
    if seconds > limit:
        problems.append(f"took {seconds:.1f} s of {limit:g}")
    named = re.search(r"rank (\d+)", error, re.IGNORECASE)
    if error and (named is None or int(named[1]) != order.rank):
        problems.append(f"names {named[0] if named else 'no rank'}")
    return problems


def _busy(on: Scene, order: Order) -> tuple[float, str]:
    """Have a rank fail while it works: seconds until the node showed an error, and its text."""
    if order.stage == "starting":
        on.end_group()
    elif order.stage == "loading":
        on.unload()
    control.give(on.orders, order)
    heard = len(on.client.events)
    prompt = on.client.queue(on.fresh())
    at = _strike(on, order)
    try:
        on.client.wait(prompt, LONGEST)
    except NodeFailed as error:
        shown = next(event.at for event in reversed(on.client.events) if event.kind == "execution_error")
        return shown - at, error.message
    if order.stage == "decoding" and order.fault in MEMORY:
        return _healed(on, heard, at)
    raise AssertionError("the prompt succeeded")


def _healed(on: Scene, heard: int, at: float) -> tuple[float, str]:
    """What the node said instead of failing, after the first `heard` events: decoding is tried again in tiles."""
    said = [event for event in on.client.events[heard:] if event.kind == "text"]
    texts = [event for event in said if "now in tiles" in event.data["text"]]
    if not texts:
        raise AssertionError("the prompt succeeded, and the node did not say how")
    return max(0.0, texts[0].at - at), texts[0].data["text"]


def _idle(on: Scene, order: Order) -> tuple[float, str]:
    """Have a rank fail while nothing runs: seconds until it was seen, and the error of the next prompt, if any."""
    control.give(on.orders, order)
    at = _strike(on, order)
    if order.fault != "loop":  # a rank that is asked nothing may loop
        wait_until(lambda: _lost(on, order.rank), LIMITS[order.fault] + 10, "the fault to be seen")
    seconds = time.monotonic() - at
    try:
        begun = time.monotonic()
        on.client.run(on.fresh(), LONGEST)
    except NodeFailed as error:
        if order.fault != "loop":
            raise
        return time.monotonic() - begun, error.message
    return seconds, ""


def _lost(on: Scene, rank: int) -> bool:
    found = [one["state"] for one in on.ranks() if one["rank"] == rank]
    return not found or found[0] not in ("ready", "starting")


def _strike(on: Scene, order: Order) -> float:
    """When the fault happened."""
    wait_until(lambda: control.reached(on.orders), 60, f"rank {order.rank} to come to {order.stage}", 0.005)
    pid = control.reached(on.orders)
    if order.fault in SIGNALS and pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, SIGNALS[order.fault])
    return time.monotonic()
