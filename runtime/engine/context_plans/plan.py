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

    With `spreads`, a tensor of a single token holds for all of them and stays as it is. With `pads`, it is the
    sequence's padding mask ([B, tokens], True for tokens that count), for models whose attention makes its own mask
    of it: the attentions that see the sequence get it whole, in the place of what the model makes of one that hides
    nothing of this rank's part. With `leads`, the dimension begins with the sequence, of which a part was cut before,
    and goes on with tokens that are this rank's already. With `everywhere`, the model needs a token on every rank: it
    infers sizes from lengths, which it cannot from none, or counts tokens from the end.
    """

    dim: int
    of: str
    ndim: int = 0
    spreads: bool = False
    pads: bool = False
    leads: bool = False
    everywhere: bool = False


@dataclass(frozen=True)
class Count:
    """An argument that is a number: so many tokens at the beginning of the sequence `of`, or at its end.

    It becomes the number of those that this rank has.
    """

    of: str
    last: bool = False


@dataclass(frozen=True)
class Whole:
    """An argument that a module among the divided ones needs whole: it is joined on the way in."""

    cut: Cut


# To an argument. Of several, each is for one place in a list or tuple; None leaves it as it is.
Change = Cut | Count | Whole | tuple[Cut | None, ...]


@dataclass(frozen=True)
class Attends:
    """The sequences an attention joins, in its own order: those of its queries, and those of its keys.

    `mask` names the argument with its mask, [B, queries, keys] or four-dimensional, where the module would prepare it
    by the lengths it sees, which are this rank's: it then gets none, and the whole mask is taken. `by_sample`: it
    attends in one sample of the batch after the other, and the padding mask is that sample's.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    mask: str = ""
    by_sample: bool = False


def joint(*names: str) -> Attends:
    """Queries and keys are of the same sequences."""
    return Attends(names, names)


@dataclass(frozen=True)
class ContextPlan:
    """How one class is divided.

    `inputs`: module -> argument -> how it changes (in a list, tuple or dict, every tensor). `outputs` and `joins`:
    module -> place in its result (0 for a single tensor) -> cut. `attentions`: module -> what it attends to. `whole`:
    attentions whose keys are not cut, so that this rank's queries need nobody else's: cross attention, refiners outside
    the blocks. `refuses`: module -> arguments that a divided model does not take.
    """

    inputs: Mapping[str, Mapping[str, Change]]
    joins: Mapping[str, Mapping[int, Cut]]
    attentions: Mapping[str, Attends]
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    whole: Sequence[str] = ()
    refuses: Mapping[str, Sequence[str]] = field(default_factory=dict)
