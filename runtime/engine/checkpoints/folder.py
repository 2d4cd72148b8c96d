"""A transformer in a diffusers folder: config.json, and safetensors files, one or as many as the index names."""

from __future__ import annotations

import json
from pathlib import Path

from .files import open_files
from .fp8 import dequantised
from .source import Checkpoint

WEIGHTS = "diffusion_pytorch_model"


def open_folder(folder: Path) -> Checkpoint:
    """Open `folder` for reading; parameters are named as the model names them. Raises Refusal, OSError."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sources = dequantised(open_files(weight_files(folder)))
    return Checkpoint(config.pop("_class_name", ""), config, sources)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a component."""
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [folder / f"{WEIGHTS}.safetensors"]
