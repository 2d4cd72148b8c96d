"""Pipeline folders made by the tests: FLUX.1's architecture with fresh random weights, at any size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch

from demo_model.text import WIDTH, new_text_parts

DEMO = Path(__file__).resolve().parents[2] / "demo_model" / "shapes-flux"


@dataclass(frozen=True)
class FluxSize:
    """The shape of a random Flux pipeline. `axes` are the rotary widths of one head; they sum to its size."""

    heads: int = 4
    head_width: int = 16
    double_blocks: int = 2
    single_blocks: int = 2
    latent_channels: int = 4
    axes: tuple[int, int, int] = (4, 6, 6)
    guidance: bool = True


def make_flux(
    folder: Path,
    seed: int = 0,
    size: FluxSize | None = None,
    dtype: torch.dtype = torch.float32,
    vae_widths: tuple[int, int, int, int] = (8, 8, 8, 8),
) -> Path:
    """Write a FluxPipeline folder and return it. Weights come in several files where one would pass 512 MB.

    FLUX.1's own VAE has 16 latent channels and the widths 128, 256, 512, 512.
    """
    size = size or FluxSize()
    torch.manual_seed(seed)
    text = new_text_parts()
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=4 * size.latent_channels,
        num_layers=size.double_blocks,
        num_single_layers=size.single_blocks,
        attention_head_dim=size.head_width,
        num_attention_heads=size.heads,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=size.guidance,
        axes_dims_rope=size.axes,
    )
    is_full = vae_widths[0] >= 32
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=vae_widths,
        layers_per_block=2 if is_full else 1,
        norm_num_groups=32 if is_full else 4,
        latent_channels=size.latent_channels,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=is_full,
    )
    for module in (transformer, vae, text.text_encoder, text.text_encoder_2):
        randomise(module)
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=text.text_encoder,
        tokenizer=text.tokenizer,
        text_encoder_2=text.text_encoder_2,
        tokenizer_2=text.tokenizer_2,
        transformer=transformer,
    )
    pipeline.to(dtype=dtype)
    pipeline.save_pretrained(folder, safe_serialization=True, max_shard_size="512MB")
    return folder


def large_flux(double_blocks: int, single_blocks: int) -> diffusers.FluxTransformer2DModel:
    """A FLUX-shaped transformer in bf16, 16 heads of 128, some 130 MB a single and 300 MB a double block.

    Distinct numbers at the speed of a copy: drawing billions of normals would take longer than what uses them.
    """
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(
            num_layers=double_blocks,
            num_single_layers=single_blocks,
            num_attention_heads=16,
            attention_head_dim=128,
        )
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.view(torch.int16).flatten().copy_(torch.arange(parameter.numel()).remainder_(15000))
    return model


@torch.no_grad()
def randomise(module: torch.nn.Module) -> None:
    """Give every parameter a value of its own: zeros and ones would hide a shard in the wrong place."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            fan_in = parameter[0].numel()
            parameter.normal_(0, fan_in**-0.5)
        elif "norm" in name and name.endswith("weight"):
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 0.1)
