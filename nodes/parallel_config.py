"""Parallel Config: how a model is divided over devices."""

from __future__ import annotations

from comfy_api.latest import io

from ..runtime import planner
from ..runtime.spec import ATTENTION_BACKENDS, AXES, STRATEGIES, ParallelConfig, ParallelSpec, Refusal
from .cables import CATEGORY, ParallelConfigCable

_AXIS_TOOLTIPS = {
    "tensor": "manual only: over how many devices each weight matrix is divided. Saves weight memory.",
    "ulysses": "manual only: over how many devices the sequence is divided; attention swaps heads. Faster steps.",
    "ring": "manual only: ring attention. Not built yet: leave at 1.",
    "stage": "manual only: consecutive layers per device. Not built yet: leave at 1.",
    "replica": "manual only: full copies of the model. Not built yet: leave at 1.",
}


class ParallelConfigNode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ShardedParallelConfig",
            display_name="Parallel Config",
            category=CATEGORY,
            description="How a model is divided over the devices of this machine. Connect it to a sharded loader.",
            inputs=[
                io.Combo.Input(
                    "strategy",
                    options=list(STRATEGIES),
                    default="auto",
                    tooltip="auto and the prefer strategies adapt to any machine; manual uses the degrees below.",
                ),
                *(
                    io.Int.Input(axis, default=1, min=1, max=64, tooltip=_AXIS_TOOLTIPS[axis])
                    for axis in ("tensor", "ulysses", "ring", "stage", "replica")
                ),
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip="auto, cpu, or physical cards in PCI order, such as 0,1,3.",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(ATTENTION_BACKENDS),
                    default="auto",
                    tooltip="Attention kernels. auto and native are PyTorch's own; the others are not built yet.",
                ),
            ],
            outputs=[ParallelConfigCable.Output("PARALLEL_CONFIG", display_name="parallel_config")],
        )

    @classmethod
    def validate_inputs(cls, devices: str | None = None) -> bool | str:
        """Refuse devices before the queue. One input only: ComfyUI repeats a refusal for every input named here."""
        try:
            if devices is not None:
                planner.check_devices(devices)
        except Refusal as refusal:
            return str(refusal)
        return True

    @classmethod
    def execute(cls, strategy: str, devices: str, attention: str, **degrees: int) -> io.NodeOutput:
        spec = ParallelSpec(**{axis: degrees[axis] for axis in AXES})  # type: ignore[arg-type]
        config = ParallelConfig(strategy=strategy, degrees=spec, devices=devices, attention=attention)
        planner.check_config(config)
        return io.NodeOutput(config)
