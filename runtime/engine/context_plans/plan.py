"""The vocabulary of context plans: where a transformer is cut along its sequences.

A plan is data: which tensors are cut on the way into a module or out of it, which results are joined, and which
attentions see cut sequences. In patterns * stands for a number, a leading ** for any beginning of a path, and -1 for
the last of a list. Names of sequences are free; those of one name have one length in a forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cut:
    """Dimension `dim` runs over the tokens of the sequence `of`; with `ndim`, only of tensors that have so many.

    With `spreads`, a tensor of a single token holds for all of them and stays as it is.
    """

    dim: int
    of: str
    ndim: int = 0
    spreads: bool = False


@dataclass(frozen=True)
class Attends:
    """The sequences an attention joins, in its own order: those of its queries, and those of its keys."""

    queries: tuple[str, ...]
    keys: tuple[str, ...]


def joint(*names: str) -> Attends:
    """Queries and keys are of the same sequences."""
    return Attends(names, names)


@dataclass(frozen=True)
class ContextPlan:
    """How one class is divided.

    `inputs`: module -> argument -> cut (of a list or tuple, every tensor). `outputs` and `joins`: module -> place in
    its result (0 for a single tensor) -> cut. `attentions`: module -> what it attends to. `whole`: attentions whose
    keys are not cut, so that this rank's queries need nobody else's: cross attention, refiners outside the blocks.
    `key_masks`: module -> argument -> the sequence whose padding it marks ([B, tokens], True for tokens that count).
    It is for models that put their mask together from cut sequences: they get none, and the attentions that see the
    sequence get it whole.
    """

    inputs: Mapping[str, Mapping[str, Cut]]
    joins: Mapping[str, Mapping[int, Cut]]
    attentions: Mapping[str, Attends]
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    whole: Sequence[str] = ()
    key_masks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
