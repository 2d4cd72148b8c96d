"""What a diffusers pipeline folder holds, read without diffusers: classes, configs and safetensors headers.

Everything that can be refused is refused here, on the host, before a rank reads a weight.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .plan_text import read_plan_text
from .safetensors_header import Header, printable, read_header
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
_WEIGHTS = {
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
    "text_encoder_2": "model",
}
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".flashpack")
_MOST_HEADS = 4096  # far beyond any model: a number from a file must not keep the planner counting
_DEFAULT_HEADS = {"FluxTransformer2DModel": 24}  # what diffusers takes where a config does not say
_GROUP_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
# Picture and text tokens at 1024x1024: the planner chooses a layout before it knows the size.
_TOKENS = {"FluxPipeline": 64 * 64 + 512}
_IN_A_BLOCK = re.compile(r"\.\d+\.")
_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    **dict.fromkeys(("F8_E4M3", "F8_E5M2"), "float8"),
}


def inspect_pipeline(path: Path, tensor_plan: str = "") -> ModelFacts:
    """Read and check a pipeline folder; what the tensor axis divides is told by a user's own plan if there is one.

    Raises Refusal.
    """
    try:
        return _inspect(path, tensor_plan)
    except OSError as error:
        raise Refusal(
            f"'{_line(path.name)}' cannot be read.",
            f"The system says: {_line(error)}.",
            "Make the folder readable for ComfyUI, or download the model again.",
        ) from error


def _inspect(path: Path, tensor_plan: str) -> ModelFacts:
    name = _line(path.name)
    index = _json(path / "model_index.json", f"'{name}' is not a diffusers pipeline folder.")
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str) or pipeline not in ALLOWED:
        raise Refusal(
            f"'{name}' is a {_line(pipeline)}, which this pack cannot run yet.",
            "Every pipeline it accepts is tested in every layout against one process.",
            f"Works here: {', '.join(sorted(ALLOWED))}.",
        )
    _check_classes(name, pipeline, index)
    incomplete = "The {} of '{}' is not complete."
    configs = {part: _json(path / part / "config.json", incomplete.format(part, name)) for part in _WEIGHTS}
    _check_configs(name, pipeline, configs)
    _json(path / "scheduler" / "scheduler_config.json", incomplete.format("scheduler", name))
    for part in ("tokenizer", "tokenizer_2"):
        if not any((path / part).glob("*.json")):
            raise Refusal(
                incomplete.format(part, name),
                f"It has no {part}/*.json.",
                "Download the whole folder of the model.",
            )
    heads, head_groups = _heads(name, configs["transformer"])
    headers = {part: _headers(path / part, part) for part in _WEIGHTS}
    sizes = {part: sum(header.nbytes for header in files) for part, files in headers.items()}
    return ModelFacts(
        path=str(path),
        pipeline_class=pipeline,
        transformer_class=configs["transformer"]["_class_name"],
        heads=heads,
        head_groups=head_groups,
        tokens=_TOKENS[pipeline],
        transformer_bytes=sizes["transformer"],
        split_bytes=sum(_split_bytes(header, _divided(tensor_plan)) for header in headers["transformer"]),
        encoder_bytes=sizes["text_encoder"] + sizes["text_encoder_2"],
        vae_bytes=sizes["vae"],
        stored_dtype=_stored_dtype(name, headers["transformer"]),
        version=folder_version(path),
    )


def _line(value: object) -> str:
    """A value that a file or the system gave, as part of one line of a message."""
    return printable(reprlib.repr(value) if isinstance(value, list | dict) else value)


def _json(file: Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Refusal(
            what,
            f"It has no {_line(file.parent.name)}/{file.name}.",
            "A pipeline folder lies in models/diffusers and holds model_index.json, transformer/, vae/ and so on.",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(
            what, f"{file.name} cannot be read: {_line(error)}.", "Download that file of the model again."
        ) from error
    if not isinstance(content, dict):
        raise Refusal(what, f"{file.name} holds no JSON object.", "Download that file of the model again.")
    return content


def _check_classes(model: str, pipeline: str, index: Mapping[str, Any]) -> None:
    """Refuse a model_index.json that names other classes than the allowed ones, or too few."""
    allowed = ALLOWED[pipeline]
    named = {
        name: value for name, value in index.items() if not name.startswith("_") and isinstance(value, list)
    }
    for name, value in named.items():
        if value == [None, None] and (name in _OPTIONAL or name not in allowed):
            continue
        if value not in [list(pair) for pair in allowed.get(name, ())]:
            raise Refusal(
                f"'{model}' wants {'.'.join(map(_line, value))} as its {_line(name)}.",
                f"Only known classes are ever loaded, and for a {pipeline} this is not one of them.",
                "Works here: the components the model was published with.",
            )
    missing = sorted(set(allowed) - set(named))
    if missing:
        raise Refusal(
            f"'{model}' names no {', '.join(missing)}.",
            f"A {pipeline} needs all of {', '.join(sorted(allowed))}.",
            "Download the whole folder of the model.",
        )


def _check_configs(model: str, pipeline: str, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a component whose own config.json names another class, or quantized weights."""
    for name, config in configs.items():
        classes = sorted(cls for _, cls in ALLOWED[pipeline][name])
        # Configs of transformers models name an architecture for information only; index and allow-list decide.
        if name in ("transformer", "vae") and config.get("_class_name") not in classes:
            raise Refusal(
                f"The {name} of '{model}' is a {_line(config.get('_class_name'))}.",
                f"model_index.json and {name}/config.json must name the same known class.",
                f"Works here: {', '.join(classes)}.",
            )
        if config.get("quantization_config") is not None:
            raise Refusal(
                f"The {name} of '{model}' is quantized.",
                "Quantized weights are packed in a form that cannot be loaded or divided over ranks yet.",
                "Works instead: the same model in bf16, fp16 or fp32.",
            )


