"""A transformer in a diffusers folder: config.json, and safetensors files, one or as many as the index names."""

from __future__ import annotations

import json
from pathlib import Path

from ...component import weight_files
from .files import open_files
from .fp8 import dequantised
from .source import Checkpoint


def open_folder(folder: Path) -> Checkpoint:
    """Open `folder` for reading; parameters are named as the model names them. Raises Refusal, OSError."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sources = dequantised(open_files(weight_files(folder)))
    return Checkpoint(config.pop("_class_name", ""), config, sources)
