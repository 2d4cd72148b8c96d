"""Which layouts need less memory than one that ran out of it: pure, from the model, the devices and what was wanted.

What a rank needs is its weights, which are known, and what it computes with, which is known from the failure only.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import msgspec

from .accept import candidates, problem_of
from .choose import work
from .room import Situation, place, rank_bytes
from .spec import ParallelSpec

_WORTH_IT = Fraction(1, 10)  # of what is needed; less is no reason to load the model anew


def smaller(
    situation: Situation, current: ParallelSpec, *, tried: int = 0, computing: int = 0
) -> list[ParallelSpec]:
    """Layouts that need less on the fullest device than `current`, the quickest first.

    `tried` are the bytes that were wanted and not there, `computing` those that the rank had beside its weights; 0 is
    unknown. What saves less than twice the missing bytes may not be enough and comes last.
    """
    computing += tried
    now = _need(situation, current, current, computing)
    saved: dict[ParallelSpec, int] = {}
    for spec in candidates(situation, current):
        plan = situation.tensor_plan if spec.tensor > 1 else ""
        spec = msgspec.structs.replace(spec, attention=current.attention, tensor_plan=plan)
        if problem_of(situation, spec):
            continue
        spec = place(situation, spec).spec
        saved[spec] = now - _need(situation, spec, current, computing)
    quickest_first = sorted(saved, key=lambda spec: (work(situation, spec), spec.tensor, spec.ring))
    smaller_ones = [spec for spec in quickest_first if saved[spec] > now * _WORTH_IT]
    enough = [spec for spec in smaller_ones if saved[spec] >= 2 * tried]
    perhaps = [spec for spec in smaller_ones if saved[spec] < 2 * tried]
    return enough + sorted(perhaps, key=lambda spec: -saved[spec])


def _need(situation: Situation, spec: ParallelSpec, current: ParallelSpec, computing: int) -> int:
    """Bytes on the device of the fullest rank. Ranks on the CPU share one memory: there, of all of them.

    A context axis divides all that is computed with; the tensor axis about a half of it, what lies inside attention and
    feed-forward, and not what goes in and out of them.
    """
    part = Fraction(current.context, spec.context) * (1 + Fraction(current.tensor, spec.tensor)) / 2
    if situation.on_cpu:
        return sum(_weights(situation, spec)) + int(computing * part) * spec.world_size
    return max(_weights(situation, spec)) + int(computing * part)


def _weights(situation: Situation, spec: ParallelSpec) -> Iterator[int]:
    return (rank_bytes(situation.facts, situation.dtype, spec, rank) for rank in range(spec.world_size))
