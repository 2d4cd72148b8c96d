"""Nodes that give devices back in the middle or at the end of a workflow: they park or stop groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy_api.latest import io

from ..runtime.group import GROUPS, Slot, WorkerGroup
from ..runtime.spec import describe_devices, model_name
from . import comfy_host
from .cables import CATEGORY

_TOOLTIP = (
    "Anything: the node acts once it has arrived, and hands it on as it is. With a sharded MODEL or pipeline it acts "
    "on that model's group only, else on all groups."
)


class _GroupNode(io.ComfyNode):
    """What both nodes share: a cable that passes through, and that they act in every run."""

    @classmethod
    def fingerprint_inputs(cls, **_inputs: object) -> float:
        return float("nan")  # is equal to nothing, so that no earlier run counts for this one

    @classmethod
    def _on_groups(cls, anything: Any, act: Callable[[WorkerGroup], list[str]]) -> io.NodeOutput:
        with comfy_host.comfy_errors():
            lines = [line for group in _groups_of(anything) if group.alive for line in act(group)]
        comfy_host.say(cls.hidden.unique_id, *(lines or ["No group is running."]))
        return io.NodeOutput(anything)


def _schema(node_id: str, display_name: str, description: str) -> io.Schema:
    return io.Schema(
        node_id=node_id,
        display_name=display_name,
        category=CATEGORY,
        description=description,
        inputs=[io.AnyType.Input("anything", optional=True, tooltip=_TOOLTIP)],
        outputs=[io.AnyType.Output("ANYTHING", display_name="anything", tooltip="What came in, unchanged.")],
        hidden=[io.Hidden.unique_id],
        is_output_node=True,
        not_idempotent=True,
    )


class ParkGroup(_GroupNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "ShardedParkGroup",
            "Park Group (Sharded)",
            "Takes models off the cards of a group, into host RAM where that has room. The ranks stay, and the next "
            "use brings the models back.",
        )

    @classmethod
    def execute(cls, anything: Any = None) -> io.NodeOutput:
        return cls._on_groups(anything, _park)


class StopGroup(_GroupNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "ShardedStopGroup",
            "Stop Group (Sharded)",
            "Ends the ranks of a group: all of its memory is free at once. The next use starts the group and reads "
            "the models again.",
        )

    @classmethod
    def execute(cls, anything: Any = None) -> io.NodeOutput:
        GROUPS.retries.forget()  # whoever does something about it may try again what has failed
        return cls._on_groups(anything, _stop)


def _park(group: WorkerGroup) -> list[str]:
    parked = GROUPS.park(group)
    lines = [
        f"{model_name(name)}: {'parked in host RAM' if in_ram else 'no room in host RAM, will be read again'}"
        for name, in_ram in parked.items()
    ]
    return lines or [f"Nothing is loaded on {describe_devices(group.devices)}."]


def _stop(group: WorkerGroup) -> list[str]:
    count = len(group.devices)
    group.close("Stopped by Stop Group (Sharded).")
    return [f"Stopped {count} rank{'s' if count > 1 else ''} on {describe_devices(group.devices)}."]


def _groups_of(anything: Any) -> list[WorkerGroup]:
    """The group of a sharded MODEL, pipeline or guider; all groups for anything else."""
    slot = getattr(getattr(anything, "model_patcher", anything), "slot", None)  # a guider holds the MODEL
    if not isinstance(slot, Slot):
        return GROUPS.groups()
    group = GROUPS.find(slot.layout.devices)
    return [] if group is None else [group]
