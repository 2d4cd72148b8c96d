"""Stock graphs through a real ComfyUI's API: with the sharded MODEL, and with ComfyUI's own of the same weights."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy
import pytest
from PIL import Image

from tests.parity_native import cases_flux as flux
from tests.parity_native import cases_qwen as qwen
from tests.parity_native import cases_wan as wan
from tests.parity_native.graphs import (
    Inputs,
    Link,
    Setup,
    cfg_guider,
    empty_latent,
    ksampler,
    node,
)
from tests.parity_native.variants import FLUX_DEV, QWEN, WAN_I2V, WAN_T2V
from tests.support.native_checkpoints import EXPERTS, FOLDER
from tests.support.native_server import Graphs, fresh, sharded
from tests.support.processes import wait_until
from tools.client import Event, PromptInterrupted
from tools.latents import max_rel

LONG = 3000  # steps of a run that is cancelled
NOTICEABLE = 100  # a dropped feature must move the result by so many tolerances


@dataclass(frozen=True)
class Graph:
    """A run with the MODEL of `checkpoint`, and the same run without the feature, which must be another result."""

    checkpoint: str
    setup: Setup
    without: Setup
    degrees: Mapping[str, int] = field(default_factory=lambda: {"tensor": 2})


def custom_sampling(inputs: Inputs) -> Link:
    """SamplerCustomAdvanced with a scheduler and a sampler of their own nodes."""
    return node(
        "SamplerCustomAdvanced",
        noise=node("RandomNoise", noise_seed=3),
        guider=cfg_guider(3.0)(inputs),
        sampler=node("SamplerDPMPP_2M_SDE", solver_type="midpoint", eta=0.5, s_noise=1.0, noise_device="cpu"),
        sigmas=node("OptimalStepsScheduler", model_type="FLUX", steps=5, denoise=1.0),
        latent_image=inputs.latent,
    )


def of_flux(setup: Setup, without: Setup) -> Graph:
    return Graph(FLUX_DEV.name, setup, without)


def of_qwen(setup: Setup, without: Setup) -> Graph:
    return Graph(QWEN.name, setup, without, {"ulysses": 2})


CUSTOM = replace(flux.BASE, run=custom_sampling)
TEN = replace(flux.BASE, run=ksampler(10, cfg=2.0))
GRAPHS = {
    # First: it reads what the last run has left on the MODEL's sampling, which nodes such as ModelSampling* replace.
    "EasyCache": of_flux(replace(TEN, model=(flux.EASY_CACHE,)), TEN),
    "text to image": of_flux(flux.TWO_LENGTHS, flux.CFG),
    "text to image, on two copies": Graph(FLUX_DEV.name, flux.TWO_LENGTHS, flux.CFG, {"replica": 2}),
    "image to image": of_flux(flux.EDITED, replace(flux.EDITED, latent=flux.BASE.latent)),
    "inpainting": of_flux(
        replace(flux.EDITED, latent=flux.HALF, run=ksampler()), replace(flux.EDITED, run=ksampler())
    ),
    "ControlNet": of_flux(flux.CONTROLLED, flux.BASE),
    "Kontext, with a reference": of_flux(flux.REFERRING, flux.BASE),
    "custom sampling": of_flux(CUSTOM, replace(CUSTOM, positive=flux.text(seed=9))),
    "skipped layers": of_flux(replace(flux.BASE, model=(flux.SKIPPING,)), flux.BASE),
    "Qwen-Image, text to image": of_qwen(qwen.TWO_LENGTHS, qwen.CFG),
    "Qwen-Image, ControlNet": of_qwen(qwen.CONTROLLED, qwen.BASE),
    "Qwen-Image-Edit, with a reference": of_qwen(qwen.REFERRING, qwen.BASE),
    "Wan, text to video": Graph(WAN_T2V.name, wan.UNI_PC, replace(wan.T2V, run=ksampler(6, cfg=5.0))),
    "Wan, image to video": Graph(WAN_I2V.name, wan.I2V, wan.I2V_UNSEEN),
}
SLOW = ("EasyCache", "custom sampling", "Qwen-Image, ControlNet")


def tolerance_of(checkpoint: str) -> float:
    return 5e-6 if checkpoint.startswith("wan") else 2e-6


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in GRAPHS]
)
def test_a_stock_graph_gives_the_latents_of_comfyuis_own_model(graphs: Graphs, name: str) -> None:
    graph = GRAPHS[name]
    ours, native, without = graphs.run(
        graph.setup.graph(sharded(graph.checkpoint, **graph.degrees)),
        graph.setup.graph(graph.checkpoint),
        graph.without.graph(graph.checkpoint),
    ).latents
    tolerance = tolerance_of(graph.checkpoint)
    apart, moves = max_rel(ours, native), max_rel(without, native)
    print(f"{name}: max_rel {apart:.1e}, moves {moves:.1e}")
    assert apart <= tolerance
    assert moves >= NOTICEABLE * tolerance


@pytest.mark.slow
def test_the_transformer_of_a_diffusers_folder_is_the_same_model(graphs: Graphs) -> None:
    model = sharded("", f"{FOLDER}/transformer", tensor=2)
    ours, native = graphs.run(wan.SHORT.graph(model), wan.SHORT.graph(WAN_T2V.name)).latents
    assert max_rel(ours, native) <= 5e-6


@pytest.mark.slow
def test_the_first_step_is_verified_where_the_switch_is_on(graphs: Graphs) -> None:
    model = sharded(FLUX_DEV.name, tensor=2)
    checked = node(model.kind, **{**model.inputs, "verify_first_step": True})
    start = time.monotonic()
    plain, same = graphs.run(fresh(flux.CFG).graph(model), fresh(flux.CFG).graph(checked)).latents
    assert (plain == same).all()
    assert [text for text in graphs.said(start) if text.startswith("Verified: ")], graphs.said(start)


# ---- two experts


def experts(models: tuple[Link | str, Link | str], between: str = "ParityFresh") -> Link:
    """Wan 2.2: the first half of the steps with the high-noise model, the second with the low-noise one.

    `between` is a node that the LATENT passes from one to the other.
    """
    half = wan.ksampler_advanced(4, 0, 2, cfg=4.0)
    noisy = replace(wan.T2V, run=half).graph(models[0])
    rest = wan.ksampler_advanced(4, 2, 10000, cfg=4.0, noise="disable", leftover="disable")
    return replace(wan.T2V, latent=node(between, samples=noisy, key=""), run=rest).graph(models[1])


def test_two_experts_in_one_graph(graphs: Graphs) -> None:
    """Both stay on the device; or ComfyUI needs it in between, and the first is parked while the second runs."""
    high, low = (one.name for one in EXPERTS)
    ours = sharded(high, tensor=2), sharded(low, tensor=2)
    both, native, high_only = graphs.run(experts(ours), experts((high, low)), experts((high, high))).latents
    assert states(graphs, high, low) == ["loaded", "loaded"]
    (apart,) = graphs.run(experts(ours, "ParityNeedsTheDevice")).latents
    assert states(graphs, high, low) == ["parked", "loaded"]
    assert max_rel(both, native) <= 5e-6
    assert max_rel(apart, native) <= 5e-6
    assert max_rel(high_only, native) >= NOTICEABLE * 5e-6


def states(graphs: Graphs, *names: str) -> list[str]:
    slots = graphs.slots()
    return [slots[name]["state"] for name in names]


# ---- batches and queues


def test_a_batch_of_three(graphs: Graphs) -> None:
    setup = replace(flux.CFG, latent=empty_latent(3, 16, flux.HEIGHT, flux.WIDTH))
    ours, native = graphs.run(
        setup.graph(sharded(FLUX_DEV.name, tensor=2)), setup.graph(FLUX_DEV.name)
    ).latents
    assert ours.shape[0] == 3
    assert max_rel(ours, native) <= 2e-6
    assert max_rel(numpy.roll(native, 1, 0), native) >= NOTICEABLE * 2e-6


def test_after_free_five_prompts_in_the_queue_finish_with_one_load(graphs: Graphs) -> None:
    model = sharded(FLUX_DEV.name, tensor=2)
    (before,) = graphs.run(flux.BASE.graph(model)).latents
    ranks = graphs.ranks()
    graphs.client.free(unload_models=True, free_memory=False)
    wait_until(lambda: not graphs.slots(), 20, "the slots to be empty")
    start = time.monotonic()
    setup = fresh(flux.BASE)
    queued = [graphs.queue(setup.graph(model), setup.graph(FLUX_DEV.name), seed=seed) for seed in range(5)]
    latents = [graphs.wait(prompt_id).latents for prompt_id in queued]
    assert len(graphs.loads(start)) == 1, graphs.loads(start)
    assert graphs.ranks() == ranks
    for ours, native in latents:
        assert max_rel(ours, native) <= 2e-6
    for (one, _), (other, _) in zip(latents, latents[1:], strict=False):
        assert max_rel(one, other) >= NOTICEABLE * 2e-6
    assert (latents[0][0] == before).all()


# ---- cancel and previews


def is_step(event: Event, node_id: str, at_least: int = 1) -> bool:
    data = event.data
    return event.kind == "progress" and data["node"] == node_id and data["value"] >= at_least


@pytest.mark.parametrize("axis", ["tensor", pytest.param("replica", marks=pytest.mark.slow)])
def test_cancel_ends_the_run_and_the_next_prompt_is_exact(graphs: Graphs, axis: str) -> None:
    model = sharded(FLUX_DEV.name, **{axis: 2})
    (expected,) = graphs.run(flux.BASE.graph(model)).latents
    ranks = graphs.ranks()
    prompt = graphs.prompt(replace(flux.TWO_LENGTHS, run=ksampler(LONG, cfg=4.0)).graph(model))
    (sampler,) = [key for key, one in prompt.items() if one["class_type"] == "KSampler"]
    for at_step in (1, 5):
        prompt_id = graphs.client.queue(prompt)
        graphs.client.wait_for(
            prompt_id,
            lambda event, at=at_step: is_step(event, sampler, at) and event.data["max"] == LONG,
            60,
        )
        start = time.monotonic()
        graphs.client.interrupt()
        with pytest.raises(PromptInterrupted):
            graphs.wait(prompt_id)
        assert time.monotonic() - start < 3
    (again,) = graphs.run(fresh(flux.BASE).graph(model)).latents
    assert graphs.ranks() == ranks
    assert (again == expected).all()


def test_previews_are_those_of_comfyuis_own_model(graphs: Graphs) -> None:
    results = (
        fresh(flux.CFG).graph(sharded(FLUX_DEV.name, tensor=2)),
        fresh(flux.CFG).graph(FLUX_DEV.name),
    )
    prompt = graphs.prompt(*results)
    first, second = [key for key, one in prompt.items() if one["class_type"] == "KSampler"]
    run = graphs.client.run(prompt)
    ours, native = (
        [event.blob for event in run.of("preview") if event.data["node_id"] == sampler]
        for sampler in (first, second)
    )
    assert len(ours) == len(native) >= 4
    for one, other in zip(ours, native, strict=True):
        difference = abs(pixels(one) - pixels(other))
        assert difference.shape[0] >= flux.HEIGHT and difference.max() <= 2, (
            "more than the rounding to 8 bits"
        )
    assert abs(pixels(ours[-1]) - pixels(ours[0])).max() > 20


def pixels(blob: bytes) -> numpy.ndarray:
    return numpy.asarray(Image.open(io.BytesIO(blob)).convert("RGB"), dtype=int)
