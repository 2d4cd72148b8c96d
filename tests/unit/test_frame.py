"""What crosses with a request: each tensor once, whatever refers to it, and a kept one only with its first request."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.kept import KeptTensors
from tests.support.threads import one_torch_thread
from tools import ROOT


def _pack(*names: str) -> list[Any]:
    """Modules of the pack without ComfyUI: under a package of their own, in which its seam is empty."""
    packages = {"pack_without_comfyui": ROOT, "pack_without_comfyui.nodes": ROOT / "nodes"}
    for name, folder in packages.items():
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder)]
    seam = "pack_without_comfyui.nodes.comfy_host"
    sys.modules[seam] = package.comfy_host = ModuleType(seam)  # type: ignore[attr-defined]
    return [importlib.import_module(f"pack_without_comfyui.{name}") for name in names]


remote, family = _pack("nodes.native.remote", "nodes.native.families.family")
LOADED = object()  # what a load of the slot gave
ROWS = ((0, 1),)


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread():
        yield


def frame(kept: KeptTensors) -> Any:
    return remote._Frame(SimpleNamespace(kept=kept), LOADED)


def residual(value: float, tokens: int = 6) -> torch.Tensor:
    return torch.full((1, tokens, 4), value)


def test_a_tensor_that_several_blocks_are_given_crosses_once() -> None:
    """ControlNets have fewer blocks than the model, which takes each residual several times."""
    made, other = residual(1), residual(2)
    sent = family.residuals([made, made, None, other, made], 6, 6, 4, torch.float32)
    request = frame(KeptTensors())
    wired = request.call(family.Call({"samples": sent}), {}, ROWS)
    refs = [wired.arguments[f"samples.{place}"] for place in range(6)]
    assert refs[0] == refs[1] == refs[4]
    assert refs[2] == refs[5]  # the zero of blocks without one
    assert len(request.tensors) == 3
    assert torch.equal(request.tensors[str(refs[3].numbers[0])], other)
    assert request.new == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [6, 9])
def test_it_does_so_in_another_dtype_and_filled_up(dtype: torch.dtype, tokens: int) -> None:
    made = residual(1)
    sent = family.residuals([made, made], 2, tokens, 4, dtype)
    request = frame(KeptTensors())
    request.call(family.Call({"samples": sent}), {}, ROWS)
    [tensor] = request.tensors.values()
    assert tensor.dtype == dtype
    assert tensor.shape == (1, tokens, 4)


def test_two_tensors_that_are_alike_for_now_cross_each() -> None:
    request = frame(KeptTensors())
    call = family.Call({"one": family.each(residual(1)), "other": family.each(residual(1))})
    wired = request.call(call, {}, ROWS)
    assert wired.arguments["one"] != wired.arguments["other"]
    assert len(request.tensors) == 2


def test_a_kept_tensor_crosses_with_its_first_request() -> None:
    kept = KeptTensors()
    call = family.Call(
        {"text": family.kept(residual(1)), "extra": {"mask": family.kept(residual(1)), "scale": 2.0}}
    )
    first = frame(kept)
    wired = first.call(call, {}, ROWS)
    assert wired.arguments["text"] == wired.arguments["extra.mask"]
    assert wired.arguments["extra.scale"] == 2.0
    assert first.new == list(wired.arguments["text"].numbers)
    assert list(first.tensors) == [str(number) for number in first.new]
    later = frame(kept)
    assert later.call(call, {}, ROWS) == wired
    assert (later.tensors, later.new, later.dropped()) == ({}, [], ())


def test_the_parts_of_a_joined_argument_go_each_their_way() -> None:
    kept = KeptTensors()
    frames = [frame(kept) for _ in range(2)]
    wired = []
    for number, request in enumerate(frames):
        sent = family.joined(-1, family.each(residual(number)), family.kept(residual(7)))
        wired.append(request.call(family.Call({"latent": sent}), {}, ROWS).arguments["latent"])
    assert [len(request.tensors) for request in frames] == [2, 1]
    assert wired[0].numbers[1] == wired[1].numbers[1]
    assert wired[0].numbers[0] != wired[1].numbers[0]
    assert wired[0].dim == -1
