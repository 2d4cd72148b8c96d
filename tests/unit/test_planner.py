"""The planner finds a layout for any machine, and refuses by name what no layout can do."""

from __future__ import annotations

import re
import subprocess
import sys

import msgspec
import pytest

from runtime import planner
from runtime.devices import default_cpu_ranks
from runtime.spec import Device, Layout, ModelFacts, ParallelConfig, ParallelSpec
from tests.support.mocks import GIB, mock_cards
from tests.support.refusals import refused
from tools import ROOT

ADAPTIVE = ("auto", "prefer tensor", "prefer context")


def model(
    gib: float = 10,
    heads: int = 24,
    transformer_class: str = "FluxTransformer2DModel",
    stored: str = "bfloat16",
    split: float = 1.0,
) -> ModelFacts:
    """A model whose transformer has so many GiB, of which the tensor axis divides the part `split`."""
    return ModelFacts(
        path="/models/diffusers/a",
        pipeline_class="FluxPipeline",
        transformer_class=transformer_class,
        heads=heads,
        transformer_bytes=int(gib * GIB),
        split_bytes=int(gib * GIB * split),
        encoder_bytes=GIB,
        vae_bytes=GIB,
        stored_dtype=stored,
        version="v1",
    )


def manual(devices: str = "auto", attention: str = "auto", **degrees: int) -> ParallelConfig:
    return ParallelConfig(
        strategy="manual", devices=devices, attention=attention, degrees=ParallelSpec(**degrees)
    )


def planned(facts: ModelFacts, config: ParallelConfig | str, cards: tuple[Device, ...] = ()) -> Layout:
    """The layout, after checking what holds of every layout."""
    config = ParallelConfig(strategy=config) if isinstance(config, str) else config
    layout = planner.plan(facts, config, cards)
    assert len(layout.devices) == layout.spec.world_size
    assert len({device.key for device in layout.devices}) == len(layout.devices)
    assert layout.reason
    assert "\n" not in layout.reason
    return layout


def indices(layout: Layout) -> list[int]:
    return [device.index for device in layout.devices]


# ---- the adaptive strategies


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("strategy", "gib", "axis"),
    [
        ("auto", 10, "ulysses"),  # fits on a card of 24 GiB
        ("auto", 20, "ulysses"),
        ("auto", 30, "tensor"),
        ("auto", 22, "tensor"),  # would fit, were it not for the activations
        ("prefer tensor", 10, "tensor"),
        ("prefer tensor", 30, "tensor"),
        ("prefer context", 10, "ulysses"),
        ("prefer context", 30, "tensor"),  # has no room for all weights
    ],
)
def test_adaptive_strategies_use_all_equal_cards(strategy: str, gib: float, axis: str, count: int) -> None:
    cards = mock_cards(*[24.0] * count)
    if count == 1 and gib > 20:
        with refused("one rank needs", "GPU 0 Mock has 24.0 GB"):
            planner.plan(model(gib), ParallelConfig(strategy=strategy), cards)
        return
    layout = planned(model(gib), strategy, cards)
    assert layout.spec.describe() == ("one rank" if count == 1 else f"{axis} {count}")
    assert indices(layout) == list(range(count))


@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 2), ("prefer tensor", 3), ("prefer context", 2)])
def test_three_cards_divide_weights_but_not_the_512_tokens_of_a_text(strategy: str, ranks: int) -> None:
    assert planned(model(10), strategy, mock_cards(24, 24, 24)).spec.world_size == ranks
    assert planned(model(30), strategy, mock_cards(24, 24, 24)).spec.describe() == "tensor 3"


