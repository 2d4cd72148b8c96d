"""Answers of /sharded/state that need four GPUs, or a moment too short to catch: one for every phase of the panel.

Of the shape that the server's answers have: `tests/unit/test_made_up_states.py` compares them. Numbers are those of a
FLUX.2 dev in bf16 on four 24 GB cards, rounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tools import ROOT

GB = 2**30
NAMES = ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "NVIDIA RTX A5000")
SLOT = "flux2-dev-bf16-1a2b3c4d"
SERVER = "a1b2c3d4"
DEGREES = {"replica": 1, "stage": 1, "ring": 1, "ulysses": 2, "tensor": 2}
BEGAN = 1_796_000_000.0
State = dict[str, Any]
# What every event says of its sender.
HEAD: tuple[str, ...] = ("api", "version", "server", "seq")


def version() -> str:
    """The pack's: a page and a server part of different versions say so, and nothing else."""
    found = re.search(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found
    return found[1]


def device(index: int, **changes: Any) -> dict[str, Any]:
    """A card with a fourth of the model on it."""
    return {
        "key": f"cuda:GPU-{index}",
        "label": f"GPU {index} {NAMES[index]}",
        "kind": "cuda",
        "total": 24 * GB,
        "used": int((16.3 + index / 10) * GB),
        "display": index == 1,
        "group": ",".join(f"cuda:GPU-{one}" for one in range(4)),
        "rank": index,
        "weights": int(12.4 * GB),
        "work": int(2.5 * GB),
        "others": [{"name": "firefox", "bytes": int(0.4 * GB)}, {"name": "", "bytes": None}],
        "peers": [one for one in range(4) if one != index],
        "age": 0.4,
        **changes,
    }


def rank(number: int, **changes: Any) -> dict[str, Any]:
    memory = {
        "weights": int(12.4 * GB),
        "reserved": int(14.9 * GB),
        "device_used": int(16.3 * GB),
        "device_total": 24 * GB,
        "host": int(3.1 * GB),
    }
    return {
        "rank": number,
        "pid": 4711 + number,
        "device": f"cuda:GPU-{number}",
        "label": f"GPU {number} {NAMES[number]}",
        "state": "ready",
        "doing": "",
        "memory": memory,
        "memory_age": 0.4,
        **changes,
    }


def slot(name: str = SLOT, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "state": "loaded",
        "layout": "tensor 2 x ulysses 2",
        "degrees": DEGREES,
        "weight_bytes": int(12.4 * GB),
        "total_bytes": int(49.6 * GB),
        "load_seconds": 12.4,
        "restore_seconds": None,
        **changes,
    }


def progress(phase: str, done: int, total: int | None, unit: str, **changes: Any) -> dict[str, Any]:
    told = {"phase": phase, "done": done, "total": total, "per_second": None, "left": None, "unit": unit}
    return {**told, **changes}


def group(stage: str = "ready", **changes: Any) -> dict[str, Any]:
    """One on all four cards; `state` is busy unless the stage is a state of its own."""
    idle = stage in ("stopped", "starting", "ready", "parked", "broken")
    return {
        "id": ",".join(f"cuda:GPU-{one}" for one in range(4)),
        "agent_pid": 4710,
        "state": stage if idle else "busy",
        "phase": stage,
        "stage": stage,
        "doing": "" if idle else stage,
        "slot": "" if idle else SLOT,
        "seconds": 3.2,
        "reason": "",
        "ranks": [rank(number) for number in range(4)],
        "slots": [slot()],
        "degrees": DEGREES,
        "progress": None,
        "step_seconds": None,
        "warming": False,
        "cancelling": False,
        "stalled": None,
        "idle": None,
        "parked_by": "",
        "start_seconds": 6.1,
        "stopping": False,
        **changes,
    }


def incident(kind: str = "memory", number: int = 1, **changes: Any) -> dict[str, Any]:
    """The third card ran out of memory at the seventh step, unless `changes` say otherwise."""
    params = {
        "doing": "sampling",
        "step": 7,
        "steps": 20,
        "wanted": int(1.2 * GB),
        "before": "",
        "after": "",
        "slot": SLOT,
        "seconds": None,
    }
    told = {
        "id": f"{SERVER}-{number}",
        "time": BEGAN + number,
        "group": group()["id"],
        "rank": 2,
        "device": f"GPU 2 {NAMES[2]}",
        "kind": kind,
        "title": "Rank 2 ran out of memory",
        "text": f"GPU 2 {NAMES[2]} wanted 1.2 GB more while sampling, at step 7.",
        "detail": "Memory, as the ranks last told it:\nRank 2 (GPU 2): device 23.6 of 24.0 GB used\n\n"
        "Last lines of its log:\ntorch.OutOfMemoryError: CUDA out of memory.",
        "params": params,
    }
    return {**told, **changes}


def last_run(**changes: Any) -> dict[str, Any]:
    return {
        "load": 12.4,
        "steps": 20,
        "unit": "steps",
        "sampling": 28.4,
        "decode": 1.8,
        "encode": 0.6,
        "step_seconds": [1.61, *(1.40 + number % 5 / 50 for number in range(19))],
        "peak": int(18.1 * GB),
        "slot": SLOT,
        "group": group()["id"],
        "time": BEGAN,
        "running": False,
        **changes,
    }


def state(*groups: dict[str, Any], **changes: Any) -> State:
    """The whole answer. Without a group that runs, nothing of ours is on the cards."""
    runs = any(one["state"] not in ("stopped", "broken") for one in groups)
    free = {"group": None, "rank": None, "weights": 0, "work": 0, "used": int(1.4 * GB)}
    return {
        "api": 1,
        "version": version(),
        "comfyui": "0.3.75",
        "server": SERVER,
        "seq": 1,
        "time": BEGAN + 100,
        "devices": [device(index, **({} if runs else free)) for index in range(4)],
        "cpu_ranks": 8,
        "auto_ranks": 4,
        "groups": list(groups),
        "incidents": [],
        "last_run": last_run() if groups else None,
        **changes,
    }


def event(told: State) -> dict[str, Any]:
    """What the event "sharded.state" says of a state."""
    names = ("id", "state", "stage", "doing", "warming", "cancelling", "stopping", "progress")
    groups = [
        {**{name: one[name] for name in names}, "stalled": one["stalled"] is not None}
        for one in told["groups"]
    ]
    return {"groups": groups, **{name: told[name] for name in HEAD}}


def sampling(done: int = 7, total: int | None = 20, **changes: Any) -> dict[str, Any]:
    """A group in the middle of a run."""
    steps = progress("sampling", done, total, "steps", per_second=0.704, left=18.2)
    return group("sampling", **{"progress": steps, "step_seconds": 1.42, **changes})


def broken(**changes: Any) -> dict[str, Any]:
    """A group after rank 2 was lost."""
    stopped = [rank(number, state="stopped", pid=None) for number in range(4)]
    reason = f"Rank 2 (GPU 2 {NAMES[2]}, pid 4713) ran out of memory while sampling."
    return group("broken", **{"ranks": stopped, "slots": [], "reason": reason, "agent_pid": None, **changes})


@dataclass(frozen=True)
class Phase:
    """What the server answers (as `Stand.state`), and what the panel then says: phase, two lines, and its buttons."""

    answer: State | int | None
    phase: str
    line: str | re.Pattern[str]
    more: str | re.Pattern[str] = ""
    buttons: tuple[str, ...] = ()


NEXT_RUN = "The next run starts a new group."
PHASES: dict[str, Phase] = {
    "none": Phase(
        state(),
        "none",
        "No group is running.",
        "A group starts by itself when a workflow with a sharded loader runs.",
        ("examples",),
    ),
    "starting": Phase(
        state(
            group(
                "starting",
                ranks=[rank(number, state="ready" if number < 3 else "starting") for number in range(4)],
                slots=[],
                progress=progress("starting", 3, 4, "ranks"),
            )
        ),
        "starting",
        "Starting 4 ranks: 3 of 4 ready",
        "usually about 6 s",
        ("stop",),
    ),
    "loading": Phase(
        state(
            group(
                "loading",
                slots=[],
                progress=progress("loading", 415, 1000, "bytes", per_second=2.1 * GB, left=9.0),
            )
        ),
        "loading",
        re.compile(r"^Loading flux2-dev-bf16: 41\s?%$"),
        re.compile(r"^2\.1 GB/s, about 9 s left$"),
        ("stop",),
    ),
    "restoring": Phase(state(group("restoring")), "restoring", re.compile("^Restoring"), buttons=("stop",)),
    "encoding": Phase(state(group("encoding")), "encoding", "Encoding", buttons=("stop",)),
    "warming": Phase(
        state(
            group("sampling", warming=True, progress=progress("sampling", 0, 20, "steps")),
        ),
        "warming",
        "First step: warming up",
        "only the first time with this size",
        ("stop",),
    ),
    "sampling": Phase(
        state(sampling()),
        "sampling",
        "Sampling step 7 of 20",
        "1.42 s per step, about 18 s left",
        ("park", "stop"),
    ),
    "decoding": Phase(state(group("decoding")), "decoding", "Decoding", buttons=("stop",)),
    "cancelling": Phase(
        state(sampling(cancelling=True)), "cancelling", "Cancelling after step 7", "the ranks stay warm"
    ),
    "idle": Phase(
        state(group(idle=180.2)),
        "idle",
        "Ready",
        "4 ranks on GPU 0, 1, 2, 3; idle for 3 min",
        ("park", "stop"),
    ),
    "parked": Phase(
        state(
            group(
                "parked",
                parked_by="user",
                slots=[slot(state="parked", total_bytes=int(85.2 * GB), restore_seconds=8.2)],
            )
        ),
        "parked",
        "Parked in RAM (85.2 GB). The GPUs are free.",
        "back in about 8 s at the next run",
        ("restore", "stop"),
    ),
    "unloaded": Phase(
        state(group(parked_by="comfyui", slots=[])),
        "idle",
        "Parked by ComfyUI's Unload models.",
        buttons=("stop",),
    ),
    "stalled": Phase(
        state(
            sampling(
                stalled={
                    "rank": 1,
                    "kind": "silent",
                    "seconds": 12.0,
                    "limit": 30.0,
                    "doing": "sampling",
                    "done": 7,
                }
            )
        ),
        "stalled",
        "Rank 1 has not answered for 12 s. The run ends at 30 s.",
        re.compile("^last sign: .*7"),
        ("stop",),
    ),
    "failed": Phase(
        state(broken(), incidents=[incident()]),
        "failed",
        "Stopped: rank 2 (GPU 2) ran out of memory at step 7.",
        NEXT_RUN,
        ("incident", "copy-incident"),
    ),
    # The ranks have outlived it: the incident is newer than the last run's begin.
    "failed, ranks alive": Phase(
        state(group(idle=98.0), incidents=[incident()]),
        "failed",
        "Stopped: rank 2 (GPU 2) ran out of memory at step 7.",
        buttons=("park", "stop", "incident", "copy-incident"),
    ),
    "stopping": Phase(state(sampling(stopping=True)), "stopping", re.compile("^Stopping")),
    "mismatch": Phase(
        state(group(), api=2), "mismatch", "This page is older than the server part.", buttons=("reload",)
    ),
    "noserver": Phase(
        404, "noserver", 'The Sharded pack did not load in ComfyUI. Look for "Sharded" in its log.'
    ),
    "offline": Phase(None, "offline", re.compile(r"^ComfyUI does not answer\. Shown: the state of ")),
}
