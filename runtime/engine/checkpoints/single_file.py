"""Opens one safetensors file in an architecture's original layout, as its authors and ComfyUI publish it.

The header alone decides: prefix, family, config and where each parameter lies. No weight is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...safetensors_header import printable
from ...spec import Refusal
from .conversion import convert
from .families.family import Family
from .families.table import FAMILIES
from .files import Stored, open_files
from .foreign import adapter_kind, other_kind, refuse_other_formats
from .fp8 import dequantised
from .source import Checkpoint, Shapes, WeightSource

# Where trainers and ComfyUI put a diffusion transformer inside a file; compare `unet_prefix_from_state_dict` in
# ComfyUI's model_detection. The longest comes first, the bare layout last.
PREFIXES = (
    "model.diffusion_model.",
    "diffusion_model.",
    "model.model.",
    "transformer.",
    "model.",
    "net.",
    "",
)
# The other parts of an all-in-one checkpoint, which are left aside.
_OTHER_PARTS = (
    "first_stage_model.",
    "vae.",
    "audio_vae.",
    "vocoder.",
    "text_encoders.",
    "text_encoder.",
    "text_embedding_projection.",
    "cond_stage_model.",
    "conditioner.",
    "model_ema.",
)


def open_single_file(path: Path) -> Checkpoint:
    """Open `path` and tell what it is. Reads the header and the few bytes of quantisation notes, no weight.

    `sources` are in the order in which they lie in the file; a key that belongs to no parameter keeps its original
    name. Raises Refusal for another format, a damaged file, another kind of model, and an unknown architecture.
    """
    refuse_other_formats(path)
    stored = open_files([path])
    own = {key: tensor for key, tensor in stored.tensors.items() if not key.startswith(_OTHER_PARTS)}
    family, prefix = _recognised(path, _shapes(stored.tensors), _shapes(own))
    weights = dequantised(Stored(own, stored.metadata))
    inside = {key[len(prefix) :]: source for key, source in weights.items() if key.startswith(prefix)}
    beside = {key: source for key, source in weights.items() if not key.startswith(prefix)}
    config = _config(path, family, _shapes(inside))
    sources = convert(family, config, inside)
    if twice := sources.keys() & beside.keys():
        raise Refusal(
            f"{sources[min(twice)].where} and {beside[min(twice)].where} are the same parameter.",
            "One of the two would be lost.",
            "Use the file as its authors published it.",
        )
    return Checkpoint(family.model_class, config, {**sources, **beside}, family.name)


def _shapes(sources: Mapping[str, WeightSource]) -> Shapes:
    return {key: tuple(source.shape) for key, source in sources.items()}


def _recognised(path: Path, shapes: Shapes, own: Shapes) -> tuple[Family, str]:
    """The family of a file, and the prefix under which it lies there; `own` lacks the keys of other parts."""
    if adapter_kind(shapes) is None:
        for prefix in PREFIXES:
            inside = {key[len(prefix) :]: shape for key, shape in own.items() if key.startswith(prefix)}
            for family in FAMILIES if inside else ():
                if family.recognises(inside):
                    return family, prefix
    raise _unknown(path, shapes)


def _config(path: Path, family: Family, shapes: Shapes) -> dict[str, Any]:
    try:
        return family.config(shapes)
    except (ValueError, KeyError, IndexError, ZeroDivisionError) as error:
        raise Refusal(
            f"'{printable(path.name)}' is a {family.name} model of a kind that cannot be loaded.",
            f"The reason: {printable(error)}.",
            "Use the model as its authors published it, or as a diffusers folder.",
        ) from error


def _unknown(path: Path, shapes: Shapes) -> Refusal:
    known = ", ".join(dict.fromkeys(family.name for family in FAMILIES))
    name = printable(path.name)
    if what := adapter_kind(shapes) or other_kind(shapes):
        return Refusal(
            f"'{name}' is {what}, not a diffusion transformer.",
            "Its keys show it; this loader takes the diffusion model only.",
            f"Choose a file of one of these: {known}.",
        )
    return Refusal(
        f"'{name}' is of no architecture that is known here.",
        f"It has keys such as {_some(shapes)}.",
        f"Known are: {known}. For any other, use its diffusers folder.",
    )


def _some(shapes: Mapping[str, object]) -> str:
    keys = list(shapes)
    return ", ".join(f"'{printable(key)}'" for key in keys[:: max(1, len(keys) // 4)][:4]) or "none at all"
