"""The pack in a real ComfyUI: shipped workflows, progress, previews, cancel, death of ranks and of ComfyUI itself."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from PIL import Image

from demo_model.pictures import Judge, Scene
from tests.support.group_routes import pids, slots, the_group
from tests.support.models import FluxSize, make_flux
from tests.support.processes import listening, wait_until
from tests.support.workflows import add_tensor_plan, pipeline_prompt
from tools.client import ComfyClient, NodeFailed, PromptInterrupted, Run, Workflow
from tools.comfy import Server

STEPS_OF_A_LONG_RUN = 3000


def picture(client: ComfyClient, run: Run) -> bytes:
    """The pixels of a run's picture, without the file's metadata."""
    (saved,) = run.images
    opened = Image.open(io.BytesIO(client.get_image(saved.filename, saved.subfolder, saved.type)))
    return numpy.asarray(opened.convert("RGB")).tobytes() + bytes(str(opened.size), "ascii")


def judged(client: ComfyClient, run: Run) -> Any:
    (saved,) = run.images
    opened = Image.open(io.BytesIO(client.get_image(saved.filename, saved.subfolder, saved.type)))
    return Judge().judge(numpy.asarray(opened.convert("RGB")), Scene("red", "circle", "blue"))


# ---- the whole path


@pytest.mark.parametrize("stem", ["flux_prefer_tensor", "flux_prefer_context"])
def test_a_shipped_workflow_makes_the_picture_it_asks_for(
    client: ComfyClient, shipped_workflow: Callable[..., Workflow], stem: str
) -> None:
    run = client.run(shipped_workflow(client, stem))
    verdict = judged(client, run)
    assert verdict.colour and verdict.background and verdict.shape, verdict
    group = the_group(client)
    assert group["phase"] == "ready"
    assert [rank["state"] for rank in group["ranks"]] == ["ready", "ready"]
    axis = "tensor" if "tensor" in stem else "ulysses"
    assert [slot["degrees"][axis] for slot in group["slots"] if slot["name"].startswith("shapes-flux")][
        -1
    ] == 2


def test_progress_counts_bytes_and_steps_and_previews_are_pictures(client: ComfyClient) -> None:
    run = client.run(pipeline_prompt(tensor=2, seed=101, text="a green square on white"))
    client.free()
    wait_until(lambda: not slots(client), 20, "the slots to be empty")
    run = client.run(pipeline_prompt(tensor=2, seed=102, text="a green square on white"))
    progress = {
        node: [(e.data["value"], e.data["max"]) for e in run.of("progress") if e.data["node"] == node]
        for node in ("load", "sample", "decode")
    }
    loaded = [value for value, maximum in progress["load"] if maximum > 1000]
    assert loaded and loaded == sorted(loaded)
    assert progress["load"][-1][0] == progress["load"][-1][1], "the bar is not full at the end of the load"
    assert [value for value, maximum in progress["sample"] if maximum == 8] == list(range(1, 9))
    assert progress["decode"][-1] == (1, 1)
    previews = [e for e in run.events if e.kind == "preview"] or [
        e for e in client.events if e.kind == "preview"
    ]
    assert len(previews) >= 8
    assert Image.open(io.BytesIO(previews[-1].blob)).size[0] >= 12
    said = [e.data["text"] for e in client.events if e.kind == "text" and e.data["node"] == "load"]
    layout, reason = said[-1].splitlines()
    assert layout.startswith("2 ranks, tensor 2 on the CPU, ") and " each, loaded in " in layout, said
    assert reason == "as set on the Parallel Config"


def test_an_unchanged_loader_never_loads_twice(client: ComfyClient) -> None:
    client.run(pipeline_prompt(tensor=2, seed=1))
    before, held = pids(client), slots(client)
    run = client.run(pipeline_prompt(tensor=2, seed=2))
    assert "load" not in [e.data["node"] for e in run.of("executing")]
    assert pids(client) == before
    assert slots(client) == held
    # The same folder and layout through another node is the same slot.
    twice = pipeline_prompt(tensor=2, seed=3)
    twice["again"] = json.loads(json.dumps(twice["load"]))
    twice["decode"]["inputs"]["pipeline"] = ["again", 0]
    client.run(twice)
    assert slots(client) == held


def test_unload_models_gives_the_slot_back_and_the_next_prompt_loads_it_again(client: ComfyClient) -> None:
    first = picture(client, client.run(pipeline_prompt(tensor=2, seed=4)))
    before = pids(client)
    client.free(unload_models=True, free_memory=False)
    wait_until(lambda: not slots(client), 20, "the slot to be empty")
    again = pipeline_prompt(tensor=2, seed=4)
    again["save"]["inputs"]["filename_prefix"] = "again"
    again["sample"]["inputs"]["steps"] = 7
    client.run(again)
    again["sample"]["inputs"]["steps"] = 8
    assert picture(client, client.run(again)) == first
    assert pids(client) == before


def test_a_users_own_tensor_plan_gives_the_same_picture(client: ComfyClient) -> None:
    """First the one that a new node starts with, which is the pack's own; then one that divides much less."""

    def made(plan: str = "") -> tuple[numpy.ndarray, int]:
        prompt = pipeline_prompt(tensor=2, seed=31)
        prompt["save"]["inputs"]["filename_prefix"] = f"plan_{len(plan)}"
        if plan:
            add_tensor_plan(prompt, plan)
        pixels = numpy.frombuffer(picture(client, client.run(prompt)), numpy.uint8).astype(int)
        return pixels, slots(client)[-1]["weight_bytes"]

    expected, held = made()
    default = client.object_info("ShardedTensorPlan")["input"]["required"]["plan"][1]["default"]
    pixels, held_by_default = made(default)
    assert (pixels == expected).all() and held_by_default == held
    blocks = "single_transformer_blocks.*"
    small = {f"{blocks}.attn.to_{name}": "colwise" for name in "qkv"} | {f"{blocks}.proj_mlp": "colwise"}
    pixels, held_by_small = made(json.dumps(small | {f"{blocks}.proj_out": {"packed_rowwise": [1, 4]}}))
    assert abs(pixels - expected).max() <= 1, "more than the rounding to 8 bits"
    assert held_by_small > held


