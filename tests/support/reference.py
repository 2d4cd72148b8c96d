"""One process, plain diffusers: what every layout is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch


@dataclass(frozen=True)
class Run:
    """One picture's settings."""

    prompt: str = "a red circle on blue"
    seed: int = 7
    steps: int = 8
    guidance: float = 3.5
    width: int = 96
    height: int = 96
    batch_size: int = 1


def reference_pipeline(folder: Path, dtype: torch.dtype = torch.float32) -> diffusers.FluxPipeline:
    pipeline = diffusers.FluxPipeline.from_pretrained(folder, dtype=dtype, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def reference_latents(pipeline: diffusers.FluxPipeline, run: Run) -> torch.Tensor:
    """Latents [B, C, h, w] in VAE space, by the pipeline's own call with one seeded CPU generator.

    Below fp32 the noise is drawn here: upstream draws it in the low dtype, which gives other numbers in some
    versions of torch (2.9), and ComfyUI always draws it in fp32.
    """
    generator = torch.Generator("cpu").manual_seed(run.seed)
    noise = None
    if pipeline.transformer.dtype != torch.float32:
        channels, factor = pipeline.transformer.config.in_channels // 4, pipeline.vae_scale_factor
        size = (run.batch_size, channels, run.height // factor, run.width // factor)
        noise = pipeline._pack_latents(torch.randn(size, generator=generator), *size)
        noise = noise.to(pipeline.transformer.dtype)
    packed = pipeline(
        run.prompt,
        num_images_per_prompt=run.batch_size,
        num_inference_steps=run.steps,
        guidance_scale=run.guidance,
        width=run.width,
        height=run.height,
        generator=generator,
        latents=noise,
        max_sequence_length=pipeline.tokenizer_2.model_max_length,
        output_type="latent",
    ).images
    latent = pipeline._unpack_latents(packed, run.height, run.width, pipeline.vae_scale_factor)
    return (latent / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor).float()


def max_rel(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|, the project's one measure of difference."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