@pytest.mark.parametrize("strategy", ADAPTIVE)
@pytest.mark.parametrize(
    ("heads", "cards", "tensor", "context"),
    [
        (24, 5, 4, 4),
        (24, 7, 6, 4),
        (4, 3, 2, 2),
        (4, 8, 4, 4),
        (7, 4, 1, 1),
        (38, 4, 2, 2),
        (1, 2, 1, 1),
        (9, 3, 3, 1),
    ],
)
def test_adaptive_strategies_take_the_most_ranks_that_divide_the_heads(
    strategy: str, heads: int, cards: int, tensor: int, context: int
) -> None:
    spec = planned(model(heads=heads), strategy, mock_cards(*[24.0] * cards)).spec
    takes_tensor = strategy == "prefer tensor" or context == 1
    assert spec == (ParallelSpec(tensor=tensor) if takes_tensor else ParallelSpec(ulysses=context))


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_a_model_that_fits_nowhere_is_refused_with_what_is_missing(strategy: str) -> None:
    with refused("tensor 2 needs 25.0 GB", "GPU 1 Mock has 20.0 GB", "smaller dtype"):
        planner.plan(model(50), ParallelConfig(strategy=strategy), mock_cards(24, 20))


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_without_cards_ranks_run_on_the_cpu(strategy: str) -> None:
    layout = planned(model(1000), strategy)
    assert {device.kind for device in layout.devices} == {"cpu"}
    assert layout.spec.world_size == default_cpu_ranks()
    split = layout.spec.ulysses if strategy == "prefer context" else layout.spec.tensor
    assert split == default_cpu_ranks()


def test_the_cpu_can_be_asked_for_beside_cards() -> None:
    layout = planned(model(), ParallelConfig(devices="cpu"), mock_cards(24, 24))
    assert {device.kind for device in layout.devices} == {"cpu"}


@pytest.mark.parametrize(
    ("strategy", "cards", "gib", "described", "used"),
    [
        # The small card takes its share, but not the whole.
        ("auto", (24, 8), 10, "tensor 2", [0, 1]),
        ("prefer context", (24, 8), 10, "tensor 2", [0, 1]),
        # The small card takes nothing: what the others can do counts.
        ("auto", (24, 8, 24, 24, 24), 10, "ulysses 4", [0, 2, 3, 4]),
        ("auto", (24, 4, 24), 30, "tensor 2", [0, 2]),
        ("prefer tensor", (24, 4, 24), 30, "tensor 2", [0, 2]),
        ("auto", (24, 4), 10, "one rank", [0]),
        ("prefer tensor", (24, 4), 10, "one rank", [0]),
        ("prefer context", (24, 4), 10, "one rank", [0]),
        ("prefer context", (24, 8, 8, 24), 10, "ulysses 2", [0, 3]),
        ("auto", (24, 8, 8, 24), 10, "tensor 4", [0, 1, 2, 3]),
        ("auto", (16, 24, 32, 12), 9, "ulysses 4", [0, 1, 2, 3]),
        ("auto", (6, 6, 6, 6), 10, "tensor 4", [0, 1, 2, 3]),
    ],
)
def test_unequal_cards_do_what_they_can(
    strategy: str, cards: tuple[float, ...], gib: float, described: str, used: list[int]
) -> None:
    layout = planned(model(gib), strategy, mock_cards(*cards))
    assert layout.spec.describe() == described
    assert indices(layout) == used


def test_the_largest_cards_are_used_in_their_order() -> None:
    layout = planned(model(heads=4), "prefer tensor", mock_cards(8, 24, 4, 16, 32, 6))
    assert indices(layout) == [0, 1, 3, 4]


def test_what_other_programs_hold_of_a_card_does_not_change_the_layout() -> None:
    """ComfyUI makes room for a load; a layout that depended on the moment would load the model anew each time."""
    busy = Device(kind="cuda", index=1, uuid="GPU-busy", total_bytes=24 * GIB, free_bytes=2 * GIB)
    assert planned(model(10), "auto", (*mock_cards(24), busy)).spec.describe() == "ulysses 2"


@pytest.mark.parametrize(
    "config", ["auto", "prefer context", manual(tensor=2)], ids=["auto", "context", "manual"]
)
def test_cards_that_do_not_tell_their_memory_are_not_called_too_small(config: ParallelConfig | str) -> None:
    unknown = tuple(Device(kind="cuda", index=index, uuid=f"GPU-{index}") for index in range(2))
    layout = planned(model(10), config, unknown)
    assert layout.spec.tensor == layout.spec.world_size


