"""Does it fit, which layout, and why: pure functions over a model's facts and a list of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .devices import choose_devices, default_cpu_ranks, physical_cards
from .folder import folder_version, inspect_pipeline
from .spec import (
    AXES,
    STRATEGIES,
    Device,
    Layout,
    ModelFacts,
    ModelSpec,
    ParallelConfig,
    ParallelSpec,
    Refusal,
)

# Transformers that upstream has a tensor plan and a context plan for, and that are tested here in both.
TENSOR_CLASSES = frozenset({"FluxTransformer2DModel"})
CONTEXT_CLASSES = frozenset({"FluxTransformer2DModel"})
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NOT_BUILT = {
    "ring": "ring attention (ring) is not built yet; ulysses also splits the sequence",
    "stage": "consecutive layers per rank (stage) is not built yet; tensor also divides the weights",
    "replica": "several copies of the model (replica) is not built yet; queue the prompts one after the other",
}


def check_config(config: ParallelConfig) -> None:
    """Refuse what can be refused without knowing the model: axes and backends that are not built, bad degrees."""
    if config.strategy not in STRATEGIES:
        raise Refusal(
            f"There is no strategy '{config.strategy}'.",
            "The strategy decides how a model is divided.",
            f"Works here: {', '.join(STRATEGIES)}.",
        )
    if config.attention not in ("auto", "native"):
        raise Refusal(
            f"The attention backend '{config.attention}' is not built yet.",
            "Only PyTorch's own attention is tested in every layout so far.",
            "Works here: auto or native.",
        )
    if config.strategy != "manual":
        return
    degrees = config.degrees.degrees()
    for axis in AXES:
        if degrees[axis] < 1:
            raise Refusal(
                f"{axis} {degrees[axis]} is no degree.", "A degree counts ranks.", f"Works here: {axis} 1."
            )
        if axis in _NOT_BUILT and degrees[axis] > 1:
            raise Refusal(
                f"{axis} {degrees[axis]} cannot be used.",
                f"It would be ignored otherwise: {_NOT_BUILT[axis].split(';')[0]}.",
                f"Works here: {axis} 1;{_NOT_BUILT[axis].split(';')[1]}.",
            )
    if config.degrees.tensor > 1 and config.degrees.ulysses > 1:
        raise Refusal(
            f"tensor {config.degrees.tensor} together with ulysses {config.degrees.ulysses} is not built yet.",
            "Both axes on one mesh have not been verified against one process so far.",
            f"Works here: tensor {config.degrees.world_size}, or ulysses {config.degrees.world_size}.",
        )


def plan(
    facts: ModelFacts, config: ParallelConfig, cards: Sequence[Device] | None = None, dtype: str = "auto"
) -> Layout:
    """The layout for this model on this machine, or Refusal. `cards` are this machine's if not given."""
    check_config(config)
    devices = choose_devices(config.devices, physical_cards() if cards is None else cards)
    if config.strategy == "manual":
        spec = config.degrees
        reason = "as set on the Parallel Config"
    else:
        spec, reason = _adapt(facts, config.strategy, dtype, devices)
    _check(facts, spec, devices)
    chosen = _largest(devices, spec.world_size)
    _check_room(rank_bytes(facts, dtype, spec), spec, chosen)
    return Layout(spec=spec, devices=chosen, reason=reason)


def _adapt(
    facts: ModelFacts, strategy: str, dtype: str, devices: Sequence[Device]
) -> tuple[ParallelSpec, str]:
    """The adaptive strategies: never more ranks than devices, never a degree that does not divide the heads.

    The context axis takes powers of two only: any other degree leaves a remainder of the 512 text tokens. Cards too
    small for their share are left out, and where the context axis has no room the weights are divided instead.
    """
    on_cpu = devices[0].kind == "cpu"
    degrees = _degrees_for(facts.heads, min(default_cpu_ranks(), len(devices)) if on_cpu else len(devices))
    if max(degrees) == 1:
        return ParallelSpec(), "only one device can be used"
    even = [degree for degree in degrees if degree & (degree - 1) == 0]
    # By what the cards have, not by what is free now: ComfyUI makes room, and the choice stays the same next time.
    whole = rank_bytes(facts, dtype, ParallelSpec())
    holding_all = [d for d in even if on_cpu or all(_usable(card) >= whole for card in _largest(devices, d))]
    context = max(holding_all, default=1)
    if strategy == "prefer context" and context > 1:
        reason = "context is preferred: every rank holds all weights and a part of the sequence"
        return ParallelSpec(ulysses=context), reason
    if strategy == "auto" and not on_cpu and context == max(even) > 1:
        reason = "the weights fit on every card, so the sequence is divided for speed"
        return ParallelSpec(ulysses=context), reason
    shares = {degree: rank_bytes(facts, dtype, ParallelSpec(tensor=degree)) for degree in degrees}
    roomy = [d for d in degrees if not _too_small(_largest(devices, d), shares[d])]
    spec = ParallelSpec(tensor=max(roomy, default=max(degrees)))
    if spec.tensor == 1:
        return spec, "the weights fit on one card, and no other has room for its share"
    if strategy == "prefer tensor":
        return spec, "tensor is preferred: every rank holds a part of the weights"
    if on_cpu:
        return spec, "ranks on the CPU share one memory, so the weights are divided"
    return (
        spec,
        "not every card can hold all weights beside its part of the sequence, so the weights are divided",
    )


