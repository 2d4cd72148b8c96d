"""What a slot can do beside plain sampling, each against plain diffusers in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import diffusers
import pytest
import torch

from runtime.group import GROUPS, Slot
from runtime.spec import Progress
from tests.support.groups import decode, encode, layout_of, make_slot, sample
from tests.support.models import make_flux
from tests.support.reference import Run, max_rel, reference_latents, reference_pipeline

RUN = Run(width=64, height=96, seed=4, steps=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux(tmp_path_factory.mktemp("features") / "flux", seed=21)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> diffusers.FluxPipeline:
    return reference_pipeline(folder)


@pytest.fixture(scope="module", autouse=True)
def groups_end() -> Iterator[None]:
    yield
    GROUPS.close_all()


@pytest.fixture(scope="module")
def slot(folder: Path) -> Slot:
    return make_slot(folder, layout_of(tensor=2))


def test_embeddings_are_the_pipelines_own(slot: Slot, pipeline: diffusers.FluxPipeline) -> None:
    ours = encode(slot, RUN.prompt)
    length = pipeline.tokenizer_2.model_max_length
    embeds, pooled, _ = pipeline.encode_prompt(RUN.prompt, max_sequence_length=length)
    assert max_rel(ours["prompt_embeds"], embeds) <= 1e-6
    assert max_rel(ours["pooled"], pooled) <= 1e-6
    assert max_rel(encode(slot, "a blue star on red")["prompt_embeds"], embeds) > 1e-2


def test_pictures_are_the_vaes_own(slot: Slot, pipeline: diffusers.FluxPipeline) -> None:
    latent = torch.randn(3, 4, 12, 10, generator=torch.Generator().manual_seed(1))
    # One at a time, as the rank does: the convolution of a batch sums in another order (2e-6 here).
    pictures = torch.cat([pipeline.vae.decode(one[None])[0] for one in latent])
    expected = (pictures / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    ours = decode(slot, latent)
    assert ours.shape == (3, 96, 80, 3)
    assert max_rel(ours, expected) <= 1e-6


def test_tiles_of_a_large_picture_are_upstreams_and_the_next_one_is_decoded_whole(
    slot: Slot, folder: Path
) -> None:
    """Four tiles of 512 pixels, blended at their seams."""
    latent = torch.randn(1, 4, 72, 80, generator=torch.Generator().manual_seed(1))
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae")
    vae.tile_sample_min_size, vae.tile_latent_min_size = 512, 64
    vae.enable_tiling()
    with torch.no_grad():
        expected = (vae.decode(latent)[0] / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    tiled = decode(slot, latent, tiled=True)
    assert max_rel(tiled, expected) <= 1e-6
    assert max_rel(decode(slot, latent), expected) > 1e-2
    small = latent[..., :12, :10]
    assert torch.equal(decode(slot, small, tiled=True), decode(slot, small))


def test_a_batch_is_what_one_process_makes(slot: Slot, pipeline: diffusers.FluxPipeline) -> None:
    run = Run(width=64, height=96, seed=4, steps=4, batch_size=3)
    ours = sample(slot, run)
    assert ours.shape[0] == 3
    assert max_rel(ours, reference_latents(pipeline, run)) <= 1e-5
    assert max_rel(ours[:1], ours[1:2]) > 1e-1


@pytest.mark.parametrize(("steps", "denoise"), [(4, 0.5), (6, 0.75), (2, 0.25)])
def test_denoise_below_one_is_upstreams_image_to_image(
    slot: Slot, pipeline: diffusers.FluxPipeline, steps: int, denoise: float
) -> None:
    """FluxImg2ImgPipeline makes int(n * strength) of n steps; ours counts the steps that are made."""
    latent = torch.randn(1, 4, 12, 8, generator=torch.Generator().manual_seed(2))
    upstream = diffusers.FluxImg2ImgPipeline(**pipeline.components)
    upstream.set_progress_bar_config(disable=True)
    scaled = (latent - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
    packed = upstream(
        RUN.prompt,
        image=scaled,
        strength=denoise,
        num_inference_steps=round(steps / denoise),
        guidance_scale=RUN.guidance,
        width=RUN.width,
        height=RUN.height,
        generator=torch.Generator("cpu").manual_seed(RUN.seed),
        max_sequence_length=pipeline.tokenizer_2.model_max_length,
        output_type="latent",
    ).images
    expected = pipeline._unpack_latents(packed, RUN.height, RUN.width, 8) / 0.3611 + 0.1159
    run = Run(width=64, height=96, seed=4, steps=steps)
    ours = sample(slot, run, latent=latent, denoise=denoise)
    assert max_rel(ours, expected) <= 1e-5
    assert max_rel(sample(slot, run), expected) > 1e-1, "the test would not notice the latent missing"


def test_progress_counts_every_step_and_the_last_preview_is_the_result(slot: Slot) -> None:
    seen: list[tuple[int, int, torch.Tensor]] = []

    def report(progress: Progress, tensors: Mapping[str, torch.Tensor]) -> None:
        assert progress.phase == "sampling"
        seen.append((progress.done, progress.total, tensors["preview"].clone()))

    result = sample(slot, RUN, report=report)
    assert [(done, total) for done, total, _ in seen] == [(n, 4) for n in (1, 2, 3, 4)]
    assert max_rel(seen[-1][2] / 0.3611 + 0.1159, result) <= 1e-5
    assert max_rel(seen[0][2], seen[-1][2]) > 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_stay_within_their_own_rounding(folder: Path, dtype: str) -> None:
    """Compared with one process in the same dtype, and not with fp32: rounding moves the result more than a split."""
    run = Run(width=64, height=96, seed=4, steps=2)
    expected = reference_latents(reference_pipeline(folder, getattr(torch, dtype)), run)
    slot = make_slot(folder, layout_of(tensor=2), dtype)
    assert max_rel(sample(slot, run), expected) <= {"bfloat16": 3e-2, "float16": 4e-3}[dtype]
    slot.unload()


def test_two_models_share_a_group_and_an_unloaded_one_comes_back(slot: Slot, tmp_path: Path) -> None:
    other = make_slot(make_flux(tmp_path / "other", seed=5), layout_of(tensor=2))
    first = sample(slot, RUN)
    second = sample(other, RUN)
    assert max_rel(first, second) > 1e-1
    pids = _pids()
    slot.unload()
    assert not slot.loaded
    assert other.loaded
    assert torch.equal(sample(slot, RUN), first)
    assert _pids() == pids


def test_a_slot_nobody_holds_gives_its_memory_back(slot: Slot, tmp_path: Path) -> None:
    from tests.support.processes import wait_until

    other = make_slot(make_flux(tmp_path / "held", seed=6), layout_of(tensor=2))
    other.ensure()
    group = GROUPS.groups()[0]
    name = other.name
    assert name in group.slots
    del other
    wait_until(lambda: name not in group.slots, 10, "the slot to be unloaded")


def _pids() -> list[int]:
    return [rank["pid"] for rank in GROUPS.snapshot()[0]["ranks"]]
