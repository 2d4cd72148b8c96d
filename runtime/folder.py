"""What a diffusers pipeline folder holds, read without diffusers: classes, configs and safetensors headers.

Everything that can be refused is refused here, on the host, before a rank reads a weight.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .spec import ModelFacts, Refusal

# The classes a model_index.json may name, per pipeline and component. Nothing else is ever instantiated.
ALLOWED: dict[str, dict[str, frozenset[tuple[str, str]]]] = {
    "FluxPipeline": {
        "transformer": frozenset({("diffusers", "FluxTransformer2DModel")}),
        "vae": frozenset({("diffusers", "AutoencoderKL")}),
        "scheduler": frozenset({("diffusers", "FlowMatchEulerDiscreteScheduler")}),
        "text_encoder": frozenset({("transformers", "CLIPTextModel")}),
        "text_encoder_2": frozenset({("transformers", "T5EncoderModel")}),
        "tokenizer": frozenset({("transformers", "CLIPTokenizer"), ("transformers", "CLIPTokenizerFast")}),
        "tokenizer_2": frozenset({("transformers", "T5TokenizerFast"), ("transformers", "T5Tokenizer")}),
    },
}
# Components a folder may name but this pack does not use; they must be empty.
_OPTIONAL = {"image_encoder", "feature_extractor"}
_WEIGHTS = {"transformer": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def inspect_pipeline(path: Path) -> ModelFacts:
    """Read and check a pipeline folder. Raises Refusal."""
    index = _json(path / "model_index.json", f"'{path.name}' is not a diffusers pipeline folder.")
    pipeline = index.get("_class_name")
    if pipeline not in ALLOWED:
        raise Refusal(
            f"'{path.name}' is a {pipeline}, which this pack cannot run yet.",
            "Every pipeline it accepts is tested in every layout against one process.",
            f"Works here: {', '.join(sorted(ALLOWED))}.",
        )
    _check_classes(path, pipeline, index)
    config = _json(path / "transformer" / "config.json", f"'{path.name}' has no transformer.")
    if "quantization_config" in config:
        raise Refusal(
            f"The transformer of '{path.name}' is quantized.",
            "Quantized weights are packed in a form that cannot be divided over ranks yet.",
            "Works instead: the same model in bf16, fp16 or fp32.",
        )
    headers = {name: _headers(path / name, name) for name in ("transformer", "vae", "text_encoder", "text_encoder_2")}
    sizes = {name: sum(_tensor_bytes(h) for h in files.values()) for name, files in headers.items()}
    return ModelFacts(
        path=str(path),
        pipeline_class=pipeline,
        transformer_class=config["_class_name"],
        heads=int(config.get("num_attention_heads", 24)),
        transformer_bytes=sizes["transformer"],
        encoder_bytes=sizes["text_encoder"] + sizes["text_encoder_2"],
        vae_bytes=sizes["vae"],
        stored_dtype=_stored_dtype(path, headers["transformer"]),
        version=folder_version(path),
    )


def _json(file: Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        content = None
    except (OSError, ValueError) as error:
        raise Refusal(what, f"{file.name} cannot be read: {error}.", "Download that file of the model again.") from error
    if not isinstance(content, dict):
        raise Refusal(
            what,
            f"It has no {file.parent.name}/{file.name}.",
            "A pipeline folder lies in models/diffusers and holds model_index.json beside transformer/, vae/ and so on.",
        )
    return content


def _check_classes(path: Path, pipeline: str, index: Mapping[str, Any]) -> None:
    allowed = ALLOWED[pipeline]
    named = {name: value for name, value in index.items() if not name.startswith("_") and isinstance(value, list)}
    for name, value in named.items():
        pair = tuple(value)
        if pair == (None, None) and (name in _OPTIONAL or name not in allowed):
            continue
        if name not in allowed or pair not in allowed[name]:
            raise Refusal(
                f"'{path.name}' wants {'.'.join(map(str, value))} as its {name}.",
                f"Only known classes are ever loaded, and for a {pipeline} this is not one of them.",
                "Works here: the components the model was published with.",
            )
    missing = sorted(set(allowed) - set(named))
    if missing:
        raise Refusal(
            f"'{path.name}' names no {', '.join(missing)}.",
            f"A {pipeline} needs all of {', '.join(sorted(allowed))}.",
            "Download the whole folder of the model.",
        )
    for name, pairs in allowed.items():
        config = path / name / "config.json"
        if name in ("transformer", "vae"):
            found = _json(config, f"The {name} of '{path.name}' is not complete.").get("_class_name")
            if found not in {cls for _, cls in pairs}:
                raise Refusal(
                    f"The {name} of '{path.name}' is a {found}.",
                    f"model_index.json and {name}/config.json must name the same known class.",
                    f"Works here: {', '.join(sorted(cls for _, cls in pairs))}.",
                )


def _headers(folder: Path, component: str) -> dict[Path, dict[str, Any]]:
    """The safetensors headers of a component. Raises Refusal for other weights, missing or damaged files."""
    stem = _WEIGHTS.get(component, "model")
    index = folder / f"{stem}.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in sorted(set(_json(index, f"The {component} is damaged.")["weight_map"].values()))]
        outside = [file for file in files if file.parent != folder or ".." in file.name]
        if outside:
            raise Refusal(
                f"The {component}'s index names files outside its folder.",
                "Weights are only read from the model's own folder.",
                "Download the model again from its publisher.",
            )
    else:
        files = [folder / f"{stem}.safetensors"]
    for file in files:
        if not file.is_file():
            others = sorted(f.name for f in folder.glob("*") if f.suffix in (".bin", ".pt", ".ckpt", ".safetensors"))
            raise Refusal(
                f"The {component} has no file {file.name}.",
                f"Weights are read from safetensors files under their usual names; there {_lie(others)}.",
                "Download the safetensors files of the model, and leave their names as they are.",
            )
    return {file: read_header(file) for file in files}


def _lie(names: list[str]) -> str:
    return f"is only {', '.join(names)}" if names else "are no weights at all"


def read_header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name -> dtype, shape, data_offsets.

    Layout: 8 bytes little-endian header length, JSON, data. Raises Refusal when it is none, or is cut short.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, 100 << 20):
            raise _not_safetensors(file)
        try:
            header = json.loads(opened.read(length))
        except ValueError as error:
            raise _not_safetensors(file) from error
    header.pop("__metadata__", None)
    expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < expected:
        raise Refusal(
            f"{file.parent.name}/{file.name} is cut short.",
            f"It should have {expected:,} bytes and has {size:,}: a download that did not finish.",
            "Download that file again.",
        )
    return header


def _not_safetensors(file: Path) -> Refusal:
    return Refusal(
        f"{file.parent.name}/{file.name} is not a safetensors file.",
        "Its first bytes are not a safetensors header, whatever its name says.",
        "Download the safetensors file of the model; other formats can run code and are not read.",
    )


def _tensor_bytes(header: Mapping[str, Any]) -> int:
    return max((entry["data_offsets"][1] for entry in header.values()), default=0)


def _stored_dtype(path: Path, files: Mapping[Path, Mapping[str, Any]]) -> str:
    """The dtype most bytes are stored in. Raises Refusal for one that cannot be loaded yet."""
    amounts: dict[str, int] = {}
    for header in files.values():
        for entry in header.values():
            first, last = entry["data_offsets"]
            amounts[entry["dtype"]] = amounts.get(entry["dtype"], 0) + last - first
    dtype = max(amounts, key=lambda name: amounts[name])
    if dtype not in _DTYPES:
        raise Refusal(
            f"The transformer of '{path.name}' is stored as {dtype}.",
            "Only whole bf16, fp16 and fp32 weights can be divided over ranks yet.",
            "Works instead: the same model in bf16, fp16 or fp32.",
        )
    return _DTYPES[dtype]


def folder_version(path: Path) -> str:
    """Changes when any file of the folder does, so that a replaced model is loaded again."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            status = file.stat()
            digest.update(f"{file.relative_to(path)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
