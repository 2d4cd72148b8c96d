"""Single files in their original layouts: each rank gets what it would get from the model's diffusers folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.engine.checkpoints.folder import open_folder
from runtime.engine.checkpoints.single_file import open_single_file
from runtime.engine.checkpoints.source import Checkpoint
from runtime.engine.loading import check_sources, empty_model, read_weights
from runtime.engine.plans import tensor_plan
from tests.support.models import large_flux
from tests.support.original_layout_cases import TINY
from tests.support.original_layout_images import CASES, build
from tests.support.original_layouts import original_layout
from tests.support.torchrun import torchrun

State = Mapping[str, torch.Tensor]
MIB = 1 << 20

_IMAGE = {case.name: case for case in CASES}
_VIDEO = {case.name: case for case in TINY}
FAMILIES = (
    *("flux dev", "chroma", "sd3.5 medium", "qwen image", "z-image", "lumina 2, other groups"),
    *("wan t2v", "wan i2v", "flux.2 dev", "ltx", "ltx-2.0", "hunyuan t2v"),
)


def tiny(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor], str]:
    """A model, its weights under their original names, and the prefix they have in files."""
    if name in _IMAGE:
        model = build(_IMAGE[name])
        return model, original_layout(_IMAGE[name].model_class, model.state_dict()), "model.diffusion_model."
    model = _VIDEO[name].model()
    return model, _VIDEO[name].original(model), _VIDEO[name].prefix


def in_fp8(tensors: State, newer: bool) -> dict[str, torch.Tensor]:
    """The matrices in e4m3 with a scale each, by ComfyUI's older or its newer convention, one or one per channel."""
    found: dict[str, torch.Tensor] = {} if newer else {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}
    for number, (key, tensor) in enumerate(tensors.items()):
        if tensor.ndim != 2 or not key.endswith(".weight") or tensor.dtype != torch.float32:
            found[key] = tensor
            continue
        layer = key.removesuffix(".weight")
        largest = tensor.abs().amax(dim=1, keepdim=True) if number % 2 else tensor.abs().max()
        scale = largest / 448
        found[key] = (tensor / scale).to(torch.float8_e4m3fn)
        found[f"{layer}.{'weight_scale' if newer else 'scale_weight'}"] = scale
        if newer:
            note = json.dumps({"format": "float8_e4m3fn"}).encode()
            found[f"{layer}.comfy_quant"] = torch.tensor(list(note), dtype=torch.uint8)
    return found


def dequantised_whole(tensors: State) -> dict[str, torch.Tensor]:
    """What `in_fp8` wrote, each weight dequantised at once."""
    found = {}
    for key, tensor in tensors.items():
        layer, dot, end = key.rpartition(".")
        if tensor.dtype == torch.float8_e4m3fn and key != "scaled_fp8":
            scale = tensors.get(f"{layer}.weight_scale", tensors.get(f"{layer}.scale_weight"))
            found[key] = tensor.float() * scale
        elif not key.endswith(("scaled_fp8", "scale_weight", "weight_scale", "comfy_quant")):
            found[key] = tensor
    return found


def save(tensors: State, path: Path, prefix: str = "") -> Path:
    save_file({prefix + key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return path


def shards(checkpoint: Checkpoint, rank: int, ranks: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Everything that one rank of the tensor axis reads of a checkpoint."""
    model = empty_model(checkpoint.model_class, checkpoint.config)
    check_sources(model, checkpoint.sources)
    shares = (1,) * ranks
    planned = tensor_plan(model, shares).shards(model) if ranks > 1 else {}
    read_weights(
        model,
        checkpoint.sources,
        planned,
        rank=rank,
        shares=shares,
        dtype=dtype,
        device=torch.device("cpu"),
        on_bytes=lambda _: None,
        cancelled=lambda: False,
    )
    return dict(model.state_dict())


def assert_same_on_every_rank(ours: Checkpoint, reference: Checkpoint, dtype: torch.dtype) -> None:
    for ranks in (1, 2, 3):
        for rank in range(ranks):
            got, expected = (shards(one, rank, ranks, dtype) for one in (ours, reference))
            assert got.keys() == expected.keys()
            for key, tensor in expected.items():
                assert torch.equal(got[key], tensor), f"{key} on rank {rank} of {ranks}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_single_file_loads_to_the_weights_of_its_folder(name: str, tmp_path: Path) -> None:
    model, original, prefix = tiny(name)
    model.save_pretrained(tmp_path / "folder")
    file = save(original, tmp_path / "model.safetensors", prefix)
    assert_same_on_every_rank(open_single_file(file), open_folder(tmp_path / "folder"), torch.float32)


@pytest.mark.parametrize("newer", [False, True], ids=["scale_weight", "comfy_quant"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fp8_loads_as_if_dequantised_whole(name: str, newer: bool, tmp_path: Path) -> None:
    _, original, prefix = tiny(name)
    stored = in_fp8(original, newer)
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values())
    small = open_single_file(save(stored, tmp_path / "fp8.safetensors", prefix))
    whole = open_single_file(save(dequantised_whole(stored), tmp_path / "whole.safetensors", prefix))
    assert_same_on_every_rank(small, whole, torch.bfloat16)


# ---- memory, on real ranks


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FLUX-shaped file of at least 2 GB in the original layout, as ComfyUI users have it."""
    model = large_flux(double_blocks=4, single_blocks=8)
    original = original_layout("FluxTransformer2DModel", model.state_dict())
    del model
    path = save(
        original, tmp_path_factory.mktemp("large") / "flux.safetensors", prefix="model.diffusion_model."
    )
    assert path.stat().st_size >= 2e9
    return path


def probe(source: Path, ranks: int, directory: Path) -> list[dict[str, Any]]:
    """What each rank needed to load `source` in bfloat16."""
    rows = list(torchrun(directory, ranks, "tests.support.transformer_probe", str(source), "bfloat16"))
    assert len(rows) == ranks, "a rank failed: its error is above"
    return sorted(rows, key=lambda row: row["rank"])


def assert_lean(reports: list[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        beyond = report["grown_at_peak"] - report["held"]
        print(
            f"rank {rank} of {len(reports)}: {report['held'] / MIB:.0f} MiB held, {beyond / MIB:.0f} more at most, "
            f"largest slice {report['largest_slice'] / MIB:.0f}, {report['seconds']:.1f} s"
        )
        assert beyond <= 256 * MIB + report["largest_slice"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_large_file_needs_no_more_than_its_shard_and_a_slice(
    large: Path, tmp_path: Path, ranks: int
) -> None:
    reports = probe(large, ranks, tmp_path)
    assert_lean(reports)
    assert max(report["held"] for report in reports) < (1.01 if ranks == 1 else 0.4) * reports[0]["stored"]


@pytest.mark.slow
def test_a_large_fp8_file_needs_no_more_either(large: Path, tmp_path: Path) -> None:
    """Kept small on disk, and dequantised in strips."""
    from safetensors import safe_open

    stored: dict[str, torch.Tensor] = {}
    with safe_open(large, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 - not a mapping
            tensor = opened.get_tensor(key)
            if tensor.ndim == 2:
                stored[key] = tensor.to(torch.float8_e4m3fn)
                stored[key.removesuffix(".weight") + ".scale_weight"] = torch.tensor(0.5)
            else:
                stored[key] = tensor.clone()
    file = save(stored, tmp_path / "fp8.safetensors")
    del stored
    assert_lean(probe(file, 2, tmp_path))
