"""What is known of an architecture's original layout. Pure Python: no torch, no diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]  # key in a file, prefix removed -> shape
Tensors = dict[str, Any]  # key -> tensor (or what stands for one while a conversion is traced)
Converter = Callable[[Tensors], Tensors]  # original names in, diffusers names out; may empty what it is given


@dataclass(frozen=True)
class Family:
    """An architecture in its original layout (the key names its authors and ComfyUI use).

    `recognises` looks at keys and shapes with the prefix removed. `config` gives the keyword arguments of the
    diffusers class's constructor, all of them that the shapes decide or that differ between published variants;
    it raises ValueError with a reason for a variant that cannot be told or is not supported.

    `convert` exists only where diffusers' own converter misses a variant or hard-codes a size: it takes that converter
    (its other arguments bound already) and the tensors, prefix removed, and usually puts a few names right before or
    after calling it. `unused` are parts of keys of weights that the diffusers model does without: made anew from the
    config, for training only, or another component's. `diffusers_names`: every file of the family has the names that
    the diffusers class gives its parameters.
    """

    name: str  # as people say it: "FLUX.1", "Wan 2.1 / 2.2"
    model_class: str  # the diffusers class
    recognises: Callable[[Shapes], bool]
    config: Callable[[Shapes], dict[str, Any]]
    convert: Callable[[Converter, Tensors], Tensors] | None = None
    unused: tuple[str, ...] = ()
    diffusers_names: bool = False