# ---- cancel


def test_twenty_cancels_in_a_row_leave_the_ranks_warm_and_the_next_picture_unchanged(
    client: ComfyClient,
) -> None:
    expected = picture(client, client.run(pipeline_prompt(tensor=2, seed=5)))
    before = pids(client)
    moment = random.Random(3)
    waits = []
    for number in range(20):
        prompt_id = client.queue(pipeline_prompt(tensor=2, seed=200 + number, steps=STEPS_OF_A_LONG_RUN))
        at_step = moment.randint(1, 12)
        client.wait_for(
            prompt_id,
            lambda e, at_step=at_step: (
                e.kind == "progress" and e.data["max"] == STEPS_OF_A_LONG_RUN and e.data["value"] >= at_step
            ),
            60,
        )
        start = time.monotonic()
        client.interrupt()
        with pytest.raises(PromptInterrupted):
            client.wait(prompt_id, 30)
        waits.append(time.monotonic() - start)
    print(f"20 cancels: longest {max(waits):.2f} s")
    assert max(waits) < 3
    assert pids(client) == before
    fresh = pipeline_prompt(tensor=2, seed=6)
    client.run(fresh)
    again = pipeline_prompt(tensor=2, seed=5)
    again["save"]["inputs"]["filename_prefix"] = "after_cancels"
    assert picture(client, client.run(again)) == expected


# ---- death


