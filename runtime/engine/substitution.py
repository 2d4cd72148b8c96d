"""Where one call of a transformer differs from what the model of diffusers would compute: inputs, answers, blocks.

The replaced forwards are put in place once, before context-parallel hooks, so that what a module answers is divided
over the sequence as its own answer would be. They cost a dictionary lookup when nothing is replaced.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


class Substitutions:
    """What the running call replaces, by module path. Empty between calls."""

    def __init__(self) -> None:
        self.inputs: Mapping[str, torch.Tensor] = {}
        self.outputs: Mapping[str, torch.Tensor | tuple[torch.Tensor, ...]] = {}
        self.skipped: Mapping[str, tuple[str, ...]] = {}
        self.paths: set[str] = set()

    def install(self, model: nn.Module, patterns: Sequence[str]) -> None:
        """Make the modules that `patterns` name replaceable; one * stands for every element of a list.

        Paths that this model does not have are no error: which modules exist depends on its config.
        """
        for path, module in model.named_modules():
            if any(_matches(pattern, path) for pattern in patterns):
                self.paths.add(path)
                module.forward = self._replaceable(path, module.forward)

    def _replaceable(self, path: str, original: Any) -> Any:
        parameters = inspect.signature(original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if path in self.outputs:
                return self.outputs[path]
            if path in self.skipped:
                given = parameters.bind(*args, **kwargs).arguments
                values = tuple(given[name] for name in self.skipped[path])
                return values if len(values) > 1 else values[0]
            if path in self.inputs:
                args = (self.inputs[path], *args[1:])
            return original(*args, **kwargs)

        return forward

    def check(self) -> None:
        """Raise ValueError if a call names a module that cannot be replaced: it would be computed as usual."""
        named = {*self.inputs, *self.outputs, *self.skipped}
        if missing := sorted(named - self.paths):
            raise ValueError(f"the model has no replaceable module {missing[0]}")

    def clear(self) -> None:
        self.inputs, self.outputs, self.skipped = {}, {}, {}


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path) is not None
