"""One file per family: how ComfyUI's call of its denoiser becomes a call of the same model in diffusers."""

from pathlib import Path

__all__ = sorted(
    file.stem
    for file in Path(__file__).parent.glob("*.py")
    if file.stem not in ("__init__", "family", "table")
)