def test_only_the_cards_asked_for_are_used_in_the_order_asked_for() -> None:
    config = ParallelConfig(strategy="prefer tensor", devices="3,1")
    assert indices(planned(model(), config, mock_cards(8, 16, 24, 32))) == [3, 1]


def test_adaptive_strategies_ignore_degrees() -> None:
    config = ParallelConfig(strategy="auto", degrees=ParallelSpec(ring=7, tensor=5, replica=0))
    assert planned(model(), config, mock_cards(24, 24)).spec.describe() == "ulysses 2"


@pytest.mark.parametrize(
    ("dtype", "described"), [("auto", "tensor 2"), ("float32", "tensor 2"), ("bfloat16", "ulysses 2")]
)
def test_the_dtype_asked_for_decides_what_fits(dtype: str, described: str) -> None:
    layout = planner.plan(model(30, stored="float32"), ParallelConfig(), mock_cards(24, 24), dtype)
    assert layout.spec.describe() == described


@pytest.mark.parametrize(
    ("stored", "dtype", "degrees", "gib"),
    [
        ("bfloat16", "auto", {}, 12.0),
        ("bfloat16", "auto", {"tensor": 2}, 3 + 4.5),
        ("bfloat16", "auto", {"tensor": 4}, 3 + 2.25),
        ("bfloat16", "auto", {"ulysses": 4}, 12.0),
        ("bfloat16", "float32", {"tensor": 2}, 15.0),
        ("float32", "float16", {"tensor": 2}, 3.75),
    ],
)
def test_a_rank_holds_its_part_of_what_is_divided_and_all_of_the_rest(
    stored: str, dtype: str, degrees: dict[str, int], gib: float
) -> None:
    facts = model(12, stored=stored, split=0.75)
    assert planner.rank_bytes(facts, dtype, ParallelSpec(**degrees)) == gib * GIB


# ---- manual


@pytest.mark.parametrize(
    ("config", "count", "described"),
    [
        (manual(), 1, "one rank"),
        (manual(), 8, "one rank"),
        (manual(tensor=2), 2, "tensor 2"),
        (manual(tensor=3), 4, "tensor 3"),
        (manual(ulysses=4), 4, "ulysses 4"),
        (manual(ulysses=3), 4, "ulysses 3"),
        (manual(ulysses=8), 8, "ulysses 8"),
        (manual(tensor=2, devices="1,3"), 4, "tensor 2"),
        (manual(tensor=4), 0, "tensor 4"),
        (manual(ulysses=8, devices="cpu"), 2, "ulysses 8"),
    ],
)
def test_manual_degrees_are_taken_as_they_are(config: ParallelConfig, count: int, described: str) -> None:
    layout = planned(model(20), config, mock_cards(*[24.0] * count))
    assert layout.spec == config.degrees
    assert layout.spec.describe() == described


@pytest.mark.parametrize("axis", ["ring", "stage", "replica"])
def test_axes_that_are_not_built_are_refused_by_name(axis: str) -> None:
    with refused(f"{axis} 2", f"{axis} 1"):
        planner.check_config(manual(**{axis: 2}))


@pytest.mark.parametrize("axis", ["tensor", "ulysses", "ring", "stage", "replica"])
@pytest.mark.parametrize("degree", [0, -3])
def test_a_degree_below_one_is_refused_by_name(axis: str, degree: int) -> None:
    with refused(f"{axis} {degree}", f"{axis} 1"):
        planner.check_config(manual(**{axis: degree}))


def test_tensor_together_with_ulysses_is_refused_with_the_single_axes() -> None:
    with refused("tensor 2", "ulysses 4", "tensor 8", "ulysses 8"):
        planner.check_config(manual(tensor=2, ulysses=4))


