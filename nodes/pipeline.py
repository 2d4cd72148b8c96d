"""Encode, sample and decode for whole diffusers pipelines, on stock cables."""

from __future__ import annotations

import time
from typing import Any

import torch
from comfy_api.latest import io

from ..runtime import planner
from ..runtime.spec import Decode as DecodeRequest
from ..runtime.spec import Encode, Refusal, Sample, SlotInfo, readable_bytes
from . import comfy_host
from .cables import CATEGORY, INSTEAD, PipelineCable, ShardedPipeline, Way

_PIPELINE_TOOLTIP = "From Load Pipeline (Sharded)."
_KNOWN_CONDITIONING = {"pooled_output", "guidance"}


class EncodePrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ShardedEncodePrompt",
            display_name="Encode Prompt (Sharded Pipeline)",
            category=CATEGORY,
            description="Turns a prompt into CONDITIONING with the pipeline's own text encoders.",
            inputs=[
                PipelineCable.Input("pipeline", tooltip=_PIPELINE_TOOLTIP),
                io.String.Input(
                    "text",
                    multiline=True,
                    dynamic_prompts=True,
                    tooltip="What the picture should show, in words.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(
                    "CONDITIONING",
                    display_name="conditioning",
                    tooltip="For positive of Sample (Sharded Pipeline), or of a stock sampler.",
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, pipeline: ShardedPipeline, text: str) -> io.NodeOutput:
        progress = comfy_host.NodeProgress(cls.hidden.unique_id)
        pipeline.ensure(progress)
        progress.enter("encoding")
        start = time.monotonic()
        reply, way = pipeline.staged(
            lambda way: pipeline.slot.call(
                Encode(slot=pipeline.slot.name, prompt=text, on_host=way == "host"),
                cancelled=comfy_host.interrupted,
            ),
            ("", "host"),
        )
        comfy_host.say(cls.hidden.unique_id, f"Encoded in {time.monotonic() - start:.1f} s{_how(way)}")
        embeds, pooled = (reply.tensors[name].float() for name in ("prompt_embeds", "pooled"))
        return io.NodeOutput([[embeds, {"pooled_output": pooled}]])


class SamplePipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ShardedSample",
            display_name="Sample (Sharded Pipeline)",
            category=CATEGORY,
            description="Runs the pipeline's denoising loop on all ranks together.",
            inputs=[
                PipelineCable.Input("pipeline", tooltip=_PIPELINE_TOOLTIP),
                io.Conditioning.Input(
                    "positive",
                    tooltip="From Encode Prompt (Sharded Pipeline), or stock CLIP Text Encode for the same model.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="Decides the starting noise: the same seed gives the same noise in every layout.",
                ),
                io.Int.Input(
                    "steps",
                    default=20,
                    min=1,
                    max=10000,
                    tooltip="Denoising steps that are made: as many as the model needs; fewer are quicker.",
                ),
                io.Float.Input(
                    "guidance",
                    default=3.5,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="How closely a guidance-distilled model follows the prompt; a Flux Guidance node on "
                    "positive wins over it, models without guidance ignore it.",
                ),
                io.Int.Input(
                    "width",
                    default=1024,
                    min=16,
                    max=16384,
                    step=16,
                    tooltip="Pixels, a multiple of 16. A connected latent decides instead.",
                ),
                io.Int.Input(
                    "height",
                    default=1024,
                    min=16,
                    max=16384,
                    step=16,
                    tooltip="Pixels, a multiple of 16. A connected latent decides instead.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=64,
                    tooltip="Pictures at once; each takes memory. A connected latent decides instead.",
                ),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="1 starts from noise alone; less keeps that much of the connected latent.",
                ),
                io.Latent.Input(
                    "latent_image",
                    optional=True,
                    tooltip="Where to start from, and how large: stock latents fit.",
                ),
            ],
            outputs=[
                io.Latent.Output(
                    "LATENT",
                    display_name="latent",
                    tooltip="A stock latent of the model, for Decode (Sharded Pipeline).",
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        pipeline: ShardedPipeline,
        positive: list[Any],
        seed: int,
        steps: int,
        guidance: float,
        width: int,
        height: int,
        batch_size: int,
        denoise: float,
        latent_image: dict[str, Any] | None = None,
    ) -> io.NodeOutput:
        node_id = cls.hidden.unique_id
        progress = comfy_host.NodeProgress(node_id, comfy_host.flux_latent_format())
        info = pipeline.ensure(progress)
        tensors, set_guidance = _read_conditioning(positive, info)
        if latent_image is not None:
            latent = _read_latent(latent_image, info)
            batch_size, width, height = _size_of(latent, info)
            if denoise <= 0:
                return io.NodeOutput(latent_image)
            if denoise < 1:
                tensors["latent"] = latent
        elif denoise < 1:
            raise Refusal(
                f"denoise {denoise} has nothing to keep.",
                "Less than 1 keeps a part of the connected latent, and none is connected.",
                "Works here: denoise 1, or a latent on latent_image.",
            )
        planner.check_size(width, height, info.size_multiple)
        tokens = (width // info.size_multiple) * (height // info.size_multiple)
        planner.check_sequences(pipeline.slot.layout.spec, {"picture": tokens})

        def run() -> Any:
            if not pipeline.slot.loaded:  # in another layout now
                pipeline.ensure(progress)
            request = Sample(
                slot=pipeline.slot.name,
                seed=seed,
                steps=steps,
                guidance=guidance if set_guidance is None else set_guidance,
                width=width,
                height=height,
                batch_size=batch_size,
                denoise=denoise,
                preview=progress.wants_preview,
            )
            return pipeline.slot.call(request, tensors, report=progress.report, cancelled=cancelled)

        def cancelled() -> bool:
            if pipeline.slot.warming:
                progress.warm_up()
            return comfy_host.interrupted()

        start = time.monotonic()
        reply = pipeline.with_room(run)
        took, peak = time.monotonic() - start, pipeline.slot.peak
        most = f", peak {readable_bytes(peak)}" if peak else ""
        comfy_host.say(node_id, f"{steps} step{'s' if steps > 1 else ''} in {took:.1f} s{most}")
        return io.NodeOutput({"samples": reply.tensors["samples"]})


class Decode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ShardedDecode",
            display_name="Decode (Sharded Pipeline)",
            category=CATEGORY,
            description="Turns a latent into pictures with the pipeline's own VAE.",
            inputs=[
                PipelineCable.Input("pipeline", tooltip=_PIPELINE_TOOLTIP),
                io.Latent.Input(
                    "samples", tooltip="From Sample (Sharded Pipeline) or any stock latent of this model."
                ),
            ],
            outputs=[
                io.Image.Output(
                    "IMAGE",
                    display_name="image",
                    tooltip="The pictures, for every node that takes images.",
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, pipeline: ShardedPipeline, samples: dict[str, Any]) -> io.NodeOutput:
        progress = comfy_host.NodeProgress(cls.hidden.unique_id)
        info = pipeline.ensure(progress)
        latent = samples["samples"]
        _check_channels(latent, info)
        progress.enter("decoding")
        start = time.monotonic()
        reply, way = pipeline.staged(
            lambda way: pipeline.slot.call(
                DecodeRequest(slot=pipeline.slot.name, tiled=way == "tiles", on_host=way == "host"),
                {"samples": latent},
                report=progress.report,
                cancelled=comfy_host.interrupted,
            ),
            ("", "tiles", "host"),
        )
        images = reply.tensors["images"]
        count, height, width, _ = images.shape
        took = f"{time.monotonic() - start:.1f} s{_how(way)}"
        comfy_host.say(cls.hidden.unique_id, f"{count} of {width} x {height} pixels in {took}")
        return io.NodeOutput(images)


def _how(way: Way) -> str:
    """What a node says of a way that was not the first choice."""
    return f", {INSTEAD[way]}" if way else ""


def _read_conditioning(positive: list[Any], info: SlotInfo) -> tuple[dict[str, torch.Tensor], float | None]:
    """Text tensors of a CONDITIONING and the guidance it sets, if any. Refuses what would be dropped."""
    if len(positive) != 1:
        raise Refusal(
            f"The conditioning has {len(positive)} parts.",
            "A pipeline follows one prompt; combined conditionings would be dropped.",
            "Works instead: one Encode Prompt node, with all of it in the text.",
        )
    embeds, extras = positive[0]
    unknown = sorted(
        name for name, value in extras.items() if name not in _KNOWN_CONDITIONING and value is not None
    )
    if unknown:
        raise Refusal(
            f"The conditioning carries {', '.join(unknown)}.",
            "The pipeline has no place for that, and leaving it out would change the picture.",
            "Works here: a plain prompt, with Flux Guidance if you like.",
        )
    pooled = extras.get("pooled_output")
    for name, tensor, width in (
        ("text", embeds, info.text_width),
        ("pooled text", pooled, info.pooled_width),
    ):
        found = tensor.shape[-1] if tensor is not None else 0
        if found != width:
            raise Refusal(
                f"The {name} features are {found} wide; this model takes {width}.",
                "They come from the text encoders of another model.",
                "Works here: Encode Prompt (Sharded Pipeline) on the same pipeline.",
            )
    return {"prompt_embeds": embeds[:1], "pooled": pooled[:1]}, extras.get("guidance")


def _read_latent(latent_image: dict[str, Any], info: SlotInfo) -> torch.Tensor:
    if latent_image.get("noise_mask") is not None:
        raise Refusal(
            "The latent carries a mask.",
            "Inpainting is not built yet for whole pipelines, and without it the mask would be dropped.",
            "Works here: the latent without Set Latent Noise Mask.",
        )
    latent = comfy_host.fix_empty_latent(latent_image["samples"], info.latent_channels)
    _check_channels(latent, info)
    return latent


def _check_channels(latent: torch.Tensor, info: SlotInfo) -> None:
    if latent.ndim != 4 or latent.shape[1] != info.latent_channels:
        raise Refusal(
            f"The latent has {latent.shape[1]} channels and {latent.ndim - 2} dimensions.",
            f"This model's latents have {info.latent_channels} channels, height and width.",
            "Works here: a latent of the same kind of model, or an empty one.",
        )


def _size_of(latent: torch.Tensor, info: SlotInfo) -> tuple[int, int, int]:
    """Batch, width and height in pixels."""
    return latent.shape[0], latent.shape[3] * info.vae_factor, latent.shape[2] * info.vae_factor
