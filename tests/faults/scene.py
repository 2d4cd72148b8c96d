"""The stage of the fault suite: a ComfyUI server with faulty ranks, its undisturbed picture, and what it holds.

Temporary files of the server and its ranks go into a folder of their own, so that whatever is left there is theirs.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy
import psutil
from PIL import Image

from tests.faults import control
from tests.support import group_routes
from tests.support.processes import wait_until
from tests.support.workflows import pipeline_prompt
from tools import ROOT, loopback
from tools.base_directory import BaseDirectory
from tools.client import ComfyClient, Run, Workflow
from tools.comfy import Server

LAYOUT: dict[str, Any] = {"tensor": 2}
SETTLE_SECONDS = 5.0  # in which whatever a failure leaves has to be gone
# ComfyUI's pool of threads for files grows to its size one by one; a thread left by every failure passes this soon.
SLACK = {"threads": 6}
STAGE_NODES = {"encoding": "encode", "sampling": "sample", "decoding": "decode"}


class Scene:
    """A running server, its client and the folder through which ranks are told to fail."""

    def __init__(self, server: Server, client: ComfyClient, orders: Path, temporary: Path):
        self.server, self.client = server, client
        self.orders, self.temporary = orders, temporary
        self._numbers = itertools.count()
        self._unique = uuid.uuid4().hex[:8]

    # ---- prompts

    def fresh(self, **inputs: Any) -> Workflow:
        """A prompt of which nothing but the loader is in the server's cache."""
        number = next(self._numbers)
        prompt = pipeline_prompt(
            **{**LAYOUT, "text": f"a green square {self._unique} {number}", "seed": 1000 + number, **inputs}
        )
        prompt["save"]["inputs"]["filename_prefix"] = f"fresh_{number}"
        return prompt

    def undisturbed(self) -> Workflow:
        """Always the same prompt; after any other one the server computes it anew."""
        prompt = pipeline_prompt(**LAYOUT, text="a red circle on blue", seed=7)
        prompt["save"]["inputs"]["filename_prefix"] = f"undisturbed_{next(self._numbers)}"
        return prompt

    def picture(self, run: Run) -> bytes:
        (saved,) = run.images
        data = self.client.get_image(saved.filename, saved.subfolder, saved.type)
        return numpy.asarray(Image.open(io.BytesIO(data)).convert("RGB")).tobytes()

    # ---- the group

    def ranks(self) -> list[dict[str, Any]]:
        return group_routes.ranks(self.client)

    def pids(self) -> list[int]:
        return group_routes.pids(self.client)

    def loaded(self) -> bool:
        return any(slot["state"] == "loaded" for slot in group_routes.slots(self.client))

    def unload(self) -> None:
        def freed() -> bool:
            # Asked again and again: ComfyUI 0.3.75 misses it while it collects garbage between two prompts.
            self.client.free()
            return not self.loaded()

        wait_until(freed, 20, "the slots to be empty", 1.0)

    def end_group(self) -> None:
        """The group is down when this returns, as after a crash."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        wait_until(lambda: not any(rank["state"] == "ready" for rank in self.ranks()), 20, "the group's end")

    # ---- what there is

    def holds(self) -> Counter[str]:
        """Processes, descriptors, mappings, threads and temporary files of the server, by kind."""
        host = psutil.Process(self.server.pid)
        found: Counter[str] = Counter()
        found["processes"] = len(self.server.offspring())
        found["threads"] = host.num_threads()
        for number in os.listdir(f"/proc/{host.pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{host.pid}/fd/{number}")
                found[f"descriptor {_kind(target)}"] += 1
        maps = Path(f"/proc/{host.pid}/maps").read_text()
        found["mapped segments"] = maps.count("memfd:sharded-")
        found["/dev/shm"] = len(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else 0
        found["temporary files"] = sum(1 for path in self.temporary.rglob("*") if path.is_file())
        found["group directories"] = sum(1 for _ in self.temporary.glob("comfyui-sharded-*"))
        return found

    def more_than(self, before: Counter[str]) -> str:
        """What there is more than before, once it had time to go; "" for nothing."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while more := {
            name: f"{before[name]} -> {n}"
            for name, n in self.holds().items()
            if n > before[name] + SLACK.get(name, 0)
        }:
            if time.monotonic() > deadline:
                return ", ".join(f"{name} {change}" for name, change in more.items())
            time.sleep(0.1)
        return ""


def _kind(target: str) -> str:
    """A descriptor's target without what is another each time."""
    if target.startswith("/memfd:"):
        return "memfd"
    if "comfyui-sharded-" in target:
        name = Path(target).name
        return f"group's {'directory' if name.startswith('comfyui-sharded-') else name}"
    return target.partition("[")[0] if "[" in target else target


@contextmanager
def folder() -> Iterator[Path]:
    """Where one or several scenes keep their files."""
    place = Path(tempfile.mkdtemp(prefix="sf-", dir="/tmp"))  # short: a socket's path has 107 bytes
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def served(place: Path, name: str = "one", *, faulty: bool = True) -> Iterator[Scene]:
    """A server with the base directory and the orders called `name` in `place`; with `faulty` its ranks obey orders."""
    orders = place / f"{name}-orders"
    for path in (place / "t", orders):
        path.mkdir(exist_ok=True)
    packs = {"faults": ROOT / "tests" / "faults" / "pack"} if faulty else {}
    base = BaseDirectory.create(place / name, packs=packs)
    # The runtime directory of the user's session would be chosen before the temporary one.
    variables = {"TMPDIR": str(place / "t"), "XDG_RUNTIME_DIR": "", control.VARIABLE: str(orders)}
    with Server(base, environment=variables) as server, ComfyClient(server.url) as client:
        if faulty:
            answer = loopback.request(f"{server.url}/faults/worker/tests.faults.rank", {})
            assert json.loads(answer)["changed"] == 1, answer
        yield Scene(server, client, orders, place / "t")


@contextmanager
def scene(*, faulty: bool = True) -> Iterator[Scene]:
    with folder() as place, served(place, faulty=faulty) as on:
        yield on
