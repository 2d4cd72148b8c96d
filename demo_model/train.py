"""Trains the demo model from scratch and writes it as a diffusers folder.

    python -m demo_model.train --out demo_model/shapes-flux

Three stages, each seeded on its own, so that one can be repeated without the others (`--stage`):

1. `text`: tokenizers with a few dozen words, and text encoders that learn to tell the scene from a sentence.
2. `vae`:  an autoencoder that learns to shrink the pictures eight times and to draw them again.
3. `flow`: the transformer, which learns by rectified flow to turn noise into latents of the scene asked for.
"""

import argparse
import copy
import functools
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import nn

from demo_model.pictures import (
    COLOURS,
    MILD,
    SHAPES,
    SIDE,
    WIDE,
    Scene,
    Variation,
    all_scenes,
    random_coverage,
)
from demo_model.text import (
    WIDTH,
    ReadPrompts,
    load_text_parts,
    read_all_sentences,
    save_text_parts,
    train_text_encoders,
)

# FLUX.1's own figures: what the transformer sees is (latent - SHIFT_FACTOR) * SCALING_FACTOR.
SCALING_FACTOR = 0.3611
SHIFT_FACTOR = 0.1159
LATENT_CHANNELS = 16

# The fixed linear map by which ComfyUI draws live previews of FLUX latents: one row per latent channel,
# giving red, green and blue in -1..1. From ComfyUI 0.3.75, comfy/latent_formats.py, class Flux.
PREVIEW_FACTORS = (
    (-0.0346, 0.0244, 0.0681),
    (0.0034, 0.0210, 0.0687),
    (0.0275, -0.0668, -0.0433),
    (-0.0174, 0.0160, 0.0617),
    (0.0859, 0.0721, 0.0329),
    (0.0004, 0.0383, 0.0115),
    (0.0405, 0.0861, 0.0915),
    (-0.0236, -0.0185, -0.0259),
    (-0.0245, 0.0250, 0.1180),
    (0.1008, 0.0755, -0.0421),
    (-0.0515, 0.0201, 0.0011),
    (0.0428, -0.0012, -0.0036),
    (0.0817, 0.0765, 0.0749),
    (-0.1264, -0.0522, -0.1103),
    (-0.0280, -0.0881, -0.0499),
    (-0.1262, -0.0982, -0.0778),
)
PREVIEW_BIAS = (-0.0329, -0.0718, -0.0851)


@dataclass(frozen=True)
class Recipe:
    """Every figure that decides what comes out of the training."""

    seed: int = 20
    masks_per_shape: int = 600

    text_steps: int = 600

    vae_channels: tuple[int, ...] = (8, 16, 32, 64)
    vae_crop_steps: int = 2200
    vae_crop: int = 48
    vae_whole_steps: int = 250
    vae_polish_steps: int = 600
    vae_polish_noise: float = 0.2
    vae_batch: int = 16
    vae_lr: float = 2e-3
    vae_preview_weight: float = 0.2
    vae_noise_weight: float = 1e-3

    heads: int = 4
    head_dim: int = 32
    double_blocks: int = 2
    single_blocks: int = 4
    rope_axes: tuple[int, int, int] = (8, 12, 12)
    flow_pictures: int = 5120
    flow_steps: int = 4400
    flow_batch: int = 24
    flow_lr: float = 1.5e-3
    flow_warm_up: int = 150
    flow_decay: int = 1000
    flow_average: float = 0.998