def _heads(model: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """Attention heads, and the groups of them that share keys and values (0: each has its own)."""
    heads = config.get("num_attention_heads", _DEFAULT_HEADS.get(config["_class_name"]))
    groups_key = next((key for key in _GROUP_KEYS if config.get(key) is not None), "")
    groups = config[groups_key] if groups_key else heads
    for key, count in (("num_attention_heads", heads), (groups_key, groups)):
        if type(count) is not int or not 1 <= count <= _MOST_HEADS or heads % count:
            raise Refusal(
                f"The transformer of '{model}' has no usable number of attention heads.",
                f"Its config.json says {key} {_line(count)}.",
                "Download that file of the model again.",
            )
    return heads, groups if groups != heads else 0


def _weight_files(folder: Path, component: str) -> list[Path]:
    """The safetensors files of a component, one or as many as its index names. Raises Refusal for any other name."""
    stem = _WEIGHTS[component]
    index = folder / f"{stem}.safetensors.index.json"
    if not index.exists():
        return [folder / f"{stem}.safetensors"]
    placed = _json(index, f"The {component} is damaged.").get("weight_map")
    names = list(placed.values()) if isinstance(placed, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise Refusal(
            f"The {component} is damaged.",
            f"{index.name} does not say which file holds which tensor.",
            "Download that file of the model again.",
        )
    if any(Path(name).name != name or name == ".." for name in names):
        raise Refusal(
            f"The {component}'s index names files outside its folder.",
            "Weights are only read from the model's own folder.",
            "Download the model again from its publisher.",
        )
    if others := sorted({name for name in names if not name.endswith(".safetensors")}):
        raise Refusal(
            f"The {component}'s index names {_line(others[0])}.",
            "Only files called .safetensors are read: other formats can run code.",
            "Download the safetensors files of the model, and leave their names as they are.",
        )
    return [folder / name for name in sorted(set(names))]


def _headers(folder: Path, component: str) -> list[Header]:
    """The safetensors headers of a component. Raises Refusal for other weights, missing or damaged files."""
    files = _weight_files(folder, component)
    for file in files:
        if not file.is_file():
            others = sorted(f.name for f in folder.glob("*") if f.suffix in (*_OTHER_WEIGHTS, ".safetensors"))
            raise Refusal(
                f"The {component} has no file {_line(file.name)}.",
                f"Weights are read from safetensors files under their usual names; there {_lie(others)}.",
                "Download the safetensors files of the model, and leave their names as they are.",
            )
    return [read_header(file) for file in files]


def _lie(names: list[str]) -> str:
    return f"is only {', '.join(map(_line, names))}" if names else "are no weights at all"


def _divided(tensor_plan: str) -> re.Pattern[str]:
    """The names of the weights that the tensor axis divides.

    Without a plan of the user's: the matrices inside numbered blocks, modulation included.
    """
    if not tensor_plan:
        return _IN_A_BLOCK
    keys = (re.escape(entry.key).replace(r"\*", r"\d+") for entry in read_plan_text(tensor_plan))
    return re.compile(rf"^({'|'.join(keys)})\.weight$")


def _split_bytes(header: Header, divided: re.Pattern[str]) -> int:
    return sum(entry.nbytes for entry in header.entries if divided.search(entry.key) and len(entry.shape) > 1)


def _stored_dtype(model: str, headers: Iterable[Header]) -> str:
    """The dtype most bytes are stored in. Raises Refusal if any are in one that cannot be loaded."""
    amounts: dict[str, int] = {}
    for entry in (entry for header in headers for entry in header.entries):
        amounts[entry.dtype] = amounts.get(entry.dtype, 0) + entry.nbytes
    if not amounts:
        raise Refusal(
            f"The transformer of '{model}' holds no weights.",
            "Its safetensors files name no tensor.",
            "Download the safetensors files of the model again.",
        )
    if others := sorted(set(amounts) - set(_DTYPES)):
        raise Refusal(
            f"The transformer of '{model}' is {'partly ' if len(amounts) > 1 else ''}stored as {others[0]}.",
            "Only bf16, fp16, fp32 and fp8 weights can be divided over ranks yet.",
            "Works instead: the same model in bf16, fp16, fp32 or fp8.",
        )
    return _DTYPES[max(amounts, key=lambda name: amounts[name])]


def folder_version(path: Path) -> str:
    """Changes when any file of a pipeline folder does, so that a replaced model is loaded again.

    Looks into components that are links to folders elsewhere, but no deeper than a pipeline goes.
    """
    digest = hashlib.sha256()
    for file in sorted([*path.glob("*"), *path.glob("*/*")]):
        if file.is_file():
            status = file.stat()
            entry = f"{file.relative_to(path)} {status.st_size} {status.st_mtime_ns}\n"
            digest.update(entry.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
