"""The shipped workflow with ComfyUI's own sampler, on the layouts that one file may meet on different machines."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
from PIL import Image

from demo_model.pictures import Judge, Scene
from tools import latents
from tools.client import ComfyClient, Run, Workflow
from tools.comfy import Server

STEM = "flux_stock_ksampler"
# Those of two ranks first, on the group that the file as shipped has started; each other number starts one of its own.
LAYOUTS: tuple[dict[str, int], ...] = (
    *({"tensor": 2}, {"ulysses": 2}, {"ring": 2}),
    *({}, {"tensor": 2, "ring": 2}),
)


class Result(NamedTuple):
    run: Run
    latent: Any
    ranks: int
    degrees: dict[str, int]
    picture: bytes


Runs = dict[str, Result]


def named(degrees: dict[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()) or "one rank"


def judged(picture: bytes) -> bool:
    """Whether the picture shows what the file asks for: its colours and its shape, pixel by pixel."""
    pixels = numpy.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    verdict = Judge().judge(pixels, Scene("red", "circle", "blue"))
    print(verdict)
    return bool(verdict.colour and verdict.background and verdict.shape)


def _result(client: ComfyClient, server: Server, prompt: Workflow) -> Result:
    run = client.run(latents.save_too(prompt), 180)
    (group,) = json.loads(client.get("/sharded/state"))["groups"]
    degrees = [slot["degrees"] for slot in group["slots"] if slot["name"].startswith("transformer")]
    (saved,) = run.images
    picture = client.get_image(saved.filename, saved.subfolder, saved.type)
    latent = latents.saved(run, server.base.output)
    return Result(run, latent, len(group["ranks"]), degrees[-1] if degrees else {}, picture)


@pytest.fixture(scope="module")
def runs(comfy_server: Server, shipped_workflow: Callable[..., Workflow]) -> Runs:
    """The file as it is, the same picture through the pipeline nodes, and the file under each of `LAYOUTS`."""
    with ComfyClient(comfy_server.url) as client:
        done = {
            "pipeline": _result(client, comfy_server, shipped_workflow(client, "flux_prefer_tensor")),
            "as shipped": _result(client, comfy_server, shipped_workflow(client, STEM)),
        }
        for degrees in LAYOUTS:
            config = {"strategy": "manual", "devices": "cpu", **degrees}
            prompt = shipped_workflow(client, STEM, ShardedParallelConfig=config)
            done[named(degrees)] = _result(client, comfy_server, prompt)
    return done


def test_it_makes_the_picture_it_asks_for_and_shows_how_far_it_is(runs: Runs) -> None:
    shipped = runs["as shipped"]
    assert judged(shipped.picture)
    steps = [e.data["value"] for e in shipped.run.of("progress") if e.data["max"] == 8]
    assert steps == list(range(1, 9))
    assert len(shipped.run.of("preview")) >= 8


def test_its_latents_are_those_of_the_pipeline_nodes(runs: Runs) -> None:
    apart = latents.max_rel(runs["as shipped"].latent, runs["pipeline"].latent)
    print(f"max_rel {apart:.1e}")
    assert apart <= 1e-3


@pytest.mark.parametrize("degrees", LAYOUTS, ids=named)
def test_the_same_file_on_any_number_of_ranks_makes_the_same_latents_and_the_picture_asked_for(
    runs: Runs, degrees: dict[str, int]
) -> None:
    done = runs[named(degrees)]
    assert done.ranks == math.prod(degrees.values())
    assert judged(done.picture)
    assert all(done.degrees[axis] == degree for axis, degree in degrees.items()), done.degrees
    for other in LAYOUTS:
        apart = latents.max_rel(done.latent, runs[named(other)].latent)
        print(f"{named(other)}: max_rel {apart:.1e}")
        assert apart <= 1e-4
