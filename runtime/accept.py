"""Which layouts are accepted, and why others are refused: the one place that says so.

A refusal's last line is computed: what it names would have been accepted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from .room import Situation, held_dtype, largest, place, rank_bytes, too_small, usable
from .spec import AXES, Layout, ParallelSpec, Refusal
from .verified import CONTEXT_CLASSES, TENSOR_CLASSES

_NOT_BUILT = {
    "ring": "ring attention (ring) is not built yet; ulysses also splits the sequence",
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
    if spec.tensor > 1 and spec.ulysses > 1:
        raise Refusal(
            f"tensor {spec.tensor} together with ulysses {spec.ulysses} is not built yet.",
            "Both axes on one mesh have not been verified against one process so far.",
            f"Works here: tensor {spec.world_size} with ulysses 1.",
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
    problem = _problem(situation, spec)
    if problem:
        raise Refusal(*problem, f"Works instead: {_instead(situation, spec)}.")
    placed = place(situation, spec)
    return Layout(spec=placed.spec, devices=placed.devices, reason=reason + placed.words)


def has_plan(situation: Situation, axis: str) -> bool:
    """Whether the model was verified on this axis. A user's own plan changes what is divided, not what is verified."""
    classes = TENSOR_CLASSES if axis == "tensor" else CONTEXT_CLASSES
    return situation.facts.transformer_class in classes


def _problem(situation: Situation, spec: ParallelSpec) -> Problem | None:
    """The first thing that is wrong with well-formed degrees."""
    checks = (_copies_of_a_pipeline, _too_many_ranks, _without_plan, _indivisible, _without_room)
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
    for axis in ("tensor", "ulysses"):
        if spec.degrees()[axis] > 1 and not has_plan(situation, axis):
            return (
                f"{situation.facts.transformer_class} cannot run with {axis} {spec.degrees()[axis]}.",
                f"There is no plan for its {axis} axis that was verified against one process.",
            )
    return None


def _indivisible(situation: Situation, spec: ParallelSpec) -> Problem | None:
    facts = situation.facts
    kind = "key/value head" if facts.head_groups else "attention head"
    heads = f"the {facts.units} {kind}s" if facts.units > 1 else f"the one {kind}"
    if spec.tensor > facts.units:
        return (
            f"tensor {spec.tensor} is more than {heads} of this model.",
            f"Weights are divided by whole {kind}s, and every rank needs at least one.",
        )
    if facts.units % spec.ulysses:
        return (
            f"ulysses {spec.ulysses} does not divide {heads} of this model.",
            "Under ulysses heads are divided evenly over the ranks; uneven splits of it are not built yet.",
        )
    return None


def _without_room(situation: Situation, spec: ParallelSpec) -> Problem | None:
    placed = place(situation, spec)
    if placed.fits:
        return None
    card, need = too_small(situation, placed.spec, placed.devices)[0]
    return (
        f"{spec.describe()} needs {need / 2**30:.1f} GB for the weights of one rank; {card.label} "
        f"has {card.total_bytes / 2**30:.1f} GB.",
        "A rank's weights stay on its card and may take 85 % of it: the pictures need the rest.",
    )


def _instead(situation: Situation, spec: ParallelSpec) -> str:
    """What would be accepted: the degree of each axis nearest to what was asked for, else other weights or cards."""
    found = []
    for axis in ("ulysses", "tensor") if spec.ulysses > 1 else ("tensor", "ulysses"):
        works = [one for one in _candidates(situation, axis) if not _problem(situation, one)]
        if works:
            found.append(min(works, key=lambda one: (abs(one.world_size - spec.world_size), -one.world_size)))
    if found:
        return ", or ".join(one.describe() for one in found)
    if not _problem(situation, ParallelSpec()):
        return "one rank"
    if held_dtype(situation.facts, situation.dtype) == "float32":
        half = msgspec.structs.replace(situation, dtype="bfloat16")
        return f"dtype bfloat16 with {_instead(half, spec)}"
    return _larger_machine(situation)


def _candidates(situation: Situation, axis: str) -> Iterator[ParallelSpec]:
    """Degrees above one. Of ulysses powers of two only: others leave a remainder of the 512 text tokens."""
    for degree in range(2, min(len(situation.devices), situation.facts.units) + 1):
        if axis == "tensor" or degree & (degree - 1) == 0:
            yield ParallelSpec(**{axis: degree})  # type: ignore[arg-type]


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
