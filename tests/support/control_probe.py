"""Park and Stop Group on two groups at once, through ComfyUI's own check and executor; prints what the nodes said.

Run as `python -m tests.support.control_probe <empty folder>`: a process can hold one ComfyUI only. The groups are mocks
of their ranks: everything is parked, and nothing runs.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.parity_native.host import Host

LATENT = {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}
CARDS = (0, 1), (5,)


def mock_group(host: Host, cards: tuple[int, ...]) -> Any:
    """A slot that is loaded on a group whose ranks are mocks."""
    spec, groups = host.pack("runtime.spec"), host.pack("runtime.group").GROUPS
    devices = tuple(spec.Device(kind="cpu", index=index) for index in cards)
    group = groups.group(devices)
    group._session = SimpleNamespace(dead=None, close=lambda: None)
    layout = spec.Layout(spec=spec.ParallelSpec(tensor=len(cards)), devices=devices, reason="")
    slot = groups.slot(layout, spec.ModelSpec(path=f"/models/on-{len(cards)}", pipeline_class="", dtype=""))
    group.layouts[slot.name], group.slots[slot.name] = layout, spec.SlotInfo(weight_bytes=1, seconds=0.1)
    group.state.starting()
    group.settle()

    def call(_request: Any, *, start: bool) -> dict[int, Any]:
        assert not start
        return {rank: SimpleNamespace(body=spec.Parked(in_host_memory=True)) for rank in range(len(cards))}

    group.call = call
    return slot


def source(kind: str, gives: Any) -> type:
    """A node that gives this object on a cable of this kind."""
    methods = {"INPUT_TYPES": classmethod(lambda _: {"required": {}}), "give": lambda _: (gives,)}
    return type(kind, (), {**methods, "RETURN_TYPES": (kind,), "FUNCTION": "give", "CATEGORY": "probe"})


def main() -> None:
    host = Host(Path(sys.argv[1]))
    groups = host.pack("runtime.group").GROUPS
    slots = [mock_group(host, cards) for cards in CARDS]
    said: list[str] = []
    host.server.send_progress_text = lambda text, *_: said.append(text)  # type: ignore[method-assign]
    host.add(
        {
            "Pipeline": source("SHARDED_PIPELINE", SimpleNamespace(slot=slots[1])),
            "Model": source("MODEL", SimpleNamespace(slot=slots[1])),
            "Guider": source("GUIDER", SimpleNamespace(model_patcher=SimpleNamespace(slot=slots[1]))),
            "StockModel": source("MODEL", SimpleNamespace()),
        }
    )

    def run(name: str, kind: str, connected: dict[str, Any] | None = None) -> None:
        """Note what the node says, and the phases after it."""
        inputs = {"anything": ["1", 0]} if connected else {}
        prompt: dict[str, Any] = {"2": {"class_type": kind, "inputs": inputs}}
        if connected:
            prompt["1"] = json.loads(json.dumps(connected))
        key = uuid.uuid4().hex
        checked = asyncio.run(importlib.import_module("execution").validate_prompt(key, prompt, None))
        assert checked[0], checked
        said.clear()
        host._executor.execute(prompt, key, {}, ["2"])
        assert host._executor.success, host._executor.status_messages
        results[name] = ["\n".join(said), *(group.phase for group in groups.groups())]

    results: dict[str, list[str]] = {}
    for kind in ("Pipeline", "Model", "Guider", "StockModel"):
        run(kind, "ShardedParkGroup", {"class_type": kind, "inputs": {}})
        for cards in CARDS:
            mock_group(host, cards)
    run("latent", "ShardedParkGroup", LATENT)
    run("again", "ShardedParkGroup", LATENT)
    run("stop", "ShardedStopGroup")
    run("nothing", "ShardedStopGroup")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
