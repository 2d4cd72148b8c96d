"""The tiny checkpoints of the native MODEL's tests on a real server. Known to both sides: imports no ComfyUI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.parity_native.variants import FLUX_DEV, QWEN, WAN_I2V, WAN_T2V

EXPERTS = tuple(replace(WAN_T2V, name=f"wan-2.2-{noise}-noise") for noise in ("high", "low"))
NARROW = replace(
    FLUX_DEV,
    name="flux-narrow",
    config={**FLUX_DEV.config, "num_attention_heads": 4},
    detection={**FLUX_DEV.detection, "num_heads": 4},
)
"""With tokens of another width: its ControlNet fits no other model."""
REPLACED = replace(FLUX_DEV, name="replaced")
"""Its file is overwritten by a test with other weights of the same shapes."""
CHECKPOINTS = {one.name: one for one in (FLUX_DEV, QWEN, WAN_T2V, WAN_I2V, *EXPERTS, NARROW, REPLACED)}
FOLDER = "folder-of-wan"  # a pipeline folder with the transformer of WAN_T2V


def write_checkpoints(models: Path) -> None:
    """Into ComfyUI's models folder."""
    files = models / "diffusion_models"
    files.mkdir(parents=True, exist_ok=True)
    for one in CHECKPOINTS.values():
        one.write(files, seed=0)
    folder = models / "diffusers" / FOLDER
    WAN_T2V.model(seed=0).save_pretrained(folder / "transformer")
    (folder / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