@pytest.mark.parametrize(("axis", "degree"), [("tensor", 4), ("ulysses", 4), ("tensor", 64)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_more_ranks_than_devices_are_refused_with_what_fits(axis: str, degree: int, count: int) -> None:
    with refused(f"{axis} {degree}", f"needs {degree} devices", f"here are {count}", f"tensor {count}"):
        planner.plan(model(), manual(**{axis: degree}), mock_cards(*[24.0] * count))


def test_devices_that_were_not_asked_for_do_not_count() -> None:
    with refused("needs 4 devices; here are 2"):
        planner.plan(model(), manual(tensor=4, devices="0,2"), mock_cards(24, 24, 24, 24))


def test_more_ranks_than_the_cpu_offers_are_refused() -> None:
    with refused("needs 9 devices; here are 8", "CPU"):
        planner.plan(model(), manual(tensor=9), ())


@pytest.mark.parametrize(
    ("axis", "heads", "degree", "count", "instead"),
    [
        ("tensor", 24, 5, 8, "tensor 4 or 6."),
        ("ulysses", 24, 7, 8, "ulysses 6 or 8."),
        ("tensor", 24, 5, 5, "tensor 4."),  # 6 would divide the heads, but there are 5 cards
        ("tensor", 38, 4, 4, "tensor 2."),
        ("ulysses", 2, 4, 8, "ulysses 2."),
        ("tensor", 7, 2, 8, "tensor 1 or 7."),
    ],
)
def test_a_degree_that_does_not_divide_the_heads_is_refused_with_the_nearest_that_do(
    axis: str, heads: int, degree: int, count: int, instead: str
) -> None:
    with refused(f"{axis} {degree}", f"the {heads} attention heads", f"Works instead: {instead}"):
        planner.plan(model(heads=heads), manual(**{axis: degree}), mock_cards(*[24.0] * count))


@pytest.mark.parametrize("axis", ["tensor", "ulysses"])
def test_a_class_without_a_plan_is_refused_by_name(axis: str) -> None:
    facts = model(transformer_class="UNet2DConditionModel")
    with refused("UNet2DConditionModel", f"{axis} 2", "FluxTransformer2DModel"):
        planner.plan(facts, manual(**{axis: 2}), mock_cards(24, 24))


def test_a_class_without_a_plan_runs_on_one_rank() -> None:
    facts = model(transformer_class="UNet2DConditionModel")
    assert planned(facts, manual(), mock_cards(24, 24)).spec == ParallelSpec()
    assert planned(facts, "auto", mock_cards(24)).spec == ParallelSpec()


@pytest.mark.parametrize(
    ("config", "needs"),
    [(manual(), "one rank needs 30.0 GB"), (manual(ulysses=2), "ulysses 2 needs 30.0 GB")],
    ids=["one rank", "ulysses 2"],
)
def test_manual_degrees_that_have_no_room_are_refused_with_the_card(
    config: ParallelConfig, needs: str
) -> None:
    with refused(needs, "GPU 1 Mock has 20.0 GB", "tensor degree"):
        planner.plan(model(30), msgspec.structs.replace(config, devices="1,0"), mock_cards(20, 20))


# ---- strategies, attention, devices


@pytest.mark.parametrize("strategy", ["", "fastest", "Auto", "tensor"])
def test_an_unknown_strategy_is_refused_with_all_that_exist(strategy: str) -> None:
    with refused(f"'{strategy}'", "auto", "prefer tensor", "prefer context", "manual"):
        planner.check_config(ParallelConfig(strategy=strategy))


@pytest.mark.parametrize("attention", ["auto", "native"])
def test_attention_of_pytorch_is_accepted(attention: str) -> None:
    layout = planned(model(), ParallelConfig(attention=attention), mock_cards(24, 24))
    assert layout.spec.attention == "native"


@pytest.mark.parametrize("attention", ["flash", "cudnn", "sage", "", "hub/kernel"])
@pytest.mark.parametrize("strategy", ["auto", "manual"])
def test_other_attention_is_refused_by_name(attention: str, strategy: str) -> None:
    with refused(f"'{attention}'", "auto or native"):
        planner.check_config(ParallelConfig(strategy=strategy, attention=attention))


def test_plan_checks_the_config_itself() -> None:
    with refused("ring 2"):
        planner.plan(model(), manual(ring=2), mock_cards(24, 24))


def test_devices_that_do_not_exist_are_refused() -> None:
    with refused("GPU 7"):
        planner.plan(model(), ParallelConfig(devices="0,7"), mock_cards(24, 24))


# ---- model, size, tokens


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [("bfloat16", "auto", "bfloat16"), ("float32", "auto", "float32"), ("float32", "float16", "float16")],
)
def test_a_model_is_held_in_its_own_dtype_unless_another_is_asked_for(
    stored: str, asked: str, used: str
) -> None:
    facts = model(stored=stored)
    layout = planner.plan(facts, manual(tensor=2), mock_cards(24, 24), asked)
    spec = planner.model_spec(facts, asked, layout)
    assert spec.dtype == used
    assert (spec.path, spec.pipeline_class, spec.version) == (facts.path, facts.pipeline_class, facts.version)
    assert spec.rank_bytes == planner.rank_bytes(facts, asked, layout.spec)


@pytest.mark.parametrize(
    ("width", "height", "multiple"), [(16, 16, 16), (1024, 768, 16), (1360, 16, 16), (24, 8, 8)]
)
def test_sizes_in_whole_patches_are_accepted(width: int, height: int, multiple: int) -> None:
    planner.check_size(width, height, multiple)


@pytest.mark.parametrize(
    ("width", "height", "instead"),
    [
        (1000, 1024, "width 992 or 1008"),
        (1024, 1023, "height 1008 or 1024"),
        (8, 16, "width 16 or 32"),
        (16, 0, "height 16 or 32"),
        (-16, 16, "width 16 or 32"),
        (17, 17, "width 16 or 32"),
    ],
)
def test_other_sizes_are_refused_with_the_nearest(width: int, height: int, instead: str) -> None:
    with refused("16 pixels", f"Works instead: {instead}."):
        planner.check_size(width, height, 16)


@pytest.mark.parametrize(
    ("degree", "text", "width", "height"),
    [(1, 511, 48, 16), (2, 512, 1024, 1024), (4, 512, 1024, 16), (3, 513, 48, 16), (8, 32, 64, 32)],
)
def test_lengths_the_degree_divides_are_accepted(degree: int, text: int, width: int, height: int) -> None:
    planner.check_tokens(ParallelSpec(ulysses=degree), text, width, height, 16)


def test_tensor_ranks_take_any_length() -> None:
    planner.check_tokens(ParallelSpec(tensor=4), 511, 48, 16, 16)


def test_text_the_degree_does_not_divide_is_refused() -> None:
    with refused("ulysses 2", "511 text tokens", "tensor 2"):
        planner.check_tokens(ParallelSpec(ulysses=2), 511, 1024, 1024, 16)


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
@pytest.mark.parametrize(("width", "height"), [(16, 16), (80, 80), (1040, 1040), (208, 176)])
def test_pictures_the_degree_does_not_divide_are_refused_with_a_size_that_works(
    degree: int, width: int, height: int
) -> None:
    spec, tokens = ParallelSpec(ulysses=degree), (width // 16) * (height // 16)
    if tokens % degree == 0:
        planner.check_tokens(spec, 24, width, height, 16)
        return
    with refused(f"ulysses {degree}", f"{tokens} picture tokens") as caught:
        planner.check_tokens(spec, 24, width, height, 16)
    proposed = re.search(r"(\d+)x(\d+)", caught.value.instead)
    assert proposed
    better = int(proposed[1]), int(proposed[2])
    planner.check_size(*better, 16)
    planner.check_tokens(spec, 24, *better, 16)


def test_the_planner_is_light_enough_for_the_host() -> None:
    """ComfyUI must start as fast with the pack as without it."""
    heavy = ("torch", "numpy", "diffusers", "transformers", "safetensors", "pynvml")
    code = f"import sys, runtime.planner; print(sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
