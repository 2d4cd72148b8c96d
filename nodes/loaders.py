"""The loaders: from a model's name to a slot on a group."""

from __future__ import annotations

from comfy_api.latest import io

from ..runtime import planner
from ..runtime.group import GROUPS
from ..runtime.spec import DTYPES, ParallelConfig, Refusal
from . import comfy_host
from .cables import CATEGORY, ParallelConfigCable, PipelineCable, ShardedPipeline


class LoadPipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ShardedLoadPipeline",
            display_name="Load Pipeline (Sharded)",
            category=CATEGORY,
            description="Loads a diffusers pipeline folder onto a group of ranks, divided as the Parallel Config says.",
            inputs=[
                io.Combo.Input(
                    "pipeline_name",
                    options=comfy_host.pipeline_folders(),
                    tooltip="A folder with a model_index.json in models/diffusers.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(DTYPES),
                    default="auto",
                    tooltip="Number format of the weights on the devices. auto keeps the one they are stored in; "
                    "choose another if the model or the cards need it.",
                ),
                ParallelConfigCable.Input(
                    "parallel_config",
                    optional=True,
                    tooltip="How to divide the model, from Parallel Config. Without it: auto on all devices.",
                ),
            ],
            outputs=[
                PipelineCable.Output(
                    "PIPELINE",
                    display_name="pipeline",
                    tooltip="The loaded pipeline, for the nodes that encode, sample and decode. It is no stock MODEL.",
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, pipeline_name: str | None = None, dtype: str | None = None) -> bool | str:
        return _in_lists(
            pipeline_name=(pipeline_name, comfy_host.pipeline_folders()), dtype=(dtype, list(DTYPES))
        )

    @classmethod
    def fingerprint_inputs(cls, pipeline_name: str | None = None, **_others: object) -> str:
        """A replaced model is loaded again, an unchanged one never is."""
        path = comfy_host.pipeline_path(pipeline_name) if pipeline_name else None
        return planner.model_version(path) if path else ""

    @classmethod
    def execute(
        cls, pipeline_name: str, dtype: str, parallel_config: ParallelConfig | None = None
    ) -> io.NodeOutput:
        path = comfy_host.pipeline_path(pipeline_name)
        if path is None:
            raise Refusal(
                f"There is no pipeline '{pipeline_name}'.",
                "Pipelines are folders with a model_index.json in ComfyUI's diffusers model folders.",
                f"There are: {', '.join(comfy_host.pipeline_folders()) or 'none'}.",
            )
        config = parallel_config or ParallelConfig()
        facts = planner.check_pipeline(path, config)
        layout = planner.plan(facts, config, dtype=dtype)
        comfy_host.refuse_unnamed_gpus(config, layout)
        wanted = planner.Wanted(facts=facts, config=config, dtype=dtype)
        pipeline = ShardedPipeline(GROUPS.slot(layout, planner.model_spec(facts, dtype, layout)), wanted)
        was_loaded = pipeline.slot.loaded
        info = pipeline.ensure(comfy_host.NodeProgress(cls.hidden.unique_id))
        pipeline.say_held(info, "already loaded" if was_loaded else f"loaded in {info.seconds:.1f} s")
        return io.NodeOutput(pipeline)


class LoadDiffusionModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ShardedLoadDiffusionModel",
            display_name="Load Diffusion Model (Sharded)",
            category=CATEGORY,
            description="A MODEL for every stock sampler whose denoiser runs on a group of ranks, divided as the "
            "Parallel Config says.",
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=comfy_host.denoisers(),
                    tooltip="A safetensors file in models/diffusion_models, or the transformer of a folder in "
                    "models/diffusers: FLUX.1, Qwen-Image or Wan.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=list(DTYPES),
                    default="auto",
                    tooltip="Number format of the weights on the devices. auto keeps the one they are stored in; "
                    "fp8 becomes bfloat16.",
                ),
                io.Boolean.Input(
                    "verify_first_step",
                    default=False,
                    tooltip="Also run the first step on one device, where the whole model fits, and stop if the "
                    "result differs by more than rounding. Once for a new model or layout: it reads all weights.",
                ),
                ParallelConfigCable.Input(
                    "parallel_config",
                    optional=True,
                    tooltip="How to divide the model, from Parallel Config. Without it: auto on all devices.",
                ),
            ],
            outputs=[
                io.Model.Output(
                    "MODEL",
                    display_name="model",
                    tooltip="A stock MODEL, for KSampler and everything else that takes one.",
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, model_name: str | None = None, dtype: str | None = None) -> bool | str:
        return _in_lists(model_name=(model_name, comfy_host.denoisers()), dtype=(dtype, list(DTYPES)))

    @classmethod
    def fingerprint_inputs(cls, model_name: str | None = None, **_others: object) -> str:
        """A replaced model is loaded again, an unchanged one never is."""
        path = comfy_host.denoiser_path(model_name) if model_name else None
        return planner.model_version(path) if path else ""

    @classmethod
    def execute(
        cls,
        model_name: str,
        dtype: str,
        verify_first_step: bool,
        parallel_config: ParallelConfig | None = None,
    ) -> io.NodeOutput:
        from .native.model import sharded_model  # with all families, which ComfyUI's start does not need

        path = comfy_host.denoiser_path(model_name)
        if path is None:
            raise Refusal(
                f"There is no diffusion model '{model_name}'.",
                "They are files in ComfyUI's diffusion_models folders and transformers of diffusers folders.",
                "Choose one from the list, and refresh it after adding files.",
            )
        node_id = cls.hidden.unique_id
        model, layout = sharded_model(
            path, parallel_config or ParallelConfig(), dtype, verify=verify_first_step, node_id=node_id
        )
        when = "already loaded" if model.slot.loaded else "loads when a sampler needs it"
        comfy_host.say(node_id, f"{layout.describe()}, {when}", layout.reason)
        return io.NodeOutput(model)


def _in_lists(**inputs: tuple[str | None, list[str]]) -> bool | str:
    """ComfyUI's own check of combos, which releases before 0.8 make for V1 nodes only."""
    for name, (value, options) in inputs.items():
        if value is not None and value not in options:
            return f"Value not in list: {name}: '{value}' not in {options}"
    return True
