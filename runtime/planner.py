"""What the nodes ask before anything is loaded: can it be done, in which layout, and why.

`room.py` counts bytes, `accept.py` says what is accepted, `choose.py` what the adaptive strategies take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .accept import accept, check_degrees
from .attention_backends import check_backend_name, choose_backend
from .choose import choose
from .component import file_version, folder_version
from .devices import choose_devices, default_cpu_ranks, physical_cards
from .folder import inspect_pipeline
from .plan_text import read_plan_text
from .room import Situation, held_dtype, rank_bytes
from .smaller import smaller
from .spec import STRATEGIES, Device, Layout, ModelFacts, ModelSpec, ParallelConfig, ParallelSpec, Refusal

if TYPE_CHECKING:
    from .slots import IsCancelled, Report
    from .transformer import TransformerFile


def check_config(config: ParallelConfig) -> None:
    """Refuse what can be refused without knowing the model: axes and backends that are not built, bad degrees."""
    if config.strategy not in STRATEGIES:
        raise Refusal(
            f"There is no strategy '{config.strategy}'.",
            "The strategy decides how a model is divided.",
            f"Works here: {', '.join(STRATEGIES)}.",
        )
    check_backend_name(config.attention)
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
    situation = _situation(facts, config, cards, dtype)
    if config.strategy == "manual":
        spec, reason = config.degrees, "as set on the Parallel Config"
    else:
        spec, reason = choose(situation, config.strategy)
    if config.tensor_plan and spec.tensor == 1:
        reason += ", and no weights are divided, so the tensor plan is not needed"
    attention = choose_backend(
        config.attention,
        on_cpu=situation.on_cpu,
        dtype=held_dtype(facts, dtype),
        transformer_class=facts.transformer_class,
    )
    spec = msgspec.structs.replace(
        spec, attention=attention, tensor_plan=config.tensor_plan if spec.tensor > 1 else ""
    )
    return accept(situation, spec, reason)


def _situation(
    facts: ModelFacts, config: ParallelConfig, cards: Sequence[Device] | None, dtype: str
) -> Situation:
    devices = choose_devices(config.devices, physical_cards() if cards is None else cards)
    if config.strategy != "manual" and devices[0].kind == "cpu":
        devices = devices[: default_cpu_ranks()]
    return Situation(facts=facts, devices=devices, dtype=dtype, tensor_plan=config.tensor_plan)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A model and what was asked for it: all it takes to plan once more, after it ran out of memory."""

    facts: ModelFacts
    config: ParallelConfig
    dtype: str = "auto"

    @property
    def may_change(self) -> bool:
        """Whether another layout may be tried without asking: degrees set by hand are kept."""
        return self.config.strategy != "manual"


def smaller_layouts(
    wanted: Wanted,
    layout: Layout,
    *,
    tried: int = 0,
    allocated: int = 0,
    cards: Sequence[Device] | None = None,
) -> tuple[Layout, ...]:
    """Layouts that need less memory than `layout`, which ran out of it; the best first, none if there are none.

    In bytes and as far as known (0: not): `tried` was wanted when a rank held `allocated` in all.
    """
    facts, dtype = wanted.facts, wanted.dtype
    situation = _situation(facts, wanted.config, cards, dtype)
    computing = max(0, allocated - rank_bytes(facts, dtype, layout.spec)) if allocated else 0
    reason = f"{layout.spec.describe()} ran out of memory"
    return tuple(
        accept(situation, spec, reason)
        for spec in smaller(situation, layout.spec, tried=tried, computing=computing)
    )


def smaller_advice(wanted: Wanted, layout: Layout, others: Sequence[Layout]) -> str:
    """What to say of `others` after `layout` ran out of memory, and of everything else that helps."""
    here = layout.spec.describe()
    if not others:
        return f"No layout of this model on these devices needs less memory than {here}."
    sizes = [rank_bytes(wanted.facts, wanted.dtype, one.spec) / 2**30 for one in (layout, *others[:2])]
    told = [f"{one.spec.describe()} ({size:.1f} GB)" for one, size in zip(others, sizes[1:], strict=False)]
    by_itself = "" if wanted.may_change else " Any strategy but manual tries that by itself."
    return (
        f"Less memory is needed by {', or '.join(told)}; in brackets the weights on a rank, {sizes[0]:.1f} GB in "
        f"{here}.{by_itself}"
    )


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


def check_sequences(spec: ParallelSpec, lengths: Mapping[str, int]) -> None:
    """Refuse fewer tokens than ranks to divide them over. `lengths` by name: "picture", "text" and so on.

    A text may be shorter, for it is never all that a rank has: that rank then has no part of it.
    """
    for name, tokens in lengths.items():
        if name != "text" and tokens < spec.context:
            raise Refusal(
                f"{msgspec.structs.replace(spec, tensor=1, replica=1).describe()} needs {spec.context} {name} tokens; "
                f"this run has {tokens}.",
                "Every rank takes a part of the sequence, and has nothing to do without a token.",
                f"Works instead: a larger size, or at most {tokens} for ulysses times ring.",
            )


def idle_replicas(spec: ParallelSpec, calls: int, batch: int) -> str:
    """What to say when a step has less to do than there are copies of the model; "" when all have work."""
    if spec.replica == 1 or max(calls, batch) > 1:
        return ""
    return (
        f"replica {spec.replica} brings nothing here: at CFG 1 a step is one call for one picture. "
        f"tensor or ulysses {spec.replica} would speed it up, so would a batch."
    )


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """What the doctor says: the whole report, and its verdict in one sentence."""

    report: str
    verdict: str


def examine_machine(devices: str, comfyui: str, report: Report, cancelled: IsCancelled) -> Examined:
    """What the doctor finds on these devices of the machine; `runtime.doctor` says what and how."""
    from .doctor.examine import examine  # runs a group of its own, which no plan needs
    from .doctor.text import report as text_of

    findings = examine(devices, comfyui, report=report, cancelled=cancelled)
    return Examined(report=text_of(findings), verdict=findings.verdict)
