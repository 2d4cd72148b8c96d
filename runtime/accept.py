"""Which layouts are accepted, and why others are refused: the one place that says so.

A refusal's last line is computed: what it names would have been accepted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from .room import Situation, available, held_dtype, largest, place, rank_bytes, too_small, usable
from .spec import AXES, Device, Layout, ParallelSpec, Refusal, divide, in_gigabytes
from .verified import CONTEXT_CLASSES, TENSOR_CLASSES

_NOT_BUILT = {
    "stage": "consecutive layers per rank (stage) is not built yet; tensor also divides the weights",
}
_MOST_RANKS = 64  # of any suggestion: as many as the Parallel Config can ask for
Problem = tuple[str, str]  # what cannot be done, and why


def check_degrees(spec: ParallelSpec) -> None:
    """Refuse degrees that no model could have: below one, of axes that are not built, without a share for each."""
    degrees = spec.degrees()
    for axis in AXES:
        if degrees[axis] < 1:
            raise Refusal(
                f"{axis} {degrees[axis]} is no degree.", "A degree counts ranks.", f"Works here: {axis} 1."
            )
        if axis in _NOT_BUILT and degrees[axis] > 1:
            missing, other = _NOT_BUILT[axis].split(";")
            raise Refusal(
                f"{axis} {degrees[axis]} cannot be used.",
                f"It would be ignored otherwise: {missing}.",
                f"Works here: {axis} 1;{other}.",
            )
    if spec.tensor_shares and (len(spec.tensor_shares) != spec.tensor or min(spec.tensor_shares) < 1):
        raise Refusal(
            f"tensor {spec.tensor} cannot be divided in shares of {', '.join(map(str, spec.tensor_shares))}.",
            "Every rank of the tensor axis has one share, and it is at least 1.",
            f"Works here: {', '.join('1' * spec.tensor)}, or no shares.",
        )


def accept(situation: Situation, spec: ParallelSpec, reason: str) -> Layout:
    """The layout for this model on these devices, with weighted shares where equal ones have no room, or Refusal."""
    check_degrees(spec)
    problem = problem_of(situation, spec)
    if problem:
        raise Refusal(*problem, f"Works instead: {_instead(situation, spec)}.")
    placed = place(situation, spec)
    return Layout(spec=placed.spec, devices=placed.devices, reason=reason + placed.words)


def has_plan(situation: Situation, axis: str) -> bool:
    """Whether the model was verified on this axis. A user's own plan changes what is divided, not what is verified.

    The context axes, ring and ulysses, go together: they share one plan and one attention.
    """
    classes = TENSOR_CLASSES if axis == "tensor" else CONTEXT_CLASSES
    return situation.facts.transformer_class in classes


def most_ulysses(situation: Situation, spec: ParallelSpec) -> int:
    """The largest ulysses degree beside the tensor axis of `spec`: the heads of the rank that has fewest of them."""
    return min(divide(situation.facts.units, spec.shares))


def problem_of(situation: Situation, spec: ParallelSpec) -> Problem | None:
    """The first thing that is wrong with well-formed degrees; None if they are accepted."""
    checks = (_copies_of_a_pipeline, _too_many_ranks, _without_plan, _without_heads, _without_room)
    return next((problem for check in checks if (problem := check(situation, spec))), None)


def _copies_of_a_pipeline(situation: Situation, spec: ParallelSpec) -> Problem | None:
    if spec.replica == 1 or not situation.facts.pipeline_class:
        return None
    return (
        f"replica {spec.replica} cannot be used with a pipeline.",
        "Copies share the calls of one step: CFG's two, or a batch; the pipeline nodes make one. "
        "Load Diffusion Model (Sharded) takes it.",
    )


def _too_many_ranks(situation: Situation, spec: ParallelSpec) -> Problem | None:
    count = len(situation.devices)
    if spec.world_size <= count:
        return None
    kind = "CPU rank" if situation.on_cpu else "GPU"
    return (
        f"{spec.describe()} needs {spec.world_size} devices; here {'is' if count == 1 else 'are'} {count}.",
        f"Every rank owns a device of its own, and {count} {kind}{'s' * (count > 1)} can be used for it.",
    )


def _without_plan(situation: Situation, spec: ParallelSpec) -> Problem | None:
    for axis in ("tensor", "ulysses", "ring"):
        if spec.degrees()[axis] > 1 and not has_plan(situation, axis):
            return (
                f"{situation.facts.transformer_class} cannot run with {axis} {spec.degrees()[axis]}.",
                f"There is no plan for its {axis} axis that was verified against one process.",
            )
    return None


def _without_heads(situation: Situation, spec: ParallelSpec) -> Problem | None:
    facts = situation.facts
    kind = "key/value head" if facts.head_groups else "attention head"
    if spec.tensor > facts.units:
        return (
            f"tensor {spec.tensor} is more than {_count(facts.units, kind)} of this model.",
            f"Weights are divided by whole {kind}s, and every rank needs at least one.",
        )
    most = most_ulysses(situation, spec)
    if spec.ulysses > most:
        whose = f"that tensor {spec.tensor} leaves a rank" if spec.tensor > 1 else "of this model"
        return (
            f"ulysses {spec.ulysses} is more than {_count(most, kind)} {whose}.",
            f"Under ulysses every rank attends with whole {kind}s, at least one; a ring needs none of its own.",
        )
    return None


def _count(number: int, thing: str) -> str:
    return f"the {number} {thing}s" if number > 1 else f"the one {thing}"


def _without_room(situation: Situation, spec: ParallelSpec) -> Problem | None:
    placed = place(situation, spec)
    if placed.fits:
        return None
    card, need = too_small(situation, placed.spec, placed.devices)[0]
    return (
        f"{spec.describe()} needs {in_gigabytes(need)} for the weights of one rank; {card.label} "
        f"has {in_gigabytes(card.total_bytes)}{_taken(card)}.",
        "A rank's weights stay on its card and may take 85 % of it: the pictures need the rest.",
    )


def _taken(card: Device) -> str:
    taken = card.total_bytes - available(card)
    return f", of which other programs hold {taken / 2**30:.0f}" if taken else ""


def _instead(situation: Situation, spec: ParallelSpec) -> str:
    """What would be accepted: the two nearest layouts, first of the kind asked for, else other weights or cards."""
    others = sorted(candidates(situation, spec), key=lambda one: _distance(one, spec))
    kinds = dict.fromkeys((_kind(spec), ("tensor",), ("context",), ("tensor", "context")))
    nearest = (
        next((one for one in others if _kind(one) == kind and not problem_of(situation, one)), None)
        for kind in kinds
    )
    found = [one.describe() for one in nearest if one][:2]
    if found:
        return ", or ".join(found)
    if not problem_of(situation, ParallelSpec()):
        return "one rank"
    if held_dtype(situation.facts, situation.dtype) == "float32":
        half = msgspec.structs.replace(situation, dtype="bfloat16")
        return f"dtype bfloat16 with {_instead(half, spec)}"
    return _larger_machine(situation)


def candidates(situation: Situation, spec: ParallelSpec) -> Iterator[ParallelSpec]:
    """All layouts of more than one rank on these devices; with copies only if `spec` has some."""
    most = min(len(situation.devices), _MOST_RANKS)
    for replica in range(1, most + 1 if spec.replica > 1 else 2):
        for tensor in range(1, most // replica + 1):
            for ulysses in range(1, most // (replica * tensor) + 1):
                for ring in range(1, most // (replica * tensor * ulysses) + 1):
                    if max(replica, tensor, ulysses, ring) > 1:
                        yield ParallelSpec(replica=replica, tensor=tensor, ulysses=ulysses, ring=ring)


def _kind(spec: ParallelSpec) -> tuple[str, ...]:
    """What a layout divides."""
    return tuple(name for name in ("replica", "tensor", "context") if getattr(spec, name) > 1)


def _distance(one: ParallelSpec, other: ParallelSpec) -> tuple[int, ...]:
    """For choosing the nearest: by the number of ranks, then the larger, then the one that keeps most degrees."""
    apart = (abs(getattr(one, axis) - getattr(other, axis)) for axis in ("replica", "tensor", "ring"))
    return abs(one.world_size - other.world_size), -one.world_size, *apart, one.ring


def _larger_machine(situation: Situation) -> str:
    """As many cards as here of the size that is needed, or as many of the size here as are needed."""
    facts, dtype = situation.facts, situation.dtype
    most = min(facts.units, _MOST_RANKS) if has_plan(situation, "tensor") else 1
    here = min(len(situation.devices), most)
    need = rank_bytes(facts, dtype, ParallelSpec(tensor=here))
    size = math.ceil(need / 0.85 / 2**30)
    larger = f"one card of {size} GB" if here == 1 else f"{here} cards of {size} GB with tensor {here}"
    (present,) = largest(situation.devices, 1)
    for count in range(here + 1, most + 1):
        if rank_bytes(facts, dtype, ParallelSpec(tensor=count)) <= usable(present):
            return f"{larger}, or {count} like {present.label} with tensor {count}"
    return larger
