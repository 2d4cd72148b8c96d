"""The arithmetic around upstream's loop is upstream's own: schedule, packing, previews, and what a folder holds."""

from __future__ import annotations

import inspect
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import diffusers
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from runtime.engine.loading import empty_model
from runtime.engine.pipelines import _between_tensors, pack, predicted_clean, schedule, unpack
from runtime.engine.plans import tensor_plan
from runtime.folder import ALLOWED, inspect_pipeline
from runtime.spec import Cancelled, ModelFacts
from tests.support.models import FluxSize, make_flux
from tests.support.threads import one_torch_thread

STEPS = (1, 2, 3, 8, 20, 28, 50)


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread():
        yield


# ---- load


def test_an_encoder_that_is_being_loaded_can_be_stopped_between_two_tensors(tmp_path: Path) -> None:
    """And nothing of it stays behind: the same folder loads whole afterwards."""
    config = transformers.CLIPTextConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2, vocab_size=20
    )
    whole = transformers.CLIPTextModel(config)
    whole.save_pretrained(tmp_path)
    asked = 0

    def stop_at_the_fifth() -> None:
        nonlocal asked
        asked += 1
        if asked == 5:
            raise Cancelled

    with pytest.raises(Cancelled), _between_tensors(stop_at_the_fifth):
        transformers.CLIPTextModel.from_pretrained(tmp_path)
    assert asked == 5
    counted: list[None] = []
    with _between_tensors(lambda: counted.append(None)):
        loaded = transformers.CLIPTextModel.from_pretrained(tmp_path)
    assert len(counted) == len(whole.state_dict())
    for name, tensor in whole.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    transformers.CLIPTextModel.from_pretrained(tmp_path)
    assert len(counted) == len(whole.state_dict())


# ---- schedule


def comfyui_sigmas(steps: int, denoise: float) -> list[float]:
    """The noise levels a step starts from, by the rule of ComfyUI's KSampler.set_steps (comfy/samplers.py).

    There a schedule of int(steps / denoise) steps is made, its end 0 included, and the last steps + 1 levels are kept.
    """
    total = steps if denoise > 0.9999 else int(steps / denoise)
    whole = [*numpy.linspace(1.0, 1 / total, total).tolist(), 0.0]
    return whole[-(steps + 1) :][:-1]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("denoise", [1.0, 1.5])
def test_a_whole_run_has_the_schedule_of_flux_pipeline(steps: int, denoise: float) -> None:
    assert schedule(steps, denoise) == numpy.linspace(1.0, 1 / steps, steps).tolist()


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("denoise", [0.9999, 0.99, 0.9, 0.75, 0.6, 0.5, 0.3, 0.25, 0.1, 0.05, 0.01])
def test_a_part_of_a_run_makes_as_many_steps_as_in_comfyui(steps: int, denoise: float) -> None:
    sigmas = schedule(steps, denoise)
    assert sigmas == comfyui_sigmas(steps, denoise)
    assert len(sigmas) == steps
    assert all(before > after > 0 for before, after in itertools.pairwise(sigmas))


@pytest.mark.parametrize(
    ("steps", "denoise", "first"), [(10, 0.5, 0.5), (20, 0.25, 0.25), (4, 0.8, 0.8), (1, 0.1, 0.1)]
)
def test_a_part_of_a_run_starts_at_its_denoise(steps: int, denoise: float, first: float) -> None:
    assert schedule(steps, denoise)[0] == pytest.approx(first)


def test_the_scheduler_ends_every_part_of_a_run_at_zero() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=schedule(6, 0.4), mu=0.8)
    assert len(scheduler.timesteps) == 6
    assert float(scheduler.sigmas[-1]) == 0


# ---- packing

LATENTS = [(1, 16, 8, 8), (2, 4, 6, 10), (3, 1, 2, 2), (1, 16, 128, 96)]


