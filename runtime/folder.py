"""What a diffusers pipeline folder holds, read without diffusers: classes, configs and safetensors headers.

Everything that can be refused is refused here, on the host, before a rank reads a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .component import (
    DIFFUSERS_WEIGHTS,
    folder_version,
    one_line,
    read_json,
    readable,
    refuse_quantised,
    weight_files,
)
from .safetensors_header import Entry, read_header
from .spec import ModelFacts, Refusal
from .transformer_config import TOKENS, count_heads
from .weights_on_disk import split_bytes, stored_dtype

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
    "transformer": DIFFUSERS_WEIGHTS,
    "vae": DIFFUSERS_WEIGHTS,
    "text_encoder": "model",
    "text_encoder_2": "model",
}
_BELONGS = (
    "A pipeline folder lies in models/diffusers and holds model_index.json, transformer/, vae/ and so on."
)


def inspect_pipeline(path: Path, tensor_plan: str = "") -> ModelFacts:
    """Read and check a pipeline folder; what the tensor axis divides is told by a user's own plan if there is one.

    Raises Refusal.
    """
    with readable(path):
        return _inspect(path, tensor_plan)


def _inspect(path: Path, tensor_plan: str) -> ModelFacts:
    name = one_line(path.name)
    index = read_json(path / "model_index.json", f"'{name}' is not a diffusers pipeline folder.", _BELONGS)
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str) or pipeline not in ALLOWED:
        raise Refusal(
            f"'{name}' is a {one_line(pipeline)}, which this pack cannot run yet.",
            "Every pipeline it accepts is tested in every layout against one process.",
            f"Works here: {', '.join(sorted(ALLOWED))}.",
        )
    _check_classes(name, pipeline, index)
    incomplete = "The {} of '{}' is not complete."
    configs = {
        part: read_json(path / part / "config.json", incomplete.format(part, name), _BELONGS)
        for part in _WEIGHTS
    }
    _check_configs(name, pipeline, configs)
    read_json(path / "scheduler" / "scheduler_config.json", incomplete.format("scheduler", name), _BELONGS)
    for part in ("tokenizer", "tokenizer_2"):
        if not any((path / part).glob("*.json")):
            raise Refusal(
                incomplete.format(part, name),
                f"It has no {part}/*.json.",
                "Download the whole folder of the model.",
            )
    transformer = f"The transformer of '{name}'"
    transformer_class = configs["transformer"]["_class_name"]
    heads, head_groups = count_heads(transformer, transformer_class, configs["transformer"])
    weights = {part: _entries(path / part, stem) for part, stem in _WEIGHTS.items()}
    sizes = {part: sum(entry.nbytes for entry in entries) for part, entries in weights.items()}
    return ModelFacts(
        path=str(path),
        pipeline_class=pipeline,
        transformer_class=transformer_class,
        heads=heads,
        head_groups=head_groups,
        tokens=TOKENS.get(transformer_class, 0),
        transformer_bytes=sizes["transformer"],
        split_bytes=split_bytes({entry.key: entry for entry in weights["transformer"]}, tensor_plan),
        encoder_bytes=sizes["text_encoder"] + sizes["text_encoder_2"],
        vae_bytes=sizes["vae"],
        stored_dtype=stored_dtype(transformer, weights["transformer"]),
        version=folder_version(path),
    )


def _entries(folder: Path, stem: str) -> list[Entry]:
    """The tensors in the safetensors files of a component."""
    return [entry for file in weight_files(folder, stem) for entry in read_header(file).entries]


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
                f"'{model}' wants {'.'.join(map(one_line, value))} as its {one_line(name)}.",
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
                f"The {name} of '{model}' is a {one_line(config.get('_class_name'))}.",
                f"model_index.json and {name}/config.json must name the same known class.",
                f"Works here: {', '.join(classes)}.",
            )
        refuse_quantised(f"The {name} of '{model}'", config)
