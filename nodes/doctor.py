"""The node that examines the machine: what it has and whether groups work on it, for a person or a bug report."""

from __future__ import annotations

from comfy_api.latest import io, ui

from ..runtime import planner
from . import comfy_host
from .cables import CATEGORY

_ROOM = 2 << 30  # bytes on ComfyUI's own card, which a rank may take


class Doctor(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ShardedDoctor",
            display_name="Doctor (Sharded)",
            category=CATEGORY,
            description="Examines this machine: cards and their links, a group of its own, the exchanges between its "
            "ranks, and the demo model in several layouts. The report holds no private data.",
            inputs=[
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip="auto (all cards that no group uses), cpu, or physical cards in PCI order such as 0,1,3: "
                    "name them to leave a card alone.",
                ),
            ],
            outputs=[
                io.String.Output(
                    "REPORT",
                    display_name="report",
                    tooltip="The whole report. It holds no private data: paste it into a bug report as it is.",
                )
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_inputs: object) -> float:
        return float("nan")  # is equal to nothing, so that no earlier run counts for this one

    @classmethod
    def execute(cls, devices: str) -> io.NodeOutput:
        node_id = cls.hidden.unique_id
        planner.check_devices(devices)
        if comfy_host.main_device().type != "cpu":
            # Only what is stock has to go: a sharded model's group is left as it is.
            comfy_host.make_room([(comfy_host.main_device(), _ROOM)], lambda one: hasattr(one, "slot"))
        with comfy_host.comfy_errors():
            examined = planner.examine_machine(
                devices, comfy_host.version(), comfy_host.NodeProgress(node_id).report, comfy_host.interrupted
            )
        comfy_host.say(node_id, examined.verdict)
        # Where it is shown and pasted, Markdown would make paragraphs of its columns.
        report = f"```text\n{examined.report.strip()}\n```"
        return io.NodeOutput(report, ui=ui.PreviewText(report))
