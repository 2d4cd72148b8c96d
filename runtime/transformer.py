"""What one diffusion transformer on disk holds: a single file, or a diffusers component folder; no torch, no diffusers.

    keys, shapes and notes of the headers -> which family, config, weights by name -> what the planner needs

Everything that can be refused is refused here, on the host, before a rank reads a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .component import (
    file_version,
    folder_version,
    one_line,
    read_json,
    readable,
    refuse_quantised,
    weight_files,
)
from .families.family import Shapes
from .families.table import FAMILIES
from .foreign import refuse_other_formats
from .quantisation import find_weights
from .recognise import config_of, is_other_part, recognise
from .safetensors_header import Entry, Header, printable, read_bytes, read_headers
from .spec import ModelFacts, Refusal
from .transformer_config import DEFAULTS, TOKENS, constructor_arguments, count_heads
from .verified import TENSOR_CLASSES
from .weights_on_disk import split_bytes, stored_dtype


@dataclass(frozen=True)
class TransformerFile:
    """A transformer on disk, as its headers and its config tell.

    `family` is its name in `runtime/families`, "" for a folder of a class that none or several of them share.
    `config` are the diffusers class's constructor arguments: for a folder as its config.json has them. `shapes` are the
    weights only, under their own names: without the prefix they have in the file, other parts of an all-in-one
    checkpoint and quantisation notes. `layout` is whose names these are; where the authors use diffusers' own, those.
    """

    facts: ModelFacts
    family: str
    config: Mapping[str, Any]
    shapes: Shapes
    layout: Literal["original", "diffusers"]


def inspect_transformer(path: Path, tensor_plan: str = "", working: str = "") -> TransformerFile:
    """Read and check a safetensors file, or a folder with config.json and diffusion_pytorch_model*.safetensors.

    What the tensor axis divides is told by a user's own plan if there is one and the names are diffusers', else by the
    default rule. Raises Refusal, which names `working` as the families that can be used (all that are known if empty).
    """
    with readable(path):
        return _from_folder(path, tensor_plan) if path.is_dir() else _from_file(path, tensor_plan, working)


def _from_file(path: Path, tensor_plan: str, working: str) -> TransformerFile:
    refuse_other_formats(path)
    version = file_version(path)
    header = read_headers([path])
    family, prefix = recognise(path, {entry.key: entry.shape for entry in header.entries}, working)
    own = {entry.key: entry for entry in header.entries if not is_other_part(entry.key)}
    weights = _weights(own, header)
    _refuse_what_is_beside(path, prefix, weights)
    inside = {key[len(prefix) :]: entry for key, entry in weights.items()}
    shapes = {key: entry.shape for key, entry in inside.items()}
    config = {**DEFAULTS.get(family.model_class, {}), **config_of(path, family, shapes)}
    loaded = {key: one for key, one in inside.items() if not any(part in key for part in family.unused)}
    # A plan names modules of diffusers, which an original layout has under other names and in other pieces.
    plan = tensor_plan if family.diffusers_names else ""
    facts = _facts(path, f"'{printable(path.name)}'", family.model_class, config, loaded, plan, version)
    return TransformerFile(
        facts, family.name, config, shapes, "diffusers" if family.diffusers_names else "original"
    )


def _refuse_what_is_beside(path: Path, prefix: str, weights: Mapping[str, Entry]) -> None:
    if others := [key for key in weights if not key.startswith(prefix)]:
        raise Refusal(
            f"'{printable(path.name)}' holds '{printable(others[0])}' beside its transformer.",
            f"The transformer's names begin with '{prefix}', and leaving anything out could change the picture.",
            "Use the file as it was published; extensions such as LoRA or IP-Adapter are files of their own.",
        )


def _from_folder(path: Path, tensor_plan: str) -> TransformerFile:
    name = f"{one_line(path.parent.name)}/{one_line(path.name)}"
    belongs = (
        "A transformer's folder has config.json and diffusion_pytorch_model*.safetensors; in a pipeline's "
        "folder it is called transformer."
    )
    given = read_json(path / "config.json", f"'{name}' is not a transformer's folder.", belongs)
    class_name = given.get("_class_name")
    if not isinstance(class_name, str) or class_name not in TENSOR_CLASSES:
        raise _unknown_class(name, given)
    refuse_quantised(f"'{name}'", given)
    version = folder_version(path)
    config = constructor_arguments(f"'{name}'", class_name, given)
    header = read_headers(weight_files(path))
    weights = _weights({entry.key: entry for entry in header.entries}, header)
    facts = _facts(path, f"'{name}'", class_name, config, weights, tensor_plan, version)
    names = {family.name for family in FAMILIES if family.model_class == class_name}
    shapes = {key: entry.shape for key, entry in weights.items()}
    return TransformerFile(facts, names.pop() if len(names) == 1 else "", config, shapes, "diffusers")


def _unknown_class(name: str, config: Mapping[str, Any]) -> Refusal:
    """transformers' configs name their class under another key, as a list."""
    named = config.get("_class_name")
    if named is None and isinstance(config.get("architectures"), list):
        named = ", ".join(map(str, config["architectures"]))
    families = ", ".join(dict.fromkeys(family.name for family in FAMILIES))
    return Refusal(
        f"'{name}' is a {one_line(named)}, which is no diffusion transformer that is known here.",
        "Only classes that were verified against one process are loaded.",
        f"Works here: {families}; in all {len(TENSOR_CLASSES)} classes of diffusers.",
    )


def _weights(tensors: Mapping[str, Entry], header: Header) -> dict[str, Entry]:
    """`tensors` of a header without what describes how they are stored."""
    return {key: one.tensor for key, one in find_weights(tensors, header.metadata, read_bytes).items()}


def _facts(
    path: Path,
    what: str,
    class_name: str,
    config: Mapping[str, Any],
    weights: Mapping[str, Entry],
    tensor_plan: str,
    version: str,
) -> ModelFacts:
    """Messages call the model `what`."""
    heads, head_groups = count_heads(what, class_name, config)
    return ModelFacts(
        path=str(path),
        pipeline_class="",
        transformer_class=class_name,
        heads=heads,
        head_groups=head_groups,
        tokens=TOKENS.get(class_name, 0),
        transformer_bytes=sum(entry.nbytes for entry in weights.values()),
        split_bytes=split_bytes(weights, tensor_plan),
        encoder_bytes=0,
        vae_bytes=0,
        stored_dtype=stored_dtype(what, weights.values()),
        version=version,
    )
