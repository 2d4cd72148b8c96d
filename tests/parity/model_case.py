"""What a transformer class needs to be compared: a tiny config, one forward's inputs, and its full-size config."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch


class Draw:
    """Numbers and tensors drawn from one seed."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        """Between `low` and `high`, both included."""
        return self._random.randint(low, high)

    def odd(self, low: int, high: int) -> int:
        return self._random.choice([n for n in range(low, high + 1) if n % 2])

    def choice(self, *options: Any) -> Any:
        return self._random.choice(options)

    def heads(self) -> int:
        """A head count that four ranks can share, evenly or not."""
        return self._random.choice((4, 5, 6, 7, 8, 9))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)

    def timestep(self, batch: int, high: float = 1000.0) -> torch.Tensor:
        """[batch], a different one for each sample."""
        return torch.rand(batch, generator=self._generator) * high

    def key_mask(self, batch: int, length: int) -> torch.Tensor:
        """[batch, length] bool, True for tokens that count; every row ends in padding of another length."""
        lengths = self._random.sample(range(length // 2, length), batch)
        return torch.arange(length)[None] < torch.tensor(lengths)[:, None]


@dataclass(frozen=True)
class ModelCase:
    """A transformer class of diffusers at a tiny size, and at its full one.

    `config` draws the constructor's arguments, `inputs` one forward's keyword arguments for a model of that config
    (batch of two, odd lengths, a mask where the family takes one). `full` are the constructor's arguments of the
    published model where they are not the class's defaults. `rounds` says that the forward rounds to bfloat16 on the
    way whatever its dtype: a difference in the last bit then becomes a bfloat16 step, so the rounding is taken out on
    both sides. `variant` names what a case fixes that is otherwise drawn, or hardly ever is.
    """

    name: str
    config: Callable[[Draw], dict[str, Any]]
    inputs: Callable[[Draw, Any], dict[str, Any]]  # second argument: the model's `config`
    full: Mapping[str, Any] = field(default_factory=dict)
    rounds: bool = False
    variant: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} ({self.variant})" if self.variant else self.name

    def run(self, model: Any, inputs: dict[str, Any]) -> Any:
        with mock.patch.object(torch, "bfloat16", torch.float32) if self.rounds else nullcontext():
            return model(**inputs)
