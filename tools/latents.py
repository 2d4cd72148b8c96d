"""Latents of a run on a server: saved by ComfyUI's own node, read back from its output folder, compared.

Pictures are rounded to 8 bits; only latents say how far two runs are apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import load_file

from tools.client import Run, Workflow

DECODERS = ("ShardedDecode", "VAEDecode")
SAVER = "saved_latent"


class LatentError(ValueError):
    """The workflow has no latent to save, or several."""


def save_too(workflow: Workflow) -> Workflow:
    """The workflow in API format with a Save Latent node on what it decodes. Raises LatentError."""
    sources = [node["inputs"]["samples"] for node in workflow.values() if node["class_type"] in DECODERS]
    if len(sources) != 1:
        raise LatentError(f"the workflow decodes {len(sources)} latents; one can be compared")
    inputs = {"samples": sources[0], "filename_prefix": "latents/run"}
    meta = {"title": "Save Latent"}
    return {**workflow, SAVER: {"class_type": "SaveLatent", "inputs": inputs, "_meta": meta}}


def saved(run: Run, output: Path) -> Any:
    """The latent [B, C, h, w] of a run of `save_too`'s workflow on the server whose output folder this is."""
    (file,) = run.outputs[SAVER]["latents"]
    return read(file, output)


def read(file: Mapping[str, str], output: Path) -> Any:
    """The latent in a file that Save Latent has told of, in the server's output folder."""
    return load_file(output / file["subfolder"] / file["filename"])["latent_tensor"]


def max_rel(a: Any, b: Any) -> float:
    """max|a - b| / max|b|; infinite where the shapes differ or a number is none."""
    if a.shape != b.shape or not (numpy.isfinite(a).all() and numpy.isfinite(b).all()):
        return float("inf")
    a, b = a.astype(numpy.float64), b.astype(numpy.float64)
    return float(abs(a - b).max() / abs(b).max())
