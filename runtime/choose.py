"""Which layout the adaptive strategies take, and why in a sentence: pure, from the model and the devices alone.

What each kind of layout is good for is the table "Choosing a strategy" of diffusers' guide to distributed inference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import msgspec

from .accept import has_plan, most_ulysses
from .room import Placement, Situation, holds, place, rank_bytes
from .spec import Device, ParallelSpec, divide

# From here on attention does more work than the weight matrices: 4 T d against 24 d² for each token of a block, so
# T = 6 d, which is 18 thousand at FLUX's d of 3072. Pictures of four megapixels come near it, video is beyond.
LONG_SEQUENCE = 16_384
# What a ring costs beside Ulysses on as many ranks: FLUX.1-dev on four cards takes 351 ms against 281 (L20) and 339
# against 259 (RTX 4090) in the tables of diffusers' guide. So a ring has to make up for that with more ranks.
_RING = Fraction(5, 4)
# Tokens of one rank whose attention takes as long as their keys and values take over the host. In 16 bits T tokens are
# 4 T d bytes and T² pairs 4 T² d operations, so T is the ratio of 100 TFLOP/s to 10 GB/s.
_HIDDEN = 10_000


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What each axis could do for a situation, as layouts of their own; one rank where it can do nothing."""

    tensor: Placement
    context: ParallelSpec
    both: ParallelSpec
    slow: bool  # the cards in question reach each other only through the host

    @property
    def divides(self) -> bool:
        return max(self.tensor.spec.world_size, self.context.world_size, self.both.world_size) > 1


def choose(situation: Situation, strategy: str) -> tuple[ParallelSpec, str]:
    """The layout for "auto", "prefer tensor" or "prefer context", and the reason.

    Never more ranks than devices, and never an axis that is not built. A tensor plan asks for the tensor axis.
    """
    choice = _possible(situation)
    if not choice.divides:
        return ParallelSpec(), _why_one(situation)
    if _takes_context(situation, strategy, choice):
        return choice.context, _why_context(situation, strategy, choice)
    if _takes_both(situation, strategy, choice):
        return choice.both, _why_both(situation, strategy, choice)
    return ParallelSpec(tensor=choice.tensor.spec.tensor), _why_tensor(situation, strategy, choice)


def linked(devices: Sequence[Device]) -> bool | None:
    """Whether every card reaches every other directly; None if one does not tell.

    Unknown links are treated as fast, and the reason says nothing of them: a driver too old to tell must not make a
    machine with NVLink leave cards idle.
    """
    if any(card.peers is None for card in devices):
        return None
    wanted = {card.index for card in devices}
    return all(wanted - {card.index} <= set(card.peers or ()) for card in devices)


def _takes_context(situation: Situation, strategy: str, choice: Choice) -> bool:
    """Whether the sequence alone is divided, on cards that hold all weights."""
    ranks, rival = choice.context.world_size, choice.tensor.spec.world_size
    if ranks == 1 or situation.tensor_plan and rival > 1:
        return False
    if rival == 1 and choice.both.world_size == 1:
        return True
    if strategy == "prefer tensor":
        return False
    if strategy == "prefer context":
        return True
    if situation.on_cpu:
        return False
    # It exchanges far less than dividing the weights. Only twice the cards make up for that; over slow links those
    # of both axes together.
    if choice.slow:
        return 2 * ranks > choice.both.world_size
    return 2 * ranks > max(rival, choice.both.world_size if _is_long(situation) else 1)


def _takes_both(situation: Situation, strategy: str, choice: Choice) -> bool:
    """Whether weights and sequence are divided, where one alone is not better.

    Each rank then exchanges less than if all divided the weights: the sums of the tensor axis run over a part of the
    tokens. Short sequences over fast links do without, unless the heads are too few for the cards: more of the cards'
    memory stays free.
    """
    both, tensor = choice.both.world_size, choice.tensor.spec.world_size
    if both == 1 or strategy == "prefer tensor":
        return False
    if strategy == "prefer context":
        return True
    if situation.on_cpu:
        return False
    return 2 * both > tensor if choice.slow or _is_long(situation) else both >= 2 * tensor


def _is_long(situation: Situation) -> bool:
    return situation.facts.tokens >= LONG_SEQUENCE


# ---- how far each axis goes


def _possible(situation: Situation) -> Choice:
    tensor = _tensor(situation)
    slow = linked(tensor.devices if tensor.spec.tensor > 1 else situation.devices) is False
    return Choice(
        tensor=tensor, context=_context(situation, slow), both=_both(situation, tensor, slow), slow=slow
    )


