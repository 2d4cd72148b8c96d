"""What the nodes ask before anything is loaded: can it be done, in which layout, and why.

`room.py` counts bytes, `accept.py` says what is accepted, `choose.py` what the adaptive strategies take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .accept import accept, check_degrees
from .choose import choose
from .component import file_version, folder_version
from .devices import choose_devices, default_cpu_ranks, physical_cards
from .folder import inspect_pipeline
from .plan_text import read_plan_text
from .room import Situation, held_dtype, rank_bytes
from .spec import STRATEGIES, Device, Layout, ModelFacts, ModelSpec, ParallelConfig, ParallelSpec, Refusal

if TYPE_CHECKING:
    from .transformer import TransformerFile


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
    if config.tensor_plan:
        read_plan_text(config.tensor_plan)
    if config.strategy == "manual":
        check_degrees(config.degrees)


def plan(
    facts: ModelFacts, config: ParallelConfig, cards: Sequence[Device] | None = None, dtype: str = "auto"
) -> Layout:
    """The layout for this model on this machine, or Refusal. `cards` are this machine's if not given.

    A tensor plan goes with the tensor axis. A layout without it holds whole weights and needs none: that is no
    error, so that a workflow with a plan also runs on one card.
    """
    check_config(config)
    devices = choose_devices(config.devices, physical_cards() if cards is None else cards)
    if config.strategy != "manual" and devices[0].kind == "cpu":
        devices = devices[: default_cpu_ranks()]
    situation = Situation(facts=facts, devices=devices, dtype=dtype, tensor_plan=config.tensor_plan)
    if config.strategy == "manual":
        spec, reason = config.degrees, "as set on the Parallel Config"
    else:
        spec, reason = choose(situation, config.strategy)
    if config.tensor_plan and spec.tensor == 1:
        reason += ", and no weights are divided, so the tensor plan is not needed"
    spec = msgspec.structs.replace(spec, tensor_plan=config.tensor_plan if spec.tensor > 1 else "")
    return accept(situation, spec, reason)


def check_tensor_plan(text: str) -> None:
    """Refuse a tensor plan that no model could follow: bad JSON, keys or styles. The model itself is asked later."""
    read_plan_text(text)


def check_devices(text: str) -> None:
    """Refuse devices that cannot be read or do not exist on this machine."""
    choose_devices(text, physical_cards())


def model_version(path: Path) -> str:
    """Changes when the model's file does, or any file of its folder."""
    return folder_version(path) if path.is_dir() else file_version(path)


def check_pipeline(path: Path, config: ParallelConfig | None = None) -> ModelFacts:
    """What the pipeline folder holds. Raises Refusal for anything that cannot be loaded."""
    return inspect_pipeline(path, config.tensor_plan if config else "")


def check_transformer(path: Path, config: ParallelConfig | None = None, working: str = "") -> TransformerFile:
    """What a transformer's file or component folder holds. Raises Refusal for anything that cannot be loaded.

    `working` are the families that the asker can use, for messages.
    """
    from .transformer import inspect_transformer  # some twenty files of families, which no start needs

    return inspect_transformer(path, config.tensor_plan if config else "", working)


def model_spec(facts: ModelFacts, dtype: str, layout: Layout) -> ModelSpec:
    """The model in the dtype asked for; "auto" is the dtype it is stored in."""
    return ModelSpec(
        path=facts.path,
        pipeline_class=facts.pipeline_class,
        dtype=held_dtype(facts, dtype),
        version=facts.version,
        rank_bytes=rank_bytes(facts, dtype, layout.spec),
    )


def shard_bytes(facts: ModelFacts, dtype: str, layout: Layout) -> tuple[int, ...]:
    """Bytes of weights on each rank."""
    return tuple(rank_bytes(facts, dtype, layout.spec, rank) for rank in range(layout.spec.world_size))


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


def check_sequences(spec: ParallelSpec, lengths: Mapping[str, int], *, masked: bool) -> None:
    """Refuse sequences, such as the picture's and the text's tokens, that the ulysses degree cannot divide yet."""
    if spec.ulysses > 1 and masked:
        raise Refusal(
            f"An attention mask cannot be used with ulysses {spec.ulysses} yet.",
            "Every rank sees a part of the sequence, and how a mask is cut for it is not verified.",
            f"Works instead: tensor {spec.ulysses}, or the workflow without the mask.",
        )
    for name, tokens in lengths.items():
        if tokens % spec.ulysses:
            other = "another size" if name == "picture" else "other text"
            raise _indivisible(spec.ulysses, name, tokens, f"tensor {spec.ulysses}, or {other}")


def _indivisible(ulysses: int, name: str, tokens: int, instead: str) -> Refusal:
    return Refusal(
        f"ulysses {ulysses} does not divide the {tokens} {name} tokens of this run.",
        "Every rank takes an equal part of the sequence; other lengths are not built yet.",
        f"Works instead: {instead}.",
    )


def idle_replicas(spec: ParallelSpec, calls: int, batch: int) -> str:
    """What to say when a step has less to do than there are copies of the model; "" when all have work."""
    if spec.replica == 1 or max(calls, batch) > 1:
        return ""
    return (
        f"replica {spec.replica} brings nothing here: at CFG 1 a step is one call for one picture. "
        f"tensor or ulysses {spec.replica} would speed it up, so would a batch."
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
            raise _indivisible(degree, name, tokens, instead)
