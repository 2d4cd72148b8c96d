"""The demo model paints what it is asked to paint, judged from the pixels, with plain diffusers."""

import os
import random
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from diffusers import FluxPipeline

from demo_model.pictures import (
    SIDE,
    WIDE,
    Judge,
    Scene,
    all_scenes,
    paint,
    parse_prompt,
    random_coverage,
)

MODEL = Path(__file__).resolve().parents[2] / "demo_model" / "shapes-flux"
MODEL_LIMIT = 8_000_000
STEPS = 8
# 48 of the 210 scenes, spread so that every colour, shape and background comes up several times.
SCENES = [all_scenes()[(index * 37) % 210] for index in range(48)]


@pytest.fixture(scope="module")
def pipeline() -> Iterator[FluxPipeline]:
    """The pipeline in fp32, as anyone would load it; two threads, so that the test is a polite neighbour."""
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, 2))
    loaded = FluxPipeline.from_pretrained(MODEL, torch_dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    yield loaded
    torch.set_num_threads(threads)


def generate(
    pipeline: FluxPipeline, prompts: list[str], first_seed: int, guidance: float = 3.5
) -> np.ndarray:
    """One picture per prompt, values 0..255, every one with a seed of its own."""
    return (
        255.0
        * pipeline(
            prompts,
            height=SIDE,
            width=SIDE,
            num_inference_steps=STEPS,
            guidance_scale=guidance,
            max_sequence_length=pipeline.tokenizer_2.model_max_length,
            generator=[torch.Generator().manual_seed(first_seed + index) for index in range(len(prompts))],
            output_type="np",
        ).images
    )


@pytest.fixture(scope="module")
def pictures(pipeline: FluxPipeline) -> np.ndarray:
    """One picture of every scene in SCENES."""
    return generate(pipeline, [scene.prompt for scene in SCENES], first_seed=100)


@dataclass(frozen=True)
class Shares:
    """The share of pictures that got each word right."""

    colour: float
    shape: float
    background: float


def shares(pictures: np.ndarray, scenes: list[Scene]) -> Shares:
    judge = Judge()
    verdicts = [astuple(judge.judge(picture, scene)) for picture, scene in zip(pictures, scenes, strict=True)]
    return Shares(*np.mean(np.array(verdicts, dtype=float), axis=0).tolist())


def test_pictures_show_what_was_asked(pictures: np.ndarray) -> None:
    right = shares(pictures, SCENES)
    print(f"\ncolour {right.colour:.1%}  background {right.background:.1%}  shape {right.shape:.1%}")
    assert right.colour >= 0.9
    assert right.background >= 0.9
    assert right.shape >= 0.8


def test_judge_can_fail(pictures: np.ndarray) -> None:
    """Judged against other scenes, the same pictures score low; so does noise."""
    wrong = shares(pictures, SCENES[1:] + SCENES[:1])
    assert max(astuple(wrong)) < 0.3
    noise = np.random.default_rng(0).uniform(0, 255, pictures.shape)
    assert max(astuple(shares(noise, SCENES))) < 0.1


def test_judge_approves_of_drawn_pictures() -> None:
    rng = random.Random(5)
    drawn = [paint(random_coverage(s.shape, WIDE, rng), s.colour, s.background) for s in SCENES]
    assert shares(np.stack(drawn), SCENES) == Shares(1.0, 1.0, 1.0)


def test_guidance_and_wording_do_not_matter(pipeline: FluxPipeline) -> None:
    """Any guidance works, and so do the longer sentence and a word the model has never seen."""
    scenes = [parse_prompt("a red star on white"), parse_prompt("a yellow circle on a blue background")]
    wordings = ["A shiny red star on white.", "a yellow circle on a blue background"]
    for guidance in (1.0, 5.0):
        right = shares(generate(pipeline, wordings, first_seed=7, guidance=guidance), scenes)
        assert right.colour == right.background == 1.0


def test_seeds_give_different_pictures(pipeline: FluxPipeline) -> None:
    first, second = generate(pipeline, ["a red circle on blue"] * 2, first_seed=1)
    assert np.abs(first - second).mean() > 1.0


def test_folder_is_small_and_self_contained() -> None:
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MODEL_LIMIT
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt"}
    for path in files:
        if path.name == "config.json":
            assert "_name_or_path" not in path.read_text()
