"""Both MODELs of one checkpoint: ComfyUI's own, built as its loader builds it, and the sharded one.

Imported after ComfyUI.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch

from tests.parity_native.host import Host
from tests.parity_native.variants import Variant

Degrees = Mapping[str, int]
NATIVE: Degrees = {}  # no group at all: ComfyUI's own model


def native_model(path: Path, variant: Variant, dtype: str) -> Any:
    """ComfyUI's own MODEL, every weight of the file in its place."""
    tensors = comfy.utils.load_torch_file(str(path))
    tensors = {key.removeprefix(variant.prefix): tensor for key, tensor in tensors.items()}
    found = comfy.model_detection.detect_unet_config(tensors, "") | dict(variant.detection)
    config = comfy.model_detection.model_config_from_unet_config(found, tensors)
    config.set_inference_dtype(getattr(torch, dtype), None)
    model = config.get_model(tensors, "")
    model.diffusion_model.load_state_dict(config.process_unet_state_dict(tensors), strict=True)
    return comfy.model_patcher.ModelPatcher(
        model,
        load_device=comfy.model_management.get_torch_device(),
        offload_device=comfy.model_management.unet_offload_device(),
    )


def sharded_model(host: Host, path: Path, dtype: str, degrees: Degrees) -> Any:
    """The MODEL that the pack's loader node gives for this file in this layout, on CPU ranks."""
    spec = host.pack("runtime.spec")
    layout = spec.ParallelConfig(strategy="manual", degrees=spec.ParallelSpec(**degrees), devices="cpu")
    model, _ = host.pack("nodes.native.model").sharded_model(path, layout, dtype)
    return model


class Models:
    """MODELs by the names that graphs give them, each loaded once and kept until `release`."""

    def __init__(self, host: Host, folder: Path, seed: int):
        self._host, self._folder, self._seed = host, folder, seed
        self._files: dict[str, Path] = {}
        self._sources: dict[str, tuple[Variant, str, Degrees]] = {}
        self._loaded: dict[str, Any] = {}

    def source(self, variant: Variant, dtype: str, degrees: Degrees) -> str:
        """What a graph's ParityModel is told."""
        layout = ",".join(f"{axis}={degree}" for axis, degree in degrees.items()) or "native"
        name = f"{variant.name} {dtype} {layout}"
        self._sources[name] = (variant, dtype, degrees)
        return name

    def load(self, source: str) -> Any:
        if source not in self._loaded:
            variant, dtype, degrees = self._sources[source]
            path = self._file(variant)
            self._loaded[source] = (
                sharded_model(self._host, path, dtype, degrees)
                if degrees
                else native_model(path, variant, dtype)
            )
        return self._loaded[source]

    def config_of(self, variant_name: str) -> Mapping[str, Any]:
        """The unet_config of a checkpoint whose native MODEL is loaded."""
        loaded = next(
            self._loaded[source]
            for source, (variant, dtype, degrees) in self._sources.items()
            if variant.name == variant_name and dtype == "float32" and not degrees and source in self._loaded
        )
        return loaded.model.model_config.unet_config

    def release(self) -> None:
        """Let the sharded MODELs go and end their group."""
        self._loaded = {name: one for name, one in self._loaded.items() if not self._sources[name][2]}
        self._host.reset()
        gc.collect()
        self._host.pack("runtime.group").GROUPS.close_all()

    def _file(self, variant: Variant) -> Path:
        if variant.name not in self._files:
            self._files[variant.name] = variant.write(self._folder, self._seed)
        return self._files[variant.name]