def rank_bytes(facts: ModelFacts, dtype: str, spec: ParallelSpec) -> int:
    """Bytes of the transformer on one rank: its part of what is divided, all of the rest."""
    stored = facts.transformer_bytes - facts.split_bytes + facts.split_bytes // spec.tensor
    wanted = facts.stored_dtype if dtype == "auto" else dtype
    return stored * _ITEM_BYTES[wanted] // _ITEM_BYTES[facts.stored_dtype]


def _usable(device: Device) -> int:
    """What weights may take of a card: the rest is for activations, the driver and a display. 0 is unknown."""
    return int(device.total_bytes * 0.85)


def _too_small(devices: Sequence[Device], need: int) -> list[Device]:
    """The cards known to have less room for weights than `need`, smallest first."""
    small = [device for device in devices if device.kind != "cpu" and 0 < _usable(device) < need]
    return sorted(small, key=lambda device: device.total_bytes)


def _check_room(need: int, spec: ParallelSpec, devices: Sequence[Device]) -> None:
    small = _too_small(devices, need)
    if not small:
        return
    raise Refusal(
        f"{spec.describe()} needs {need / 2**30:.1f} GB for weights on every card; {small[0].label} "
        f"has {small[0].total_bytes / 2**30:.1f} GB.",
        "A rank's share of the transformer stays on its card, and the pictures need room beside it.",
        "Works instead: a larger tensor degree, more cards, or a smaller dtype.",
    )


def _check(facts: ModelFacts, spec: ParallelSpec, devices: Sequence[Device]) -> None:
    ranks = spec.world_size
    if ranks > len(devices):
        nearest = max(_degrees_for(facts.heads, len(devices)))
        kind = "GPU" if devices[0].kind == "cuda" else "CPU rank"
        raise Refusal(
            f"{spec.describe()} needs {ranks} devices; here are {len(devices)}.",
            f"Every rank owns a device of its own, and this machine offers {len(devices)} {kind}s for it.",
            f"Works here: tensor {nearest}, or ulysses {nearest}.",
        )
    for axis, degree, classes in (
        ("tensor", spec.tensor, TENSOR_CLASSES),
        ("ulysses", spec.ulysses, CONTEXT_CLASSES),
    ):
        if degree > 1 and facts.transformer_class not in classes:
            raise Refusal(
                f"{facts.transformer_class} cannot run with {axis} {degree}.",
                f"There is no plan for its {axis} axis that was verified against one process.",
                f"Works here: one rank; {axis} for {', '.join(sorted(classes))}.",
            )
        if facts.heads % degree:
            nearest_two = _nearest(facts.heads, degree, len(devices))
            raise Refusal(
                f"{axis} {degree} does not divide the {facts.heads} attention heads of this model.",
                "Heads are divided evenly over the ranks; uneven splits are not built yet.",
                f"Works instead: {axis} {' or '.join(map(str, nearest_two))}.",
            )


def _degrees_for(heads: int, available: int) -> list[int]:
    return [degree for degree in range(1, available + 1) if heads % degree == 0]


def _nearest(heads: int, degree: int, available: int) -> list[int]:
    """The divisors of `heads` next below and above `degree` that `available` devices can serve."""
    divisors = _degrees_for(heads, available)
    return [*[d for d in divisors if d < degree][-1:], *[d for d in divisors if d > degree][:1]]


def _largest(devices: Sequence[Device], count: int) -> tuple[Device, ...]:
    """The `count` devices with the most memory, in their given order."""
    chosen = sorted(devices, key=lambda device: -device.total_bytes)[:count]
    return tuple(device for device in devices if device in chosen)


def check_devices(text: str) -> None:
    """Refuse devices that cannot be read or do not exist on this machine."""
    choose_devices(text, physical_cards())


def model_version(path: Path) -> str:
    """Changes when any file of the model's folder does."""
    return folder_version(path)


def check_pipeline(path: Path) -> ModelFacts:
    """What the pipeline folder holds. Raises Refusal for anything that cannot be loaded."""
    return inspect_pipeline(path)


def model_spec(facts: ModelFacts, dtype: str, layout: Layout) -> ModelSpec:
    """The model in the dtype asked for; "auto" is the dtype it is stored in."""
    return ModelSpec(
        path=facts.path,
        pipeline_class=facts.pipeline_class,
        dtype=facts.stored_dtype if dtype == "auto" else dtype,
        version=facts.version,
        rank_bytes=rank_bytes(facts, dtype, layout.spec),
    )


def check_size(width: int, height: int, multiple: int) -> None:
    """Refuse a picture size the VAE and the patches cannot take."""
    for name, size in (("width", width), ("height", height)):
        if size < multiple or size % multiple:
            below = max(multiple, size // multiple * multiple)
            raise Refusal(
                f"{name} {size} cannot be used.",
                f"This model's VAE and patches take multiples of {multiple} pixels.",
                f"Works instead: {name} {below} or {below + multiple}.",
            )


def check_tokens(spec: ParallelSpec, text_tokens: int, width: int, height: int, multiple: int) -> None:
    """Refuse sequence lengths that the ulysses degree does not divide."""
    degree = spec.ulysses
    if degree == 1:
        return
    image_tokens = (width // multiple) * (height // multiple)
    for name, tokens in (("text", text_tokens), ("picture", image_tokens)):
        if tokens % degree:
            step = multiple * degree
            works = (
                max(step, round(width / step) * step),
                max(multiple, round(height / multiple) * multiple),
            )
            instead = (
                f"{works[0]}x{works[1]}, or tensor {degree}" if name == "picture" else f"tensor {degree}"
            )
            raise Refusal(
                f"ulysses {degree} does not divide the {tokens} {name} tokens of this run.",
                "Every rank takes an equal part of the sequence; other lengths are not built yet.",
                f"Works instead: {instead}.",
            )