class Painter:
    """Makes batches of pictures quickly: outlines are drawn once, colours are filled in anew every time."""

    def __init__(self, masks_per_shape: int, variation: Variation, seed: int) -> None:
        rng = random.Random(seed)
        drawn = [[random_coverage(s, variation, rng) for _ in range(masks_per_shape)] for s in SHAPES]
        self._coverage = torch.stack([torch.stack([torch.from_numpy(c) for c in row]) for row in drawn])
        self._palette = torch.tensor(list(COLOURS.values()), dtype=torch.float32) / 127.5 - 1.0
        self._generator = torch.Generator().manual_seed(seed)

    def scenes(self, count: int) -> torch.Tensor:
        """Random scenes as rows of indices: colour, shape, background; the two colours always differ."""
        colour = self._random(len(COLOURS), count)
        background = (colour + 1 + self._random(len(COLOURS) - 1, count)) % len(COLOURS)
        return torch.stack([colour, self._random(len(SHAPES), count), background], dim=1)

    def paint(self, scenes: torch.Tensor) -> torch.Tensor:
        """Pictures of the scenes, (count, 3, side, side) with values -1..1."""
        colour, shape, background = scenes.unbind(dim=1)
        coverage = self._coverage[shape, self._random(self._coverage.shape[1], len(scenes))][:, None]
        front, back = (self._palette[c][:, :, None, None] for c in (colour, background))
        return coverage * front + (1.0 - coverage) * back

    def crop(self, pictures: torch.Tensor, side: int) -> torch.Tensor:
        """One window for the whole batch, placed at random but on the grid of the latents."""
        top, left = (8 * int(self._random((pictures.shape[-1] - side) // 8 + 1, 1)) for _ in range(2))
        return pictures[:, :, top : top + side, left : left + side]

    def _random(self, below: int, count: int) -> torch.Tensor:
        return torch.randint(below, (count,), generator=self._generator)


class Progress:
    """Prints now and then how far a stage has come, with the mean of what it measures since the last line."""

    def __init__(self, stage: str, steps: int, every: int = 100) -> None:
        self._stage, self._steps, self._every = stage, steps, every
        self._sums: dict[str, float] = {}
        self._start = time.monotonic()

    def note(self, step: int, **figures: float) -> None:
        """Add the figures of one step (counted from 0)."""
        for name, value in figures.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)
        done = step + 1
        if done % self._every and done != self._steps:
            return
        count = (done - 1) % self._every + 1
        text = "  ".join(f"{name} {total / count:.4f}" for name, total in self._sums.items())
        print(
            f"{self._stage} {done}/{self._steps}  {text}  {time.monotonic() - self._start:.0f} s", flush=True
        )
        self._sums.clear()


def warm_cosine(step: int, steps: int, warm_up: int) -> float:
    """The learning rate's course: up in a straight line, then down to nothing along a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def warm_plateau(step: int, steps: int, warm_up: int, decay: int) -> float:
    """Up in a straight line, level for most of the way, and down in a straight line at the end."""
    return min(1.0, (step + 1) / warm_up, (steps - step) / decay)


# --- the autoencoder ------------------------------------------------------------------------------


class Normaliser(nn.Module):
    """Keeps every latent channel at mean 0 and deviation 1, with nothing of its own to learn.

    Between encoder and decoder it makes the latents what FLUX's factors promise. Being a fixed scale and
    shift per channel, it can be folded into the encoder's last convolution when the training is over.
    """

    def __init__(self, channels: int, momentum: float = 0.02) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, x: torch.Tensor, learn: bool) -> torch.Tensor:
        """Normalise; with `learn`, by this batch's figures, which also move the running ones."""
        mean, variance = self.mean, self.variance
        if learn:
            variance, mean = torch.var_mean(x, dim=(0, 2, 3))
            self.mean.lerp_(mean.detach(), self.momentum)
            self.variance.lerp_(variance.detach(), self.momentum)
        shape = (1, -1, 1, 1)
        return (x - mean.view(shape)) / (variance.view(shape) + 1e-6).sqrt()

    @torch.no_grad()
    def fold_into(self, conv_out: nn.Conv2d) -> None:
        """Let the encoder's last convolution give latents that FLUX's two factors normalise."""
        channels = len(self.mean)
        scale = 1.0 / ((self.variance + 1e-6).sqrt() * SCALING_FACTOR)
        conv_out.weight[:channels] *= scale[:, None, None, None]
        conv_out.bias[:channels] = (conv_out.bias[:channels] - self.mean) * scale + SHIFT_FACTOR
        conv_out.bias[channels:] -= 2.0 * math.log(SCALING_FACTOR)


def new_vae(recipe: Recipe) -> AutoencoderKL:
    """An untrained autoencoder with FLUX's latent layout and far fewer channels inside."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=recipe.vae_channels,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=96,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=SCALING_FACTOR,
        shift_factor=SHIFT_FACTOR,
        force_upcast=False,
    )


def vae_losses(
    vae: AutoencoderKL, normaliser: Normaliser, pictures: torch.Tensor, learn: bool
) -> dict[str, torch.Tensor]:
    """How well pictures come back, how well the preview map fits, and how much noise the latents stand."""
    mean, log_variance = vae.encoder(pictures).chunk(2, dim=1)
    latents = normaliser(mean, learn)
    log_variance = log_variance.clamp(-12.0, 2.0)
    noisy = latents + torch.randn_like(latents) * (0.5 * log_variance).exp()
    again = vae.decoder(noisy / SCALING_FACTOR + SHIFT_FACTOR)
    preview = torch.einsum("bchw,cr->brhw", latents, torch.tensor(PREVIEW_FACTORS))
    preview = preview + torch.tensor(PREVIEW_BIAS)[:, None, None]
    return {
        "picture": (again - pictures).abs().mean(),
        "preview": F.mse_loss(preview, F.avg_pool2d(pictures, 8)),
        "noise": 0.5 * (log_variance.exp() - 1.0 - log_variance).mean(),
    }


def train_vae(recipe: Recipe, painter: Painter) -> AutoencoderKL:
    """Learn on windows first, which is cheap, then on whole pictures; freeze the normaliser near the end."""
    torch.manual_seed(recipe.seed + 1)
    vae, normaliser = new_vae(recipe), Normaliser(LATENT_CHANNELS)
    optimiser = torch.optim.AdamW(vae.parameters(), lr=recipe.vae_lr, betas=(0.9, 0.98), weight_decay=1e-3)
    steps = recipe.vae_crop_steps + recipe.vae_whole_steps
    course = functools.partial(warm_cosine, steps=steps, warm_up=50)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, course)
    frozen_from = steps - recipe.vae_whole_steps // 2
    progress = Progress("vae", steps)
    for step in range(steps):
        pictures = painter.paint(painter.scenes(recipe.vae_batch))
        if step < recipe.vae_crop_steps:
            pictures = painter.crop(pictures, recipe.vae_crop)
        losses = vae_losses(vae, normaliser, pictures, learn=step < frozen_from)
        loss = losses["picture"] + recipe.vae_preview_weight * losses["preview"]
        (loss + recipe.vae_noise_weight * losses["noise"]).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        schedule.step()
        progress.note(step, **{name: value.item() for name, value in losses.items()})
    normaliser.fold_into(vae.encoder.conv_out)
    return vae.eval()


def outline_weights(pictures: torch.Tensor) -> torch.Tensor:
    """Weights that make an error next to an outline count several times as much as one on plain ground."""
    padded = F.pad(pictures, (1, 1, 1, 1), mode="replicate")
    on_outline = (F.avg_pool2d(padded, 3, stride=1) - pictures).abs().amax(dim=1, keepdim=True) > 0.05
    return 1.0 + 4.0 * on_outline


def polish_decoder(recipe: Recipe, painter: Painter, vae: AutoencoderKL) -> None:
    """Let the decoder alone go on learning, from latents a little off, for crisp outlines."""
    torch.manual_seed(recipe.seed + 9)
    optimiser = torch.optim.AdamW(vae.decoder.parameters(), lr=recipe.vae_lr / 2, betas=(0.9, 0.98))
    course = functools.partial(warm_cosine, steps=recipe.vae_polish_steps, warm_up=20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, course)
    progress = Progress("vae polish", recipe.vae_polish_steps)
    for step in range(recipe.vae_polish_steps):
        pictures = painter.paint(painter.scenes(recipe.vae_batch // 2))
        with torch.no_grad():
            latents = vae.encode(pictures).latent_dist.mean
        noise = torch.randn_like(latents) * recipe.vae_polish_noise / SCALING_FACTOR
        errors = (vae.decoder(latents + noise) - pictures).abs()
        (errors * outline_weights(pictures)).mean().backward()
        nn.utils.clip_grad_norm_(vae.decoder.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        schedule.step()
        progress.note(step, picture=errors.mean().item())


# --- the transformer ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lessons:
    """What the transformer learns from: packed latents of pictures, and what each of them shows."""

    latents: torch.Tensor
    scene: torch.Tensor
    prompts: ReadPrompts


def new_transformer(recipe: Recipe) -> FluxTransformer2DModel:
    """An untrained FLUX.1 transformer, guidance input included, with a few thousandths of its weights."""
    return FluxTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=recipe.double_blocks,
        num_single_layers=recipe.single_blocks,
        attention_head_dim=recipe.head_dim,
        num_attention_heads=recipe.heads,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=recipe.rope_axes,
    )


def scene_numbers(rows: torch.Tensor) -> torch.Tensor:
    """The place in `all_scenes()` of scenes given as rows of indices."""
    place = {scene: index for index, scene in enumerate(all_scenes())}
    colours = list(COLOURS)
    return torch.tensor([place[Scene(colours[c], SHAPES[s], colours[b])] for c, s, b in rows.tolist()])


@torch.no_grad()
def prepare_lessons(recipe: Recipe, painter: Painter, vae: AutoencoderKL, prompts: ReadPrompts) -> Lessons:
    """Paint the pictures and encode them, once for the whole training."""
    rows = painter.scenes(recipe.flow_pictures)
    packed = []
    for part in rows.split(64):
        latents = (vae.encode(painter.paint(part)).latent_dist.mean - SHIFT_FACTOR) * SCALING_FACTOR
        packed.append(FluxPipeline._pack_latents(latents, *latents.shape))
    return Lessons(torch.cat(packed), scene_numbers(rows), prompts)


def noise_levels(count: int) -> torch.Tensor:
    """Logit-normal noise levels, one from each of `count` equal slices, so that no batch is lopsided."""
    quantiles = (torch.arange(count) + torch.rand(count)) / count
    return torch.sigmoid(1.2 * torch.special.ndtri(quantiles.clamp(1e-5, 1 - 1e-5)))


def flow_loss(model: FluxTransformer2DModel, lessons: Lessons, batch: int) -> torch.Tensor:
    """Rectified flow on a random batch: from a mixture of latent and noise, tell noise minus latent."""
    chosen = torch.randint(len(lessons.latents), (batch,))
    kind = torch.randint(lessons.prompts.pooled.shape[1], (batch,))
    clean, scene = lessons.latents[chosen], lessons.scene[chosen]
    noise, level = torch.randn_like(clean), noise_levels(batch)
    share = level[:, None, None]
    patches = SIDE // 16
    told = model(
        hidden_states=share * noise + (1.0 - share) * clean,
        encoder_hidden_states=lessons.prompts.tokens[scene, kind],
        pooled_projections=lessons.prompts.pooled[scene, kind],
        timestep=level,
        guidance=1.0 + 4.0 * torch.rand(batch),
        img_ids=FluxPipeline._prepare_latent_image_ids(batch, patches, patches, "cpu", clean.dtype),
        txt_ids=torch.zeros(lessons.prompts.tokens.shape[2], 3),
    ).sample
    return F.mse_loss(told, noise - clean)


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, step: int, keep: float) -> None:
    """Move the averaged weights towards the present ones, faster at the beginning."""
    keep = min(keep, (1 + step) / (10 + step))
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1.0 - keep)


def train_transformer(recipe: Recipe, lessons: Lessons) -> FluxTransformer2DModel:
    """Train and return the running average of the weights, which paints better than the last weights."""
    torch.manual_seed(recipe.seed + 2)
    model = new_transformer(recipe)
    average = copy.deepcopy(model).requires_grad_(False)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.flow_lr, betas=(0.9, 0.98), weight_decay=0.01)
    course = functools.partial(
        warm_plateau, steps=recipe.flow_steps, warm_up=recipe.flow_warm_up, decay=recipe.flow_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, course)
    progress = Progress("flow", recipe.flow_steps)
    for step in range(recipe.flow_steps):
        loss = flow_loss(model, lessons, recipe.flow_batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        schedule.step()
        follow(average, model, step, recipe.flow_average)
        progress.note(step, loss=loss.item())
    return average.eval()


# --- the stages -----------------------------------------------------------------------------------


def text_stage(recipe: Recipe, out: Path) -> None:
    """Write tokenizers and text encoders."""
    parts = train_text_encoders(recipe.seed, recipe.text_steps, Progress("text", recipe.text_steps).note)
    save_text_parts(parts, out)


def vae_stage(recipe: Recipe, out: Path) -> None:
    """Write the autoencoder, in half precision to keep the folder small."""
    vae = train_vae(recipe, Painter(recipe.masks_per_shape, WIDE, recipe.seed))
    polish_decoder(recipe, Painter(recipe.masks_per_shape, WIDE, recipe.seed + 9), vae)
    vae.half().save_pretrained(out / "vae")


def flow_stage(recipe: Recipe, out: Path) -> None:
    """Write the transformer and, from what the other stages wrote, the whole pipeline."""
    parts = load_text_parts(out)
    vae = AutoencoderKL.from_pretrained(out / "vae", torch_dtype=torch.float32).eval()
    prompts = read_all_sentences(parts, recipe.seed)
    lessons = prepare_lessons(recipe, Painter(recipe.masks_per_shape, MILD, recipe.seed + 2), vae, prompts)
    transformer = train_transformer(recipe, lessons)
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
        vae=vae.half(),
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        text_encoder_2=parts.text_encoder_2,
        tokenizer_2=parts.tokenizer_2,
        transformer=transformer.half(),
    )
    pipeline.save_pretrained(out)
    forget_origins(out)


def forget_origins(folder: Path) -> None:
    """Drop from every config the path it was once loaded from, which means nothing on another machine."""
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text())
        if config.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


STAGES = {"text": text_stage, "vae": vae_stage, "flow": flow_stage}


def main() -> None:
    """Run the stages asked for, one after the other; later stages read what earlier ones wrote."""
    parser = argparse.ArgumentParser(description="Train the demo model from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="the diffusers folder to write")
    parser.add_argument("--stage", choices=["all", *STAGES], default="all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = STAGES if arguments.stage == "all" else (arguments.stage,)
    for name in chosen:
        STAGES[name](Recipe(seed=arguments.seed), arguments.out)


if __name__ == "__main__":
    main()
