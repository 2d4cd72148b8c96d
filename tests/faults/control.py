"""How the suite tells one rank to fail: a file that the rank obeys when it comes to the stage.

suite                                            faulty rank (tests.faults.rank)
writes "order"                                   comes to the stage: renames it to "reached", with its pid
sends its signal, if the fault is one            fails by itself, or waits for the signal
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "SHARDED_TEST_FAULTS"  # tells the ranks the folder
PATIENCE = 120.0  # seconds that a rank waits for its signal

STAGES = ("starting", "loading", "encoding", "sampling", "decoding", "idle")
SIGNALS = ("kill", "stop")
FAULTS = (*SIGNALS, "exit", "exception", "loop", "memory limit", "memory")
MESSAGE = "injected by the fault suite"


@dataclass(frozen=True)
class Order:
    fault: str
    stage: str
    rank: int


def give(folder: Path, order: Order) -> None:
    withdraw(folder)
    partial = folder / "partial"
    partial.write_text(json.dumps(asdict(order)))
    partial.rename(folder / "order")


def withdraw(folder: Path) -> None:
    for name in ("order", "reached"):
        (folder / name).unlink(missing_ok=True)


def reached(folder: Path) -> int | None:
    """The pid of the rank that came to the stage, None before."""
    try:
        return int((folder / "reached").read_text())
    except (OSError, ValueError):
        return None


def taken(folder: Path, stage: str, rank: int) -> str | None:
    """In a rank: the fault it has to commit now, if any; each order is taken once."""
    try:
        order = Order(**json.loads((folder / "order").read_text()))
    except (OSError, ValueError):
        return None
    if (order.stage, order.rank) != (stage, rank):
        return None
    partial = folder / f"partial-{rank}"
    partial.write_text(str(os.getpid()))
    (folder / "order").unlink(missing_ok=True)
    partial.rename(folder / "reached")
    return order.fault


def wait_for_the_signal(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and (folder / "reached").exists():
        time.sleep(0.02)
