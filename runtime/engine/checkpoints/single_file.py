"""Opens one safetensors file in an architecture's original layout, as its authors and ComfyUI publish it.

The header alone decides: prefix, family, config and where each parameter lies. No weight is read here.
"""

from __future__ import annotations

from pathlib import Path

from ...foreign import refuse_other_formats
from ...recognise import config_of, is_other_part, recognise
from ...spec import Refusal
from .conversion import convert
from .files import Stored, open_files
from .fp8 import dequantised
from .source import Checkpoint


def open_single_file(path: Path) -> Checkpoint:
    """Open `path` and tell what it is. Reads the header and the few bytes of quantisation notes, no weight.

    `sources` are in the order in which they lie in the file; a key that belongs to no parameter keeps its original
    name. Raises Refusal for another format, a damaged file, another kind of model, and an unknown architecture.
    """
    refuse_other_formats(path)
    stored = open_files([path])
    family, prefix = recognise(path, {key: tensor.shape for key, tensor in stored.tensors.items()})
    own = {key: tensor for key, tensor in stored.tensors.items() if not is_other_part(key)}
    weights = dequantised(Stored(own, stored.metadata))
    inside = {key[len(prefix) :]: source for key, source in weights.items() if key.startswith(prefix)}
    beside = {key: source for key, source in weights.items() if not key.startswith(prefix)}
    config = config_of(path, family, {key: tuple(source.shape) for key, source in inside.items()})
    sources = convert(family, config, inside)
    if twice := sources.keys() & beside.keys():
        raise Refusal(
            f"{sources[min(twice)].where} and {beside[min(twice)].where} are the same parameter.",
            "One of the two would be lost.",
            "Use the file as its authors published it.",
        )
    return Checkpoint(family.model_class, config, {**sources, **beside}, family.name)
