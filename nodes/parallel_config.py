"""Parallel Config and its siblings: how a model is divided over devices."""

from __future__ import annotations

import msgspec
from comfy_api.latest import io

from ..runtime import planner
from ..runtime.spec import ATTENTION_BACKENDS, AXES, STRATEGIES, ParallelConfig, ParallelSpec, Refusal
from .cables import CATEGORY, ParallelConfigCable

_AXIS_TOOLTIPS = {
    "tensor": "manual only: over how many devices each weight matrix is divided. For a model that does not fit one "
    "card.",
    "ulysses": "manual only: over how many devices the sequence is divided, and the heads in attention. For shorter "
    "steps, where the model fits each card.",
    "ring": "manual only: divides the sequence too, keys and values go round. For more devices than heads, or long "
    "sequences over slow links. With ulysses: over ring x ulysses devices.",
    "stage": "manual only: consecutive layers per device. Not built yet: leave at 1.",
    "replica": "manual only: copies of the model that share the calls of a step: CFG's two, or a batch. For a model "
    "that fits each card.",
}
# The pack's own plan for FLUX.1, written out: diffusers' plan for it, and the modulation layers.
_FLUX_PLAN = """\
{
  "transformer_blocks.*.attn.to_q": "colwise",
  "transformer_blocks.*.attn.to_k": "colwise",
  "transformer_blocks.*.attn.to_v": "colwise",
  "transformer_blocks.*.attn.to_out.0": "rowwise",
  "transformer_blocks.*.attn.add_q_proj": "colwise",
  "transformer_blocks.*.attn.add_k_proj": "colwise",
  "transformer_blocks.*.attn.add_v_proj": "colwise",
  "transformer_blocks.*.attn.to_add_out": "rowwise",
  "transformer_blocks.*.ff.net.0.proj": "colwise",
  "transformer_blocks.*.ff.net.2": "rowwise",
  "transformer_blocks.*.ff_context.net.0.proj": "colwise",
  "transformer_blocks.*.ff_context.net.2": "rowwise",
  "transformer_blocks.*.norm1.linear": "colwise_gathered",
  "transformer_blocks.*.norm1_context.linear": "colwise_gathered",
  "single_transformer_blocks.*.attn.to_q": "colwise",
  "single_transformer_blocks.*.attn.to_k": "colwise",
  "single_transformer_blocks.*.attn.to_v": "colwise",
  "single_transformer_blocks.*.proj_mlp": "colwise",
  "single_transformer_blocks.*.proj_out": {"packed_rowwise": [1, 4]},
  "single_transformer_blocks.*.norm.linear": "colwise_gathered"
}"""


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
                    tooltip="Who chooses the layout. auto and the prefer strategies adapt to any machine; manual uses "
                    "the degrees below.",
                ),
                *(
                    io.Int.Input(axis, default=1, min=1, max=64, tooltip=_AXIS_TOOLTIPS[axis])
                    for axis in ("tensor", "ulysses", "ring", "stage", "replica")
                ),
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip="auto, cpu, or physical cards in PCI order, such as 0,1,3: name them to keep a card free.",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(ATTENTION_BACKENDS),
                    default="auto",
                    tooltip="Attention kernels, best left at auto. auto and native are PyTorch's own choice, cudnn is "
                    "one of its kernels. "
                    "flash and sage need their package and take no masks; sage computes in 8 bits.",
                ),
            ],
            outputs=[
                ParallelConfigCable.Output(
                    "PARALLEL_CONFIG",
                    display_name="parallel_config",
                    tooltip="For a sharded loader, or for a Tensor Plan.",
                )
            ],
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


class TensorPlanNode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ShardedTensorPlan",
            display_name="Tensor Plan (Sharded)",
            category=CATEGORY,
            description="Your own tensor plan instead of the pack's: which layers of a model are divided, and how.",
            inputs=[
                io.String.Input(
                    "plan",
                    default=_FLUX_PLAN,
                    multiline=True,
                    dynamic_prompts=False,  # they would take the braces for a choice
                    tooltip="JSON: module path -> style. One * stands for every element of a list. What is not named "
                    "stays whole on every rank.",
                ),
                ParallelConfigCable.Input(
                    "parallel_config",
                    optional=True,
                    tooltip="The config that the plan is added to. Without it: auto on all devices.",
                ),
            ],
            outputs=[
                ParallelConfigCable.Output(
                    "PARALLEL_CONFIG",
                    display_name="parallel_config",
                    tooltip="The same config with the plan, for a sharded loader.",
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, plan: str | None = None) -> bool | str:
        """Refuse a malformed plan before the queue; whether it suits the model, the loader finds out."""
        try:
            if plan is not None:
                planner.check_tensor_plan(plan)
        except Refusal as refusal:
            return str(refusal)
        return True

    @classmethod
    def execute(cls, plan: str, parallel_config: ParallelConfig | None = None) -> io.NodeOutput:
        planner.check_tensor_plan(plan)
        return io.NodeOutput(msgspec.structs.replace(parallel_config or ParallelConfig(), tensor_plan=plan))
