"""A pipeline folder written by hand, without torch or diffusers, so that every byte of it can be wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "F64": 8}
INDEX: dict[str, Any] = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "image_encoder": [None, None],
    "feature_extractor": [None, None],
}
WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
    "text_encoder_2": "model.safetensors",
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("config.json", {"_class_name": "FluxTransformer2DModel", "num_attention_heads": 4}),
    "vae": ("config.json", {"_class_name": "AutoencoderKL"}),
    "text_encoder": ("config.json", {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model"}),
    "text_encoder_2": ("config.json", {"architectures": ["T5EncoderModel"], "model_type": "t5"}),
    "scheduler": ("scheduler_config.json", {"_class_name": "FlowMatchEulerDiscreteScheduler"}),
    "tokenizer": ("tokenizer_config.json", {}),
    "tokenizer_2": ("tokenizer_config.json", {}),
}


def entries(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """The header of a safetensors file for tensors of the given dtype and shape, one after the other."""
    found, start = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = ITEM_BYTES[dtype]
        for length in shape:
            size *= length
        found[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    return found


def safetensors(header: Any, data: int | None = None) -> bytes:
    """A safetensors file: `header` as JSON (bytes as they are), and as many bytes of data as it announces."""
    packed = header if isinstance(header, bytes) else json.dumps(header).encode()
    if data is None:
        data = max((entry["data_offsets"][1] for entry in header.values() if "dtype" in entry), default=0)
    return struct.pack("<Q", len(packed)) + packed + bytes(data)


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")


def change_json(file: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Set and remove keys of a JSON object on disk."""
    content = json.loads(file.read_text(encoding="utf-8")) | changes
    write_json(file, {name: value for name, value in content.items() if name not in remove})


def write_weights(file: Path, dtype: str = "BF16", *, shape: tuple[int, ...] = (8, 8)) -> int:
    """A safetensors file of one tensor; the number of its data bytes."""
    header = entries({"weight": (dtype, shape)})
    file.write_bytes(safetensors(header))
    return header["weight"]["data_offsets"][1]


def write_index(folder: Path, stem: str, weight_map: Any) -> None:
    write_json(folder / f"{stem}.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_pipeline(folder: Path) -> Path:
    """The smallest folder that is accepted: a FluxPipeline with one bf16 tensor per component."""
    write_json(folder / "model_index.json", INDEX)
    for component, (name, content) in _CONFIGS.items():
        write_json(folder / component / name, content)
    for component, name in WEIGHTS.items():
        write_weights(folder / component / name)
    return folder
