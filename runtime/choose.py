"""Which layout the adaptive strategies take, and why in a sentence: pure, from the model and the devices alone.

What each kind of layout is good for is the table "Choosing a strategy" of diffusers' guide to distributed inference.
"""

from __future__ import annotations

from collections.abc import Sequence

from .accept import has_plan
from .room import Placement, Situation, holds, place, rank_bytes
from .spec import Device, ParallelSpec, divide
from .verified import ANY_TEXT_LENGTH

# From here on attention does more work than the weight matrices: 4 T d against 24 d² for each token of a block, so
# T = 6 d, which is 18 thousand at FLUX's d of 3072. Pictures of four megapixels come near it, video is beyond.
LONG_SEQUENCE = 16_384


def choose(situation: Situation, strategy: str) -> tuple[ParallelSpec, str]:
    """The layout for "auto", "prefer tensor" or "prefer context", and the reason.

    Never more ranks than devices, and never an axis that is not built. A tensor plan asks for the tensor axis.
    """
    placed, context = _tensor(situation), _context(situation)
    tensor = placed.spec.tensor
    if max(tensor, context) == 1:
        return ParallelSpec(), _why_one(situation)
    slow = linked(placed.devices) is False
    if context > 1 and (tensor == 1 or _sequence_first(situation, strategy, tensor, context, slow)):
        return ParallelSpec(ulysses=context), _why_context(situation, strategy, tensor, context)
    return ParallelSpec(tensor=tensor), _why_tensor(situation, strategy, tensor, context, slow)


def linked(devices: Sequence[Device]) -> bool | None:
    """Whether every card reaches every other directly; None if one does not tell.

    Unknown links are treated as fast, and the reason says nothing of them: a driver too old to tell must not make a
    machine with NVLink leave cards idle.
    """
    if any(card.peers is None for card in devices):
        return None
    wanted = {card.index for card in devices}
    return all(wanted - {card.index} <= set(card.peers or ()) for card in devices)


# ---- how far each axis goes


def _context(situation: Situation) -> int:
    """The most ranks that divide the sequence: on cards that hold all weights, and dividing the heads.

    Powers of two only: any other degree leaves a remainder of the 512 text tokens.
    """
    if not has_plan(situation, "ulysses") or situation.facts.transformer_class in ANY_TEXT_LENGTH:
        return 1
    whole = rank_bytes(situation.facts, situation.dtype, ParallelSpec())
    holding = sum(holds(device, whole) for device in situation.devices)
    degree = 1
    while degree * 2 <= holding and situation.facts.units % (degree * 2) == 0:
        degree *= 2
    return degree


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


def _sequence_first(situation: Situation, strategy: str, tensor: int, context: int, slow: bool) -> bool:
    """Whether dividing the sequence is better where both axes are possible."""
    if situation.tensor_plan or strategy == "prefer tensor":
        return False
    if strategy == "prefer context":
        return True
    if situation.on_cpu:
        return False
    # It exchanges far less than dividing the weights. Only twice the cards make up for that, and not over slow links.
    return slow or 2 * context > tensor


# ---- the reasons


def _why_one(situation: Situation) -> str:
    facts = situation.facts
    if len(situation.devices) == 1:
        return "there is only one device"
    if not has_plan(situation, "tensor") and not has_plan(situation, "ulysses"):
        return f"no division of {facts.transformer_class} is verified yet, so it runs on one device"
    if facts.units == 1:
        kind = "key/value" if facts.head_groups else "attention"
        return f"the model has a single {kind} head, which cannot be divided"
    return "the weights fit on one card, and no other has room for a share that helps"


def _why_context(situation: Situation, strategy: str, tensor: int, context: int) -> str:
    if strategy == "prefer context":
        return "context is preferred: every rank holds all weights and a part of the sequence"
    if tensor == 1:
        return "the weights of this model cannot be divided yet, so the sequence is"
    over = _over(situation, context)
    if 2 * context <= tensor:
        return f"the cards reach each other only through the host, so the sequence is divided{over}"
    # The planner knows neither CFG nor the batch, for which copies on each card (replica) would be better.
    return f"the weights fit on each card used, so the sequence is divided{over} for speed"


def _why_tensor(situation: Situation, strategy: str, tensor: int, context: int, slow: bool) -> str:
    divided = f"the weights are divided{_over(situation, tensor)}"
    whole = rank_bytes(situation.facts, situation.dtype, ParallelSpec())
    known = all(card.total_bytes for card in situation.devices)
    if situation.tensor_plan:
        return f"{divided} as the tensor plan says"
    if known and not any(holds(card, whole) for card in situation.devices):
        return f"the weights do not fit one card{_what_is_missing(situation, slow)}, so {divided}"
    if strategy == "prefer tensor":
        better = (
            ", though over the host dividing the sequence would be faster" if slow and context > 1 else ""
        )
        return f"tensor is preferred, so {divided}{better}"
    return f"{_why_not_context(situation, strategy, context)}, so {divided}"


def _what_is_missing(situation: Situation, slow: bool) -> str:
    """What would be better for weights that do not fit one card, if it were built."""
    if slow:
        return (
            " and the cards reach each other only through the host, where dividing layers would be better, "
            "which is not built yet"
        )
    if situation.facts.tokens >= LONG_SEQUENCE:
        return " and the sequence is long, where dividing both would be better, which is not built yet"
    return ""


def _why_not_context(situation: Situation, strategy: str, context: int) -> str:
    """Why `auto` and `prefer context` divide weights that one card could hold."""
    if situation.on_cpu and strategy == "auto":
        return "ranks on the CPU share one memory"
    if context > 1:
        return "the sequence can be divided over few of the cards only"
    if not has_plan(situation, "ulysses"):
        return "the sequence of this model cannot be divided yet"
    if situation.facts.transformer_class in ANY_TEXT_LENGTH:
        return "the sequence of this model cannot be divided for every prompt yet"
    if not situation.on_cpu and not all(card.total_bytes for card in situation.devices):
        return "not every card tells its memory"
    whole = rank_bytes(situation.facts, situation.dtype, ParallelSpec())
    if sum(holds(card, whole) for card in situation.devices) > 1:
        return f"ulysses cannot divide the {situation.facts.units} heads of the model evenly"
    return "only one card can hold all weights"


def _over(situation: Situation, degree: int) -> str:
    """On which part of the cards, if not on all."""
    cards = len(situation.devices)
    return f" over {degree} of the {cards} cards" if degree < cards else ""
