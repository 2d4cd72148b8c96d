"""The graphs of tests/parity_native on a real server: queued over its API, their latents read back from its files."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any

from tests.parity_native.graphs import Link, Node, Setup, defaults, flat, node
from tests.support import group_routes
from tests.support.workflows import DEGREES
from tools import latents
from tools.client import ComfyClient, Run, Workflow
from tools.comfy import Server


def sharded(checkpoint: str, model_name: str = "", dtype: str = "float32", **config: Any) -> Node:
    """The MODEL of Load Diffusion Model (Sharded) for a checkpoint, or another entry of the node's list, on CPU ranks.

    `config` are inputs of Parallel Config: the degrees that are not 1, and whatever else shall differ.
    """
    plain = {"strategy": "manual", "devices": "cpu", "attention": "auto", **DEGREES}
    return node(
        "ShardedLoadDiffusionModel",
        model_name=model_name or f"{checkpoint}.safetensors",
        dtype=dtype,
        verify_first_step=False,
        parallel_config=node("ShardedParallelConfig", **{**plain, **config}),
    )


def fresh(setup: Setup) -> Setup:
    """The same run, in which nothing that an earlier one has computed is taken from the server's cache."""
    return replace(setup, latent=node("ParityFresh", samples=setup.latent, key=uuid.uuid4().hex))


@dataclass(frozen=True)
class Done:
    """A run, and the latent of each of its results in their order."""

    run: Run
    latents: list[Any]


class Graphs:
    """Runs graphs on a server and looks at its groups."""

    def __init__(self, server: Server, client: ComfyClient):
        self.server, self.client = server, client

    def prompt(self, *results: Link, seed: int = 0) -> Workflow:
        """One workflow in API format that saves each of `results`, which are LATENTs."""
        return self.workflow(
            *(
                node("SaveLatent", samples=one, filename_prefix=f"latents/{place}")
                for place, one in enumerate(results)
            ),
            seed=seed,
        )

    def workflow(self, *last: Node, seed: int = 0) -> Workflow:
        """The workflow in API format that ends in these nodes."""
        prompt = flat(*last, seed=seed)
        for one in prompt.values():
            one["inputs"] = self._complete(one["class_type"], one["inputs"])
        return prompt

    def queue(self, *results: Link, seed: int = 0) -> str:
        return self.client.queue(self.prompt(*results, seed=seed))

    def run(self, *results: Link, seed: int = 0, timeout: float = 120.0) -> Done:
        return self.wait(self.queue(*results, seed=seed), timeout)

    def wait(self, prompt_id: str, timeout: float = 120.0) -> Done:
        run = self.client.wait(prompt_id, timeout)
        saved = [output["latents"] for output in run.outputs.values() if "latents" in output]
        files = sorted((one for (one,) in saved), key=lambda one: int(one["filename"].partition("_")[0]))
        return Done(run, [latents.read(one, self.server.base.output) for one in files])

    def ranks(self) -> list[int]:
        """Their process ids."""
        return group_routes.pids(self.client)

    def rank_states(self) -> list[str]:
        return [rank["state"] for rank in group_routes.ranks(self.client)]

    def slots(self) -> dict[str, dict[str, Any]]:
        """What the groups hold, by the name of the model's file or folder."""
        return {
            slot["name"].rpartition("-")[0].removesuffix(".safetensors"): slot
            for slot in group_routes.slots(self.client)
        }

    def said(self, since: float) -> list[str]:
        """The texts on nodes since that moment (time.monotonic())."""
        return [e.data["text"] for e in self.client.events if e.kind == "text" and e.at >= since]

    def loads(self, since: float) -> list[str]:
        """What nodes have said of loads since that moment."""
        return [text for text in self.said(since) if "loaded in" in text]

    def _complete(self, kind: str, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs with the defaults of all others; lists are told apart from links."""
        declared = self.client.object_info(kind).get("input", {}).get("required", {})
        return {name: _plain(value) for name, value in {**defaults(declared), **inputs}.items()}


def _plain(value: Any) -> Any:
    is_list = isinstance(value, list) and not (value and isinstance(value[0], str))
    return {"__value__": value} if is_list else value
