"""ComfyUI in this process, with the pack loaded as ComfyUI loads a custom node, and its own executor.

Only the server object is a stand-in: nothing listens, and what would be sent to a browser is dropped.
"""

from __future__ import annotations

import asyncio
import collections
import importlib
import logging
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from aiohttp import web

from tests.parity_native.graphs import Link, defaults, flat, node
from tools import comfy_source
from tools.base_directory import BaseDirectory

PACK_FOLDER = "comfyui-sharded"
Prompt = dict[str, dict[str, Any]]


class StandInServer:
    """What the executor and nodes ask of ComfyUI's PromptServer."""

    def __init__(self) -> None:
        self.routes = web.RouteTableDef()
        self.client_id: str | None = None
        self.last_node_id: str | None = None
        self.last_prompt_id: str | None = None
        self.sockets_metadata: dict[str, Any] = {}
        self.loop = asyncio.new_event_loop()
        self.loop.close()  # as at a server's end: nobody hears an event

    def send_sync(self, *_: Any, **__: Any) -> None:
        pass

    def send_progress_text(self, *_: Any, **__: Any) -> None:
        pass

    def add_on_prompt_handler(self, *_: Any) -> None:
        pass


class GraphFailed(Exception):
    """A node raised. `kind` is the exception's full name, the message its own."""

    def __init__(self, node_type: str, kind: str, message: str):
        super().__init__(f"{node_type}: {message.strip()}")
        self.kind = kind
        self.message = message.strip()

    @property
    def refused(self) -> bool:
        return self.kind.rpartition(".")[2] == "Refusal"


class Host:
    """One ComfyUI. `base` is the folder for its models/ and custom_nodes/."""

    def __init__(self, base: Path):
        pack = BaseDirectory.create(base, pack_folder=PACK_FOLDER, pipelines={}).path
        self._pack = str(pack / "custom_nodes" / PACK_FOLDER).replace(".", "_x_")
        self.results: dict[str, torch.Tensor] = {}
        _import_comfyui(base)
        _module("comfy.utils").set_progress_bar_enabled(False)
        self.server = StandInServer()
        _module("server").PromptServer.instance = self.server
        self._nodes = _module("nodes")
        self._execution = _module("execution")
        asyncio.run(self._nodes.init_extra_nodes(init_custom_nodes=True, init_api_nodes=False))
        if self._pack not in sys.modules:
            raise RuntimeError("ComfyUI did not load the pack: what it said is above")
        self.reset()

    def add(self, classes: Mapping[str, type]) -> None:
        """Register nodes as a custom node pack would."""
        self._nodes.NODE_CLASS_MAPPINGS.update(classes)

    def pack(self, name: str) -> ModuleType:
        """A module of the pack as ComfyUI has it: `pack("runtime.spec")`."""
        return _module(f"{self._pack}.{name}")

    def reset(self) -> None:
        """Forget every cached output, as ComfyUI's `/free` does."""
        # Each release has limits of its own for its caches; 0 is none everywhere.
        limits: dict[str, int] = collections.defaultdict(int)
        self._executor = self._execution.PromptExecutor(
            self.server, cache_type=self._execution.CacheType.CLASSIC, cache_args=limits
        )

    def run(self, samples: Link, seed: int) -> torch.Tensor:
        """Execute a graph that ends in a LATENT; its tensor. Raises GraphFailed."""
        key = uuid.uuid4().hex
        sink = node("ParityResult", samples=samples, key=key)
        prompt = self._with_defaults(flat(sink, seed=seed))
        self._executor.execute(prompt, key, {}, [str(len(prompt) - 1)])
        if not self._executor.success:
            raise _failure(self._executor.status_messages)
        return self.results.pop(key).clone()

    def keep(self, key: str, samples: torch.Tensor) -> None:
        self.results[key] = samples

    def _with_defaults(self, prompt: Prompt) -> Prompt:
        for one in prompt.values():
            declared = self._nodes.NODE_CLASS_MAPPINGS[one["class_type"]].INPUT_TYPES().get("required", {})
            one["inputs"] = {**defaults(declared), **one["inputs"]}
        return prompt


def _module(name: str) -> ModuleType:
    """ComfyUI's `nodes` and `server` are found only once its folder leads the path."""
    return importlib.import_module(name)


def _import_comfyui(base: Path) -> None:
    tree = comfy_source.obtain()
    sys.path.insert(0, str(tree))
    if "nodes" in sys.modules:
        raise RuntimeError("something imported `nodes` before ComfyUI's folder led the path")
    options = ("--cpu", "--base-directory", str(base), "--use-pytorch-cross-attention")
    own, sys.argv = sys.argv, ["main.py", *options, "--disable-api-nodes"]
    try:
        _module("comfy.options").enable_args_parsing()
        # In main.py's order: `nodes` puts a folder in front that has a utils of its own.
        for name in ("comfy.cli_args", "utils.extra_config", "execution", "server", "nodes"):
            _module(name)
    finally:
        sys.argv = own
    logging.getLogger().setLevel(logging.ERROR)


def _failure(messages: list[tuple[str, dict[str, Any]]]) -> GraphFailed:
    for event, data in messages:
        if event == "execution_error":
            return GraphFailed(data["node_type"], data["exception_type"], data["exception_message"])
    return GraphFailed("graph", "", f"it ended without a result: {[event for event, _ in messages]}")
