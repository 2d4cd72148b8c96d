"""The shipped workflow with ComfyUI's own sampler, on the layouts that one file may meet on different machines."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import pytest
from PIL import Image

from demo_model.pictures import Judge, Scene
from tests.support.group_routes import the_group
from tools import latents
from tools.client import ComfyClient, Run, Workflow
from tools.comfy import Server

STEM = "flux_stock_ksampler"
# Those of two ranks first, on the group that the file as shipped has started; each other number starts one of its own.
QUICK: tuple[dict[str, int], ...] = ({"tensor": 2}, {"ulysses": 2}, {"tensor": 2, "ring": 2})
SLOW: tuple[dict[str, int], ...] = ({"ring": 2}, {})


class Result(NamedTuple):
    run: Run
    latent: Any
    ranks: int
    degrees: dict[str, int]
    picture: bytes


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
    group = the_group(client)
    degrees = [slot["degrees"] for slot in group["slots"] if slot["name"].startswith("transformer")]
    (saved,) = run.images
    picture = client.get_image(saved.filename, saved.subfolder, saved.type)
    latent = latents.saved(run, server.base.output)
    return Result(run, latent, len(group["ranks"]), degrees[-1] if degrees else {}, picture)


class Runs:
    """The file as it is, the same picture through the pipeline nodes, and the file under each layout asked for."""

    def __init__(self, client: ComfyClient, server: Server, shipped_workflow: Callable[..., Workflow]):
        self._client, self._server, self._workflow = client, server, shipped_workflow
        self._done: dict[str, Result] = {}
        self.pipeline = self._run("flux_prefer_tensor")
        self.as_shipped = self._run(STEM)

    def under(self, degrees: dict[str, int]) -> Result:
        name = named(degrees)
        if name not in self._done:
            config = {"strategy": "manual", "devices": "cpu", **degrees}
            self._done[name] = self._run(STEM, ShardedParallelConfig=config)
        return self._done[name]

    def _run(self, stem: str, **changes: dict[str, Any]) -> Result:
        return _result(self._client, self._server, self._workflow(self._client, stem, **changes))


@pytest.fixture(scope="module")
def runs(comfy_server: Server, shipped_workflow: Callable[..., Workflow]) -> Iterator[Runs]:
    with ComfyClient(comfy_server.url) as client:
        yield Runs(client, comfy_server, shipped_workflow)


def test_it_makes_the_picture_it_asks_for_and_shows_how_far_it_is(runs: Runs) -> None:
    shipped = runs.as_shipped
    assert judged(shipped.picture)
    steps = [e.data["value"] for e in shipped.run.of("progress") if e.data["max"] == 8]
    assert steps == list(range(1, 9))
    assert len(shipped.run.of("preview")) >= 8


def test_its_latents_are_those_of_the_pipeline_nodes(runs: Runs) -> None:
    apart = latents.max_rel(runs.as_shipped.latent, runs.pipeline.latent)
    print(f"max_rel {apart:.1e}")
    assert apart <= 1e-3


@pytest.mark.parametrize(
    "degrees",
    [
        *(pytest.param(one, id=named(one)) for one in QUICK),
        *(pytest.param(one, id=named(one), marks=pytest.mark.slow) for one in SLOW),
    ],
)
def test_the_same_file_on_any_number_of_ranks_makes_the_same_latents_and_the_picture_asked_for(
    runs: Runs, degrees: dict[str, int]
) -> None:
    done = runs.under(degrees)
    assert done.ranks == math.prod(degrees.values())
    assert judged(done.picture)
    assert all(done.degrees[axis] == degree for axis, degree in degrees.items()), done.degrees
    for other in (*QUICK, *SLOW) if degrees in SLOW else QUICK:
        apart = latents.max_rel(done.latent, runs.under(other).latent)
        print(f"{named(other)}: max_rel {apart:.1e}")
        assert apart <= 1e-4