def distinct(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("shape", LATENTS, ids=str)
def test_latents_are_packed_as_flux_pipeline_packs_them(shape: tuple[int, int, int, int]) -> None:
    latent = distinct(*shape)
    batch, channels, rows, columns = shape
    packed = pack(latent)
    assert packed.shape == (batch, rows * columns // 4, channels * 4)
    assert torch.equal(packed, FluxPipeline._pack_latents(latent, batch, channels, rows, columns))


@pytest.mark.parametrize("factor", [8, 16])
@pytest.mark.parametrize("shape", LATENTS, ids=str)
def test_latents_are_unpacked_as_flux_pipeline_unpacks_them(
    shape: tuple[int, int, int, int], factor: int
) -> None:
    batch, channels, rows, columns = shape
    tokens = distinct(batch, rows * columns // 4, channels * 4)
    theirs = FluxPipeline._unpack_latents(tokens, rows * factor, columns * factor, factor)
    assert torch.equal(unpack(tokens, rows, columns), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LATENTS, ids=str)
def test_unpacking_undoes_packing(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(unpack(pack(latent), *shape[2:]), latent)


# ---- previews


@pytest.mark.parametrize("denoise", [1.0, 0.4])
@pytest.mark.parametrize(
    ("settings", "mu"),
    [({"use_dynamic_shifting": True}, 0.9), ({"shift": 3.0}, None), ({"shift": 1.0}, None)],
    ids=["dynamic", "shift 3", "no shift"],
)
def test_previews_show_the_clean_latent_the_scheduler_steps_towards(
    settings: dict[str, float], mu: float | None, denoise: float
) -> None:
    """With x = (1 - s) x0 + s noise and the velocity v = noise - x0, the clean latent is x - s v."""
    generator = torch.Generator().manual_seed(2)
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    scheduler.set_timesteps(sigmas=schedule(7, denoise), mu=mu)
    x = torch.randn((2, 24, 16), generator=generator)
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = torch.randn(x.shape, generator=generator)
        after = scheduler.step(velocity, timestep, x, return_dict=False)[0]
        expected = x - scheduler.sigmas[step] * velocity
        clean = predicted_clean(x, after, scheduler.sigmas, step)
        torch.testing.assert_close(clean, expected, atol=1e-4, rtol=1e-4)
        x = after
    assert torch.equal(clean, x)  # the last step arrives at what it points to


def test_previews_of_half_precision_latents_are_close() -> None:
    generator = torch.Generator().manual_seed(3)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=schedule(8, 1.0), mu=0.9)
    x = torch.randn((1, 24, 16), generator=generator).bfloat16()
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = torch.randn(x.shape, generator=generator).bfloat16()
        after = scheduler.step(velocity, timestep, x, return_dict=False)[0]
        assert after.dtype == torch.bfloat16
        clean = predicted_clean(x, after, scheduler.sigmas, step)
        # A bf16 step is rounded to 8 bits, and the preview multiplies its error by s / (s - s').
        torch.testing.assert_close(
            clean.float(), x.float() - scheduler.sigmas[step] * velocity.float(), atol=0.5, rtol=0
        )
        x = after


# ---- what is known of a folder without upstream, against upstream


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux(tmp_path_factory.mktemp("models") / "flux", size=FluxSize(), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def facts(flux: Path) -> ModelFacts:
    return inspect_pipeline(flux)


def transformer(flux: Path) -> torch.nn.Module:
    """The folder's transformer, without weights."""
    config = json.loads((flux / "transformer" / "config.json").read_text(encoding="utf-8"))
    return empty_model(config["_class_name"], config)


def divided_matrices(model: torch.nn.Module) -> dict[str, int]:
    """The elements of each matrix that two ranks divide."""
    shards = tensor_plan(model, (1, 1)).shards(model)
    return {name: p.numel() for name, p in model.named_parameters() if name in shards and p.ndim > 1}


def stored_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * 2 for parameter in module.parameters())


def test_a_folder_that_diffusers_saved_is_accepted(facts: ModelFacts) -> None:
    assert (facts.pipeline_class, facts.transformer_class) == ("FluxPipeline", "FluxTransformer2DModel")
    assert facts.heads == FluxSize().heads
    assert facts.stored_dtype == "bfloat16"


def test_sizes_are_those_of_the_parameters(flux: Path, facts: ModelFacts) -> None:
    assert facts.transformer_bytes == stored_bytes(transformer(flux))
    vae = diffusers.AutoencoderKL.from_config(diffusers.AutoencoderKL.load_config(flux / "vae"))
    assert facts.vae_bytes == stored_bytes(vae)


def test_what_the_planner_counts_as_divided_is_what_the_plan_divides(flux: Path, facts: ModelFacts) -> None:
    """In the blocks. Outside them a model as small as this one has layers that are large for it."""
    divided = divided_matrices(transformer(flux))
    in_blocks = {name: size for name, size in divided.items() if "transformer_blocks." in name}
    assert facts.split_bytes == 2 * sum(in_blocks.values())
    assert all(name.startswith("time_text_embed.") for name in divided.keys() - in_blocks.keys())


def test_outside_the_blocks_a_published_model_divides_nothing() -> None:
    divided = divided_matrices(empty_model("FluxTransformer2DModel", {"guidance_embeds": True}))
    assert divided and all("transformer_blocks." in name for name in divided)


def test_heads_default_to_those_of_diffusers() -> None:
    """test_folder.py expects 24 where a config does not say."""
    assert inspect.signature(FluxTransformer2DModel.__init__).parameters["num_attention_heads"].default == 24


@pytest.mark.parametrize(
    ("library", "name"),
    sorted({pair for parts in ALLOWED.values() for pairs in parts.values() for pair in pairs}),
)
def test_every_class_on_the_list_exists_upstream(library: str, name: str) -> None:
    assert hasattr({"diffusers": diffusers, "transformers": transformers}[library], name)