def _tensor(situation: Situation) -> Placement:
    """As many ranks as help: the fullest one takes the time, so of layouts with equally full ones the smallest.

    A card that could take less than half of an equal share costs more in exchanges than it takes off the others. It
    is left out, unless there is no room without it.
    """
    units = situation.facts.units
    most = min(len(situation.devices), units) if has_plan(situation, "tensor") else 1
    placed = [place(situation, ParallelSpec(tensor=degree)) for degree in range(1, most + 1)]
    fitting = [one for one in placed if one.fits]
    if not fitting:
        return placed[-1]  # is refused with what is missing
    counts = {one: divide(units, one.spec.shares) for one in fitting}
    helping = [one for one in fitting if 2 * min(counts[one]) * one.spec.tensor >= units]
    return min(helping or fitting, key=lambda one: (max(counts[one]), one.spec.tensor))


def _context(situation: Situation, slow: bool) -> ParallelSpec:
    """The sequence over the cards that hold all weights."""
    if not has_plan(situation, "ulysses"):
        return ParallelSpec()
    whole = rank_bytes(situation.facts, situation.dtype, ParallelSpec())
    holding = sum(holds(device, whole) for device in situation.devices)
    return _quickest(situation, _divided_sequences(situation, ParallelSpec(), holding, slow))


