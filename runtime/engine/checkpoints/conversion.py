"""Runs diffusers' own single-file converters over lazy tensors: original names in, diffusers names out, nothing read.

Which converter belongs to a class stands in diffusers' table of loadable classes; a family's own `convert` is put
around it where it misses a variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

from ...families.family import Converter, Family, Tensors
from ...safetensors_header import printable
from ...spec import Refusal
from .lazy import LazyTensor
from .source import Sources


def convert(family: Family, config: Mapping[str, Any], original: Sources) -> Sources:
    """`original` (keys without prefix) under the parameter names of the family's class, in the order of `original`.

    A key that the converter does not know stays under its original name, so that whoever compares the result with
    the model sees it. Raises Refusal when the converter needs a key that is missing, or computes with weights.
    """
    original = {key: one for key, one in original.items() if not any(part in key for part in family.unused)}
    lazy: Tensors = {key: LazyTensor.of(source) for key, source in original.items()}
    upstream = _upstream(family.model_class, config)
    try:
        converted = dict(family.convert(upstream, lazy) if family.convert else upstream(lazy))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Refusal(
            f"This {family.name} file cannot be converted.",
            f"diffusers' converter stops with {type(error).__name__}: {printable(error)}.",
            "The file is not complete, or is a variant that diffusers does not know; use a diffusers folder.",
        ) from error
    used = {id(source) for tensor in converted.values() for source in tensor.sources}
    for key, source in original.items():
        if id(source) in used:
            continue
        if key in converted:
            raise Refusal(
                f"{source.where} and {converted[key].where} are the same parameter.",
                "diffusers' converter gives both one name, so one of the two would be lost.",
                "Use the file as its authors published it.",
            )
        converted[key] = LazyTensor.of(source)
    places = {id(source): number for number, source in enumerate(original.values())}
    return dict(sorted(converted.items(), key=lambda item: min(places[id(one)] for one in item[1].sources)))


def _upstream(model_class: str, config: Mapping[str, Any]) -> Converter:
    """diffusers' converter of a class; for a class that diffusers has none for, the tensors as they are."""
    entry = SINGLE_FILE_LOADABLE_CLASSES.get(model_class)
    if entry is None:
        return dict

    def converter(tensors: Tensors) -> Tensors:
        return entry["checkpoint_mapping_fn"](checkpoint=tensors, config=dict(config))

    return converter
