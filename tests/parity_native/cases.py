"""What is compared: a sampling run of a checkpoint, and the same run without the feature under test."""

from __future__ import annotations

from dataclasses import dataclass

from tests.parity_native.graphs import Setup
from tests.parity_native.variants import Variant


@dataclass(frozen=True)
class Case:
    """One row in each layout.

    `without` is the same run without the feature: the distance between both, native, is how far dropping the feature
    would move the result. None stands for another order of the pictures in the batch. `core` cases also run in the
    layouts of which only a sample is taken. `refusable` cases may be refused instead (features that cannot be split).
    """

    variant: Variant
    name: str
    setup: Setup
    without: Setup | None
    dtype: str = "float32"
    core: bool = False
    refusable: bool = False


@dataclass(frozen=True)
class Family:
    """A family by its name in the product, and how far two programs may be apart in fp32 after a whole run."""

    name: str
    tolerance: float
    cases: tuple[Case, ...]