def test_a_killed_rank_is_named_on_the_node_and_the_next_prompt_works(client: ComfyClient) -> None:
    expected = picture(client, client.run(pipeline_prompt(tensor=2, seed=7)))
    prompt_id = client.queue(pipeline_prompt(tensor=2, seed=301, steps=STEPS_OF_A_LONG_RUN))
    client.wait_for(prompt_id, lambda e: e.kind == "progress" and e.data["max"] == STEPS_OF_A_LONG_RUN, 60)
    os.kill(pids(client)[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(NodeFailed, match=r"Rank 1 \(CPU 1, pid \d+\) died while sampling"):
        client.wait(prompt_id, 10)
    print(f"the node showed it after {time.monotonic() - start:.2f} s")
    assert time.monotonic() - start < 3
    again = pipeline_prompt(tensor=2, seed=7)
    again["save"]["inputs"]["filename_prefix"] = "after_death"
    again["sample"]["inputs"]["guidance"] = 3.6
    client.run(again)
    again["sample"]["inputs"]["guidance"] = 3.5
    assert picture(client, client.run(again)) == expected


@pytest.mark.slow
def test_killing_comfyui_ends_every_process_and_nothing_listened_beyond_loopback(
    start_server: Callable[..., Server],
) -> None:
    """Under another folder name, which must not matter."""
    server = start_server(pack_folder="Sharded Pack-main")
    with ComfyClient(server.url) as client:
        client.run(pipeline_prompt(tensor=2, seed=1))
        client.queue(pipeline_prompt(tensor=2, seed=2, steps=STEPS_OF_A_LONG_RUN))
        group = the_group(client)
        family = [server.pid, group["agent_pid"], *(rank["pid"] for rank in group["ranks"])]
        found = listening(family)
        print("listening:", found)
        assert f"{server.pid} 127.0.0.1:{server.port}" in found
        assert all(" 127.0.0.1:" in one for one in found)
        server.kill9()
    start = time.monotonic()
    wait_until(lambda: not any(_alive(pid) for pid in family), 5, "the group to end")
    print(f"gone after {time.monotonic() - start:.2f} s")


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- stock nodes on both sides


def test_stock_latents_size_the_picture_and_can_be_sampled_further(client: ComfyClient) -> None:
    prompt = pipeline_prompt(tensor=2, seed=8, steps=4)
    prompt["empty"] = {
        "class_type": "EmptyLatentImage",
        "inputs": {"width": 64, "height": 128, "batch_size": 2},
    }
    prompt["sample"]["inputs"]["latent_image"] = ["empty", 0]
    run = client.run(prompt)
    assert len(run.images) == 2
    opened = Image.open(io.BytesIO(client.get_image(run.images[0].filename, run.images[0].subfolder)))
    assert opened.size == (64, 128)
    prompt["further"] = json.loads(json.dumps(prompt["sample"]))
    prompt["further"]["inputs"] |= {"latent_image": ["larger", 0], "denoise": 0.5, "seed": 9}
    prompt["larger"] = {
        "class_type": "LatentUpscale",
        "inputs": {
            "samples": ["sample", 0],
            "upscale_method": "bilinear",
            "width": 96,
            "height": 96,
            "crop": "disabled",
        },
    }
    prompt["decode"]["inputs"]["samples"] = ["further", 0]
    run = client.run(prompt)
    opened = Image.open(io.BytesIO(client.get_image(run.images[0].filename, run.images[0].subfolder)))
    assert opened.size == (96, 96)


@pytest.mark.slow
def test_a_stock_vae_decodes_our_latents_and_flux_guidance_reaches_the_model(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """A VAE of FLUX.1's real shape with random weights, once in the pipeline and once through stock Load VAE."""
    folder = make_flux(
        tmp_path / "full-vae", seed=3, size=FluxSize(latent_channels=16), vae_widths=(128, 256, 512, 512)
    )
    server = start_server(pipelines={"full-vae": folder})
    stock = server.base.path / "models" / "vae"
    stock.mkdir(parents=True)
    (stock / "stock.safetensors").symlink_to(folder / "vae" / "diffusion_pytorch_model.safetensors")
    prompt = pipeline_prompt("full-vae", tensor=2, seed=1, steps=2, width=64, height=64)
    prompt["vae"] = {"class_type": "VAELoader", "inputs": {"vae_name": "stock.safetensors"}}
    prompt["stock_decode"] = {
        "class_type": "VAEDecode",
        "inputs": {"vae": ["vae", 0], "samples": ["sample", 0]},
    }
    prompt["stock_save"] = {
        "class_type": "SaveImage",
        "inputs": {"images": ["stock_decode", 0], "filename_prefix": "stock"},
    }
    with ComfyClient(server.url) as client:
        run = client.run(prompt, 180)
        ours, theirs = (
            numpy.asarray(Image.open(io.BytesIO(client.get_image(one.filename, one.subfolder))), dtype=float)
            for one in sorted(run.images, key=lambda one: one.filename)
        )
        assert ours.std() > 1
        assert abs(ours - theirs).max() <= 1, "more than the rounding to 8 bits"
        guided = json.loads(json.dumps(prompt))
        guided["guide"] = {
            "class_type": "FluxGuidance",
            "inputs": {"conditioning": ["encode", 0], "guidance": 1.0},
        }
        guided["sample"]["inputs"]["positive"] = ["guide", 0]
        run = client.run(guided, 180)
        image = next(one for one in run.images if one.filename.startswith("sharded"))
        other = numpy.asarray(
            Image.open(io.BytesIO(client.get_image(image.filename, image.subfolder))), dtype=float
        )
        assert abs(ours - other).max() > 1