def _both(situation: Situation, tensor: Placement, slow: bool) -> ParallelSpec:
    """Weights and sequence: of layouts that take equally long the one with the smallest tensor degree.

    On equal shares of the largest cards. Weights that may not fit, of cards that do not tell their memory, are left
    to the tensor axis.
    """
    if not (has_plan(situation, "tensor") and has_plan(situation, "ulysses") and tensor.fits):
        return ParallelSpec()
    found: list[ParallelSpec] = []
    count = len(situation.devices)
    for degree in range(2, min(count // 2, situation.facts.units) + 1):
        for spec in _divided_sequences(situation, ParallelSpec(tensor=degree), count, slow):
            need = rank_bytes(situation.facts, situation.dtype, spec)
            if spec.context > 1 and all(holds(card, need) for card in place(situation, spec).devices):
                found.append(spec)
    return _quickest(situation, found)


def _divided_sequences(
    situation: Situation, base: ParallelSpec, ranks: int, slow: bool
) -> Iterator[ParallelSpec]:
    """`base` with the sequence over every possible number of ranks, in every way that suits the links."""
    most_heads = most_ulysses(situation, base)
    for context in range(1, ranks // base.tensor + 1):
        in_ring = slow and _hides_a_ring(situation, context)
        for ulysses in range(1, 1 + (1 if in_ring else min(context, most_heads))):
            if context % ulysses == 0:
                yield msgspec.structs.replace(base, ulysses=ulysses, ring=context // ulysses)


def _hides_a_ring(situation: Situation, ranks: int) -> bool:
    """Whether over the host a ring of a long sequence waits less than Ulysses does.

    Of T tokens over n ranks a ring sends (n - 1) T / n twice (keys and values), while it attends to T / n; Ulysses
    sends T / n four times, less its own part, and waits for it. With x = T / n / `_HIDDEN`, the part of a step's
    exchange that its work hides, the ring waits (n - 1) (1 - x) / n against 2 (n - 1) / n², which is less from
    x = 1 - 2 / n on. That is what diffusers says of both: a ring for long sequences and little bandwidth, Ulysses
    for moderate ones over good links (`ContextParallelConfig`).
    """
    return _is_long(situation) and situation.facts.tokens >= _HIDDEN * (ranks - 2)


def _quickest(situation: Situation, specs: Iterator[ParallelSpec] | Sequence[ParallelSpec]) -> ParallelSpec:
    """The layout whose fullest rank has least to do, then the one with the fewest cuts through the weights."""
    return min(
        specs, key=lambda spec: (work(situation, spec), spec.tensor, spec.ring), default=ParallelSpec()
    )


def work(situation: Situation, spec: ParallelSpec) -> Fraction:
    """What the fullest rank does in a step, as a part of the weight matrices' work on one rank.

    Ulysses divides attention in whole heads (groups of heads that share keys and values), a ring by tokens. The
    longer the sequence, the more attention counts. Exchanges count for a ring only, as a part more of its work.
    """
    units = situation.facts.units
    heads = max(divide(units, spec.shares))
    matrices = Fraction(heads, units * spec.context)
    attention = Fraction(math.ceil(heads / spec.ulysses), units * spec.ring)
    length = Fraction(situation.facts.tokens, LONG_SEQUENCE)
    return (matrices + length * attention) * (_RING if spec.ring > 1 else 1)


# ---- the reasons


def _why_one(situation: Situation) -> str:
    facts = situation.facts
    if len(situation.devices) == 1:
        return "there is only one device"
    if not has_plan(situation, "tensor") and not has_plan(situation, "ulysses"):
        return f"no division of {facts.transformer_class} is verified yet, so it runs on one device"
    if facts.units == 1:
        kind = "key/value" if facts.head_groups else "attention"
        rest = (
            "no other card can hold all weights" if has_plan(situation, "ulysses") else "it cannot be divided"
        )
        return f"the model has a single {kind} head, and {rest}"
    return "the weights fit on one card, and no other has room for a share that helps"


def _why_context(situation: Situation, strategy: str, choice: Choice) -> str:
    ranks, rival = choice.context.world_size, choice.tensor.spec.world_size
    how = _how(situation, choice.context, choice.slow)
    over = _over(situation, ranks)
    if strategy == "prefer context":
        return f"context is preferred: every rank holds all weights and a part of the sequence{how}"
    if rival == 1:
        return f"the weights of this model cannot be divided, so the sequence is{over}{how}"
    if choice.slow and 2 * ranks <= rival:
        return f"the cards reach each other only through the host, so the sequence is divided{over}{how}"
    # The planner knows neither CFG nor the batch, for which copies on each card (replica) would be better.
    return f"the weights fit on each card used, so the sequence is divided{over} for speed{how}"


def _why_both(situation: Situation, strategy: str, choice: Choice) -> str:
    over = _over(situation, choice.both.world_size)
    how = _how(situation, choice.both, choice.slow)
    if situation.tensor_plan:
        return f"the weights are divided as the tensor plan says, and the sequence beside them{over}{how}"
    if strategy == "prefer context":
        why = _why_not_context(situation, strategy, choice)
        return f"context is preferred, but {why}, so they and the sequence are divided{over}{how}"
    if choice.slow:
        why = "the cards reach each other only through the host"
        return f"{why}, so weights and sequence are divided{over}, which exchanges least{how}"
    why = _why_not_context(situation, strategy, choice)
    if _is_long(situation):
        return f"the sequence is long and {why}, so both are divided{over}{how}"
    heads = situation.facts.units
    return f"{why} and {heads} heads are few for the cards, so the sequence is divided too{over}{how}"


def _why_tensor(situation: Situation, strategy: str, choice: Choice) -> str:
    divided = f"the weights are divided{_over(situation, choice.tensor.spec.world_size)}"
    if situation.tensor_plan:
        return f"{divided} as the tensor plan says"
    if _fits_no_card(situation):
        better = ""
        if choice.slow:
            better = (
                " and the cards reach each other only through the host, where dividing layers would be better, "
                "which is not built yet"
            )
        return f"the weights do not fit one card{better}, so {divided}"
    if strategy == "prefer tensor":
        better = (
            ", though over the host dividing the sequence would be faster"
            if choice.slow and choice.context.world_size > 1
            else ""
        )
        return f"tensor is preferred, so {divided}{better}"
    return f"{_why_not_context(situation, strategy, choice)}, so {divided}"


def _why_not_context(situation: Situation, strategy: str, choice: Choice) -> str:
    """Why `auto` and `prefer context` divide weights."""
    if situation.on_cpu and strategy == "auto":
        return "ranks on the CPU share one memory"
    if _fits_no_card(situation):
        return "the weights do not fit one card"
    if not has_plan(situation, "ulysses"):
        return "the sequence of this model cannot be divided yet"
    if choice.context.world_size > 1:
        return "few of the cards can hold all weights"
    if not situation.on_cpu and not all(card.total_bytes for card in situation.devices):
        return "not every card tells its memory"
    return "only one card can hold all weights"


def _fits_no_card(situation: Situation) -> bool:
    whole = rank_bytes(situation.facts, situation.dtype, ParallelSpec())
    known = all(card.total_bytes for card in situation.devices)
    return known and not any(holds(card, whole) for card in situation.devices)


def _how(situation: Situation, spec: ParallelSpec, slow: bool) -> str:
    """Why a ring, where there is one."""
    if spec.ring == 1:
        return ""
    if slow and _hides_a_ring(situation, spec.context):
        return ", in a ring, whose exchanges hide behind the work of a long sequence"
    heads = most_ulysses(situation, spec)
    few = f"{heads} heads do" if heads > 1 else "a single head does"
    return f", with a ring, for {few} not divide over {spec.context} ranks"


def _over(situation: Situation, degree: int) -> str:
    """On which part of the cards, if not on all."""
    cards = len(situation.devices)
    return f" over {degree} of the {cards} cards" if degree < cards else ""
