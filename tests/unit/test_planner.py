"""The planner finds a layout for any machine, and refuses by name what no layout can do."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import msgspec
import pytest

from runtime import planner
from runtime.devices import default_cpu_ranks
from runtime.spec import Device, Layout, ModelFacts, ParallelConfig, ParallelSpec, Refusal, divide
from runtime.verified import CONTEXT_CLASSES, TENSOR_CLASSES
from tests.support.mocks import GIB, mock_cards, mock_facts
from tests.support.refusals import refused
from tools import ROOT

ADAPTIVE = ("auto", "prefer tensor", "prefer context")
PLAN = '{"transformer_blocks.*.attn.to_q": "colwise"}'
UNKNOWN = tuple(Device(kind="cuda", index=index, uuid=f"GPU-{index}") for index in range(4))


def manual(
    devices: str = "auto",
    attention: str = "auto",
    plan: str = "",
    spec: ParallelSpec | None = None,
    **degrees: int,
) -> ParallelConfig:
    spec = spec or ParallelSpec(**degrees)  # type: ignore[arg-type]
    return ParallelConfig(
        strategy="manual", devices=devices, attention=attention, degrees=spec, tensor_plan=plan
    )


def planned(
    facts: ModelFacts, config: ParallelConfig | str, cards: tuple[Device, ...] = (), dtype: str = "auto"
) -> Layout:
    """The layout, after checking what holds of every layout."""
    config = ParallelConfig(strategy=config) if isinstance(config, str) else config
    layout = planner.plan(facts, config, cards, dtype)
    spec = layout.spec
    assert len(layout.devices) == spec.world_size
    assert len({device.key for device in layout.devices}) == len(layout.devices)
    assert layout.reason and "\n" not in layout.reason and not layout.reason.endswith(".")
    assert "None" not in layout.reason and ",," not in layout.reason
    assert spec.ulysses <= min(divide(facts.units, spec.shares))
    assert not spec.tensor_shares or len(spec.tensor_shares) == spec.tensor
    for rank, card in enumerate(layout.devices):
        if card.total_bytes:
            assert planner.rank_bytes(facts, dtype, spec, rank) <= card.total_bytes * 0.85
    return layout


def indices(layout: Layout) -> list[int]:
    return [device.index for device in layout.devices]


def works(text: str) -> list[ParallelSpec]:
    """The layouts that the last line of a refusal names."""
    named = text.split("Works instead: ")[1].rstrip(".").split(", or ")
    degrees = [re.findall(r"(tensor|ulysses|ring|replica) (\d+)", one) for one in named]
    assert all(one or name == "one rank" for one, name in zip(degrees, named, strict=True)), text
    return [ParallelSpec(**{axis: int(degree) for axis, degree in one}) for one in degrees]  # type: ignore[arg-type]


# ---- what a rank holds


@pytest.mark.parametrize(
    ("stored", "dtype", "degrees", "gib"),
    [
        ("bfloat16", "auto", {}, 12.0),
        ("bfloat16", "auto", {"tensor": 2}, 3 + 4.5),
        ("bfloat16", "auto", {"tensor": 4}, 3 + 2.25),
        ("bfloat16", "auto", {"tensor": 5}, 3 + 9 * 5 / 24),
        ("bfloat16", "auto", {"ulysses": 4}, 12.0),
        ("bfloat16", "auto", {"ulysses": 2, "ring": 2}, 12.0),
        ("bfloat16", "auto", {"tensor": 2, "ulysses": 2}, 3 + 4.5),
        ("bfloat16", "auto", {"tensor": 2, "ring": 3}, 3 + 4.5),
        ("bfloat16", "float32", {"tensor": 2}, 15.0),
        ("float32", "float16", {"tensor": 2}, 3.75),
        ("bfloat16", "auto", {"tensor": 2, "tensor_shares": (24, 16)}, 3 + 9 * 14 / 24),
        ("bfloat16", "auto", {"tensor": 2, "tensor_shares": (1, 3)}, 3 + 9 * 18 / 24),
    ],
)
def test_the_fullest_rank_holds_its_part_of_what_is_divided_and_all_of_the_rest(
    stored: str, dtype: str, degrees: dict[str, int], gib: float
) -> None:
    facts = mock_facts(12, stored=stored, split=0.75)
    assert planner.rank_bytes(facts, dtype, ParallelSpec(**degrees)) == int(gib * GIB)


@pytest.mark.parametrize("heads", [1, 2, 7, 24, 38])
def test_the_ranks_together_hold_what_is_divided_once(heads: int) -> None:
    facts = mock_facts(12, heads=heads, split=0.75)
    for tensor in range(1, heads + 1):
        for shares in ((), tuple(range(1, tensor + 1)), (1,) * (tensor - 1) + (50,)):
            spec = ParallelSpec(tensor=tensor, tensor_shares=shares)
            each = [planner.rank_bytes(facts, "auto", spec, rank) - 3 * GIB for rank in range(tensor)]
            assert abs(sum(each) - 9 * GIB) <= tensor
            assert planner.rank_bytes(facts, "auto", spec) == max(each) + 3 * GIB


def test_heads_that_share_keys_and_values_stay_together() -> None:
    facts = mock_facts(12, heads=24, head_groups=8)
    assert planner.rank_bytes(facts, "auto", ParallelSpec(tensor=3)) == 12 * GIB * 3 // 8


def test_the_ranks_of_an_outer_axis_hold_the_same() -> None:
    spec = ParallelSpec(tensor=2, ulysses=2, tensor_shares=(2, 1))
    each = [planner.rank_bytes(mock_facts(24), "auto", spec, rank) // GIB for rank in range(4)]
    assert each == [16, 8, 16, 8]


# ---- the adaptive strategies on any machine


@pytest.mark.parametrize("links", [None, True, False])
@pytest.mark.parametrize("count", range(1, 9))
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
        ("prefer context", 30, "both"),  # has no room for all weights
    ],
)
def test_adaptive_strategies_use_all_equal_cards(
    strategy: str, gib: float, axis: str, count: int, links: bool | None
) -> None:
    cards = mock_cards(*[24.0] * count, linked=links)
    if count == 1 and gib > 20:
        with refused("one rank needs", "GPU 0 Mock has 24.0 GB", "2 like GPU 0 Mock with tensor 2"):
            planner.plan(mock_facts(gib), ParallelConfig(strategy=strategy), cards)
        return
    layout = planned(mock_facts(gib), strategy, cards)
    spec = layout.spec
    both = axis == "both" or (strategy == "auto" and axis == "tensor" and links is False)
    if count == 1:
        assert spec == ParallelSpec()
    elif both and count > 3:
        assert spec == ParallelSpec(tensor=2, ulysses=count // 2)
    elif axis == "ulysses":
        assert spec == ParallelSpec(ulysses=count)
    else:
        assert spec == ParallelSpec(tensor=6 if count == 7 else count)
    assert indices(layout) == list(range(spec.world_size))


@pytest.mark.parametrize("strategy", ADAPTIVE)
@pytest.mark.parametrize("gib", [5, 10, 30])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7, 9, 24, 28, 30, 38, 48])
def test_any_heads_on_any_number_of_cards_find_a_layout(heads: int, gib: int, strategy: str) -> None:
    for count in range(2, 17):
        facts = mock_facts(gib, heads=heads)
        if gib == 30 and heads == 1:
            with refused("one rank needs 30.0 GB", "one card of 36 GB"):
                planner.plan(facts, ParallelConfig(strategy=strategy), mock_cards(*[24.0] * count))
            continue
        spec = planned(facts, strategy, mock_cards(*[24.0] * count)).spec
        assert not spec.tensor_shares
        if spec.tensor > 1 and spec.context == 1:
            # No other number of cards has less to do for the fullest one, and none as little on fewer cards.
            fullest = {n: divide(heads, [1] * n)[0] for n in range(1, min(heads, count) + 1)}
            assert spec.tensor == min(fullest, key=lambda n: (fullest[n], n))
        elif spec.tensor > 1:
            assert gib == 30 and (strategy == "prefer context" or count >= 2 * heads)
            assert spec.tensor * spec.context > count / 2
        elif spec.ring == 1:
            assert spec.ulysses == min(heads, count) > count * 3 / 4 or heads < count
        else:
            assert heads < count, "ulysses goes as far as the heads"
            assert spec.context > count / 2


@pytest.mark.parametrize(
    ("heads", "cards", "tensor"),
    [
        (24, 3, 3),
        (24, 5, 5),
        (24, 7, 6),  # the fullest of seven has four heads, as each of six has
        (38, 4, 4),
        (38, 8, 8),
        (7, 4, 4),
        (4, 3, 2),
        (4, 8, 4),
        (30, 7, 6),
    ],
)
def test_the_weights_are_divided_over_as_many_cards_as_help(heads: int, cards: int, tensor: int) -> None:
    layout = planned(mock_facts(heads=heads), "prefer tensor", mock_cards(*[24.0] * cards))
    assert layout.spec == ParallelSpec(tensor=tensor)
    assert (f"over {tensor} of the {cards} cards" in layout.reason) == (1 < tensor < cards)


@pytest.mark.parametrize(("groups", "cards", "tensor"), [(8, 3, 3), (8, 12, 8), (2, 4, 2), (1, 4, 1)])
def test_heads_that_share_keys_and_values_limit_the_cards(groups: int, cards: int, tensor: int) -> None:
    facts = mock_facts(heads=24, head_groups=groups)
    assert planned(facts, "prefer tensor", mock_cards(*[24.0] * cards)).spec.tensor == tensor


@pytest.mark.parametrize("strategy", ADAPTIVE)
@pytest.mark.parametrize("heads", [1, 2, 3, 24])
def test_without_cards_ranks_run_on_the_cpu(strategy: str, heads: int) -> None:
    layout = planned(mock_facts(1000, heads=heads), strategy)
    assert {device.kind for device in layout.devices} == {"cpu"}
    ranks = default_cpu_ranks()
    axis = "ring" if heads == 1 else "ulysses" if strategy == "prefer context" else "tensor"
    assert layout.spec == ParallelSpec(**{axis: ranks})


def test_the_cpu_can_be_asked_for_beside_cards() -> None:
    layout = planned(mock_facts(), ParallelConfig(devices="cpu"), mock_cards(24, 24))
    assert {device.kind for device in layout.devices} == {"cpu"}


@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_a_model_that_fits_nowhere_is_refused_with_what_is_missing(strategy: str) -> None:
    with refused(
        *("tensor 2 needs 25.0 GB", "GPU 1 Mock has 20.0 GB"),
        *("2 cards of 30 GB with tensor 2", "or 3 like GPU 0 Mock with tensor 3"),
    ):
        planner.plan(mock_facts(50), ParallelConfig(strategy=strategy), mock_cards(24, 20))


@pytest.mark.parametrize("strategy", ADAPTIVE)
@pytest.mark.parametrize("gib", [30, 60, 100, 300])
def test_the_machine_a_refusal_names_has_room(strategy: str, gib: int) -> None:
    facts = mock_facts(gib, split=0.9)
    for cards in ((24,), (24, 24), (16, 12, 8), (24, 4)):
        try:
            planned(facts, strategy, mock_cards(*cards))
        except Refusal as refusal:
            larger = re.search(r"(\d+|one) cards? of (\d+) GB", refusal.instead)
            assert larger
            count = 1 if larger[1] == "one" else int(larger[1])
            planned(facts, strategy, mock_cards(*[int(larger[2])] * count))
            if more := re.search(r"(\d+) like GPU (\d)", refusal.instead):
                planned(facts, strategy, mock_cards(*[cards[int(more[2])]] * int(more[1])))


@pytest.mark.parametrize(
    ("dtype", "described"), [("auto", "tensor 2"), ("float32", "tensor 2"), ("bfloat16", "ulysses 2")]
)
def test_the_dtype_asked_for_decides_what_fits(dtype: str, described: str) -> None:
    layout = planned(mock_facts(30, stored="float32"), "auto", mock_cards(24, 24), dtype)
    assert layout.spec.describe() == described


def test_a_smaller_dtype_is_proposed_where_it_helps() -> None:
    with refused("tensor 2 needs 25.0 GB", "Works instead: dtype bfloat16 with tensor 2."):
        planner.plan(mock_facts(50, stored="float32"), ParallelConfig(), mock_cards(24, 30))


def test_adaptive_strategies_ignore_degrees() -> None:
    config = ParallelConfig(strategy="auto", degrees=ParallelSpec(ring=7, tensor=5, replica=0))
    assert planned(mock_facts(), config, mock_cards(24, 24)).spec.describe() == "ulysses 2"


# ---- unequal cards


@pytest.mark.parametrize(
    ("strategy", "cards", "gib", "described", "shares", "used"),
    [
        # The small card takes an equal part, but not the whole.
        ("auto", (24, 8), 10, "tensor 2", (), [0, 1]),
        ("prefer context", (24, 8), 10, "tensor 2", (), [0, 1]),
        ("auto", (6, 6, 6, 6), 10, "tensor 4", (), [0, 1, 2, 3]),
        # An equal part is too much for the smaller ones.
        ("auto", (24, 16), 30, "tensor 2 in shares 24:16", (24, 16), [0, 1]),
        ("auto", (16, 24), 30, "tensor 2 in shares 16:24", (16, 24), [0, 1]),
        ("prefer tensor", (24, 16), 30, "tensor 2 in shares 24:16", (24, 16), [0, 1]),
        ("prefer context", (24, 16), 30, "tensor 2 in shares 24:16", (24, 16), [0, 1]),
        ("auto", (24, 12, 24), 40, "tensor 3 in shares 24:12:24", (24, 12, 24), [0, 1, 2]),
        ("auto", (24, 24, 8), 40, "tensor 3 in shares 24:24:8", (24, 24, 8), [0, 1, 2]),
        # The small card would take too little to help: what the others can do counts.
        ("auto", (24, 8, 24, 24, 24), 10, "ulysses 4", (), [0, 2, 3, 4]),
        ("auto", (24, 4, 24), 30, "tensor 2", (), [0, 2]),
        ("prefer tensor", (24, 4, 24), 30, "tensor 2", (), [0, 2]),
        ("auto", (24, 4), 10, "one rank", (), [0]),
        ("prefer tensor", (24, 4), 10, "one rank", (), [0]),
        ("prefer context", (24, 4), 10, "one rank", (), [0]),
        # But where there is no room without it, it counts.
        ("auto", (24, 4), 23, "tensor 2 in shares 24:4", (24, 4), [0, 1]),
        ("auto", (24, 5, 24), 42, "tensor 3 in shares 24:5:24", (24, 5, 24), [0, 1, 2]),
        ("prefer context", (24, 8, 8, 24), 10, "ulysses 2", (), [0, 3]),
        ("auto", (24, 8, 8, 24), 10, "tensor 4", (), [0, 1, 2, 3]),
        ("auto", (16, 24, 32, 12), 9, "ulysses 4", (), [0, 1, 2, 3]),
    ],
)
def test_unequal_cards_do_what_they_can(
    strategy: str,
    cards: tuple[float, ...],
    gib: float,
    described: str,
    shares: tuple[int, ...],
    used: list[int],
) -> None:
    layout = planned(mock_facts(gib), strategy, mock_cards(*cards))
    assert layout.spec.describe() == described
    assert layout.spec.tensor_shares == shares
    assert indices(layout) == used


def test_the_reason_names_the_shares_in_the_order_of_the_cards() -> None:
    facts = mock_facts(30)
    assert planned(facts, "auto", mock_cards(24, 16)).reason.endswith(", in shares of 24 and 16 GB")
    asked = ParallelConfig(devices="2,0,1")
    layout = planned(mock_facts(40), asked, mock_cards(24, 12, 23.99))
    assert layout.reason.endswith(", in shares of 24, 24 and 12 GB")
    assert indices(layout) == [2, 0, 1]


def test_shares_are_counted_in_heads_where_whole_weights_fill_the_small_card() -> None:
    """Every rank holds 6.6 GiB whole; that leaves 3.6 of the 10.2 usable ones on the small card, not a third."""
    facts, cards = mock_facts(22, split=0.7), mock_cards(24, 12)
    layout = planned(facts, "auto", cards)
    assert layout.spec.tensor_shares == (19, 5)
    assert layout.reason.endswith(", in shares of 19 and 5 heads")
    grouped = planned(msgspec.structs.replace(facts, heads=48, head_groups=24), "auto", cards)
    assert grouped.reason.endswith(", in shares of 19 and 5 key/value heads")


def test_shares_are_found_wherever_there_are_any() -> None:
    """By trying all: two cards, and every whole number of heads that the first could take."""
    for gib in range(10, 50, 3):
        for split in (0.5, 0.72, 1.0):
            facts = mock_facts(gib, heads=10, split=split)
            for cards in ((24, 24), (24, 16), (12, 24), (24, 10), (16, 32)):
                limits = [card * 0.85 - gib * (1 - split) for card in cards]
                each = gib * split / 10
                possible = any(n * each <= limits[0] and (10 - n) * each <= limits[1] for n in range(1, 10))
                try:
                    found = planned(facts, manual(tensor=2), mock_cards(*cards)).spec
                except Refusal:
                    assert not possible, (gib, split, cards)
                else:
                    assert possible, (gib, split, cards)
                    equal = max(5 * each - limit for limit in limits) <= 0
                    assert equal == (not found.tensor_shares)


def test_the_largest_cards_are_used_in_their_order() -> None:
    layout = planned(mock_facts(heads=4), "prefer tensor", mock_cards(8, 24, 4, 16, 32, 6))
    assert indices(layout) == [0, 1, 3, 4]


def test_only_the_cards_asked_for_are_used_in_the_order_asked_for() -> None:
    config = ParallelConfig(strategy="prefer tensor", devices="3,1")
    assert indices(planned(mock_facts(), config, mock_cards(8, 16, 24, 32))) == [3, 1]


def busy(total: float, taken: float = 0.0, free: float = 1.0) -> Device:
    """A card of so many GiB, of which other programs hold a part."""
    return Device(
        kind="cuda",
        index=1,
        uuid="GPU-busy",
        total_bytes=int(total * GIB),
        free_bytes=int(free * GIB),
        taken_bytes=int(taken * GIB),
    )


@pytest.mark.parametrize("taken", [0, 0.3, 0.9])
def test_what_this_host_holds_of_a_card_does_not_change_the_layout(taken: float) -> None:
    """ComfyUI makes room for a load; a layout that depended on the moment would load the model anew each time.

    Nor does a display, for which a part of every card is left.
    """
    layout = planned(mock_facts(10), "auto", (*mock_cards(24), busy(24, taken)))
    assert layout.spec.describe() == "ulysses 2"


def test_what_other_programs_hold_of_a_card_is_not_used_for_weights() -> None:
    """24 GiB over two cards of 24, of which one has 12 left: 16 and 8."""
    layout = planned(mock_facts(24), "prefer tensor", (*mock_cards(24), busy(24, 12)))
    assert layout.spec.tensor_shares == (24, 12)
    used_up = planned(mock_facts(10), "auto", (*mock_cards(24), busy(24, 23)))
    assert used_up.devices == mock_cards(24)


def test_small_changes_of_other_programs_do_not_change_the_shares() -> None:
    layouts = [
        planned(mock_facts(24), "prefer tensor", (*mock_cards(24), busy(24, taken)))
        for taken in (12.0, 12.4, 12.99)
    ]
    assert [layout.spec.tensor_shares for layout in layouts] == [(24, 12)] * 3


def test_a_card_too_small_because_of_other_programs_is_refused_with_what_they_hold() -> None:
    with refused("has 24.0 GB, of which other programs hold 20"):
        planned(mock_facts(10), manual(ulysses=2), (*mock_cards(24), busy(24, 20.5)))


@pytest.mark.parametrize("gib", [10, 100])
@pytest.mark.parametrize("config", [*ADAPTIVE, manual(tensor=2)], ids=[*ADAPTIVE, "manual"])
@pytest.mark.parametrize("others", [(), (24,), (24, 8)], ids=str)
def test_cards_that_do_not_tell_their_memory_are_not_called_too_small(
    config: ParallelConfig | str, gib: int, others: tuple[float, ...]
) -> None:
    layout = planned(mock_facts(10), config, UNKNOWN[:2])
    assert layout.spec.tensor == layout.spec.world_size == 2
    if not others or gib == 10:
        cards = mock_cards(*others) + UNKNOWN[len(others) :]
        layout = planned(mock_facts(gib), config, cards)
        assert layout.spec.tensor == layout.spec.world_size
        assert not layout.spec.tensor_shares, "shares by memory need to know it"


# ---- manual


@pytest.mark.parametrize(
    ("config", "count", "described"),
    [
        (manual(), 1, "one rank"),
        (manual(), 8, "one rank"),
        (manual(tensor=2), 2, "tensor 2"),
        (manual(tensor=3), 4, "tensor 3"),
        (manual(tensor=5), 5, "tensor 5"),
        (manual(tensor=7), 8, "tensor 7"),
        (manual(ulysses=4), 4, "ulysses 4"),
        (manual(ulysses=3), 4, "ulysses 3"),
        (manual(ulysses=8), 8, "ulysses 8"),
        (manual(tensor=2, devices="1,3"), 4, "tensor 2"),
        (manual(tensor=4), 0, "tensor 4"),
        (manual(ulysses=8, devices="cpu"), 2, "ulysses 8"),
        (manual(tensor=2, tensor_shares=(5, 7)), 2, "tensor 2 in shares 5:7"),  # type: ignore[arg-type]
    ],
)
def test_manual_degrees_are_taken_as_they_are(config: ParallelConfig, count: int, described: str) -> None:
    layout = planned(mock_facts(20), config, mock_cards(*[24.0] * count))
    assert layout.spec == config.degrees
    assert layout.spec.describe() == described
    assert layout.reason == "as set on the Parallel Config"


def test_every_tensor_degree_up_to_the_heads_and_the_devices_is_accepted() -> None:
    for heads in (1, 2, 5, 24, 38):
        for degree in range(1, 10):
            facts = mock_facts(10, heads=heads)
            if degree <= heads:
                assert planned(facts, manual(tensor=degree), mock_cards(*[24] * 9)).spec.tensor == degree
            else:
                with refused(
                    f"tensor {degree} is more than", f"{'the one' if heads == 1 else heads} attention"
                ):
                    planner.plan(facts, manual(tensor=degree), mock_cards(*[24] * 9))


def test_manual_degrees_take_weighted_shares_where_equal_ones_have_no_room() -> None:
    layout = planned(mock_facts(30), manual(tensor=2), mock_cards(8, 24, 16))
    assert indices(layout) == [1, 2]
    assert layout.spec.tensor_shares == (24, 16)
    assert layout.reason == "as set on the Parallel Config, in shares of 24 and 16 GB"
    assert not planned(mock_facts(20), manual(tensor=2), mock_cards(24, 16)).spec.tensor_shares


def test_an_axis_that_is_not_built_is_refused_by_name() -> None:
    with refused("stage 2", "stage 1"):
        planner.check_config(manual(stage=2))


@pytest.mark.parametrize("axis", ["tensor", "ulysses", "ring", "stage", "replica"])
@pytest.mark.parametrize("degree", [0, -3])
def test_a_degree_below_one_is_refused_by_name(axis: str, degree: int) -> None:
    with refused(f"{axis} {degree}", f"{axis} 1"):
        planner.check_config(manual(**{axis: degree}))


def test_copies_are_refused_for_pipelines_and_accepted_for_transformers() -> None:
    with refused("replica 2 cannot be used with a pipeline", "Load Diffusion Model", "tensor 2"):
        planned(mock_facts(8), manual(replica=2), mock_cards(24, 24))
    alone = msgspec.structs.replace(mock_facts(8), pipeline_class="")
    assert planned(alone, manual(replica=2), mock_cards(24, 24)).spec == ParallelSpec(replica=2)
    both = planned(alone, manual(replica=2, tensor=2), mock_cards(24, 24, 24, 24))
    assert both.spec.world_size == len(both.devices) == 4


def test_idle_copies_are_told_and_busy_ones_are_not() -> None:
    two = ParallelSpec(replica=2)
    assert "CFG 1" in planner.idle_replicas(two, calls=1, batch=1)
    assert planner.idle_replicas(two, calls=2, batch=1) == planner.idle_replicas(two, calls=1, batch=2) == ""
    assert planner.idle_replicas(ParallelSpec(tensor=2), calls=1, batch=1) == ""


def test_fewer_tokens_than_ranks_are_refused() -> None:
    for spec in (ParallelSpec(ulysses=4), ParallelSpec(ring=4), ParallelSpec(tensor=2, ulysses=2, ring=2)):
        for tokens in (4, 5, 63, 4096):
            planner.check_sequences(spec, {"picture": tokens, "text": 1})
        with refused("needs 4 picture tokens", "this run has 3", "at most 3"):
            planner.check_sequences(spec, {"text": 512, "picture": 3})
    planner.check_sequences(ParallelSpec(tensor=8, replica=2), {"picture": 1, "text": 0})
    with refused("ulysses 2 x ring 2 needs 4 audio tokens"):
        planner.check_sequences(ParallelSpec(tensor=2, ulysses=2, ring=2), {"picture": 64, "audio": 3})


@pytest.mark.parametrize(
    "degrees",
    [
        *({"ulysses": 7}, {"ring": 7}, {"ulysses": 3, "ring": 2}, {"tensor": 2, "ulysses": 4}),
        *({"tensor": 2, "ring": 4}, {"tensor": 3, "ulysses": 2}, {"tensor": 2, "ulysses": 2, "ring": 2}),
    ],
    ids=str,
)
def test_the_context_axes_go_with_each_other_and_with_tensor(degrees: dict[str, int]) -> None:
    for pipeline in ("FluxPipeline", ""):
        facts = msgspec.structs.replace(mock_facts(8), pipeline_class=pipeline)
        layout = planned(facts, manual(**degrees), mock_cards(*[24.0] * 8))
        assert layout.spec == ParallelSpec(**degrees)  # type: ignore[arg-type]


def test_copies_go_with_the_context_axes() -> None:
    alone = msgspec.structs.replace(mock_facts(8), pipeline_class="")
    degrees = {"replica": 2, "ulysses": 2, "ring": 2}
    assert planned(alone, manual(**degrees), mock_cards(*[24.0] * 8)).spec.world_size == 8
    with refused("ulysses 2 x replica 4 needs 8 devices") as caught:
        planner.plan(alone, manual(replica=4, ulysses=2), mock_cards(24, 24, 24, 24))
    assert works(caught.value.instead)[0] == ParallelSpec(replica=2, ulysses=2)


@pytest.mark.parametrize("shares", [(1,), (1, 2, 3), (1, 0), (5, -1)])
def test_shares_that_are_not_one_for_each_rank_are_refused(shares: tuple[int, ...]) -> None:
    with refused("tensor 2", f"{shares[0]}", "1, 1"):
        planner.check_config(manual(tensor=2, tensor_shares=shares))  # type: ignore[arg-type]


@pytest.mark.parametrize(("axis", "degree"), [("tensor", 4), ("ulysses", 4), ("ring", 4), ("tensor", 64)])
@pytest.mark.parametrize(
    ("count", "instead"),
    [
        (1, "one rank."),
        (2, "tensor 2, or ulysses 2."),
        (3, "tensor 3, or ulysses 3."),
    ],
)
def test_more_ranks_than_devices_are_refused_with_what_fits(
    axis: str, degree: int, count: int, instead: str
) -> None:
    here = "here is 1." if count == 1 else f"here are {count}."
    with refused(f"{axis} {degree} needs {degree} devices; {here}") as caught:
        planner.plan(mock_facts(), manual(**{axis: degree}), mock_cards(*[24.0] * count))
    expected = works(f"Works instead: {instead}".replace("ulysses", "ring" if axis == "ring" else "ulysses"))
    assert works(caught.value.instead) == expected[:: 1 if axis == "tensor" else -1]


def test_what_is_proposed_has_room_too() -> None:
    with refused("tensor 4 needs 4 devices", "Works instead: tensor 3."):
        planner.plan(mock_facts(50), manual(tensor=4), mock_cards(24, 24, 24))


def test_devices_that_were_not_asked_for_do_not_count() -> None:
    with refused("needs 4 devices; here are 2"):
        planner.plan(mock_facts(), manual(tensor=4, devices="0,2"), mock_cards(24, 24, 24, 24))


def test_more_ranks_than_the_cpu_offers_are_refused() -> None:
    with refused("needs 9 devices; here are 8", "8 CPU ranks", "tensor 8, or ulysses 8."):
        planner.plan(mock_facts(), manual(tensor=9), ())


@pytest.mark.parametrize(
    ("axis", "heads", "degree", "count", "instead"),
    [
        ("ulysses", 2, 4, 8, "ulysses 2 x ring 2, or tensor 2."),
        ("ulysses", 4, 8, 8, "ulysses 4 x ring 2, or tensor 4."),
        ("ulysses", 4, 6, 8, "ulysses 3 x ring 2, or tensor 4."),
        ("ulysses", 4, 5, 8, "ring 5, or tensor 4."),
        ("ulysses", 7, 8, 8, "ulysses 4 x ring 2, or tensor 7."),
        ("ulysses", 1, 2, 8, "ring 2."),
        ("tensor", 4, 5, 8, "tensor 4, or ring 5."),
        ("tensor", 7, 8, 8, "tensor 7, or ulysses 4 x ring 2."),
        ("tensor", 1, 8, 8, "ring 8."),
    ],
)
def test_a_degree_that_does_not_suit_the_heads_is_refused_with_the_nearest_that_do(
    axis: str, heads: int, degree: int, count: int, instead: str
) -> None:
    kind = "the one attention head" if heads == 1 else f"the {heads} attention heads"
    with refused(f"{axis} {degree}", kind, f"Works instead: {instead}"):
        planner.plan(mock_facts(heads=heads), manual(**{axis: degree}), mock_cards(*[24.0] * count))


@pytest.mark.parametrize(
    ("axis", "instead"), [("tensor", "tensor 4, or"), ("ulysses", "ulysses 3 x ring 2, or")]
)
def test_heads_that_share_keys_and_values_are_refused_by_their_groups(axis: str, instead: str) -> None:
    facts = mock_facts(heads=48, head_groups=4)
    with refused(f"{axis} 6", "the 4 key/value heads", f"Works instead: {instead}"):
        planner.plan(facts, manual(**{axis: 6}), mock_cards(*[24.0] * 8))
    assert planned(facts, manual(ring=6), mock_cards(*[24.0] * 8)).spec == ParallelSpec(ring=6)


@pytest.mark.parametrize(
    ("heads", "tensor", "ulysses", "left", "instead"),
    [
        (
            4,
            2,
            4,
            "the 2 attention heads that tensor 2 leaves a rank",
            "tensor 2 x ulysses 2 x ring 2, or tensor 4",
        ),
        (7, 4, 2, "the one attention head that tensor 4 leaves a rank", "tensor 4 x ring 2, or tensor 7"),
        (38, 4, 2, "", ""),
        (5, 2, 3, "the 2 attention heads that tensor 2 leaves", "tensor 2 x ring 3, or tensor 5"),
    ],
)
def test_ulysses_divides_the_heads_that_tensor_leaves(
    heads: int, tensor: int, ulysses: int, left: str, instead: str
) -> None:
    config, cards = manual(tensor=tensor, ulysses=ulysses), mock_cards(*[24.0] * 8)
    if not left:
        planned(mock_facts(heads=heads), config, cards)
        return
    with refused(f"ulysses {ulysses} is more than {left}", f"Works instead: {instead}."):
        planner.plan(mock_facts(heads=heads), config, cards)


MACHINES = [(24.0,) * count for count in range(1, 9)] + [(24, 16, 8), (24, 8, 8, 24), ()]
ASKED = [
    *(ParallelSpec(tensor=tensor, ulysses=ulysses) for tensor in (1, 2, 3) for ulysses in (1, 2, 3, 5)),
    *(ParallelSpec(tensor=tensor, ring=ring) for tensor in (1, 2, 8) for ring in (2, 3, 4, 9)),
    *(ParallelSpec(ulysses=ulysses, ring=ring) for ulysses in (2, 4, 8) for ring in (2, 3)),
    *(ParallelSpec(tensor=tensor) for tensor in range(4, 10)),
    *(ParallelSpec(tensor=2, ulysses=2, ring=ring) for ring in (2, 3)),
]


@pytest.mark.parametrize("gib", [5, 30])
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", min(TENSOR_CLASSES - CONTEXT_CLASSES), "Other"])
def test_whatever_a_refusal_proposes_is_accepted(name: str, gib: int) -> None:
    proposed = set()
    for heads in (1, 7, 24):
        facts = mock_facts(gib, heads=heads, transformer_class=name)
        for machine in MACHINES:
            for asked in ASKED:
                try:
                    planned(facts, manual(spec=asked), mock_cards(*machine))
                except Refusal as refusal:
                    if " GB" not in refusal.instead:
                        specs = works(refusal.instead)
                        assert 1 <= len(specs) <= 2, refusal
                        proposed |= {(heads, machine, spec) for spec in specs}
    for heads, machine, spec in proposed:
        facts = mock_facts(gib, heads=heads, transformer_class=name)
        planned(facts, manual(spec=spec), mock_cards(*machine))
    assert len(proposed) >= (3 if name == "Other" else 40), len(proposed)


@pytest.mark.parametrize("links", [None, True, False])
@pytest.mark.parametrize("strategy", ADAPTIVE)
def test_whatever_is_chosen_is_accepted_and_leaves_few_cards_idle(strategy: str, links: bool | None) -> None:
    """`planned` checks the layout; only a model that fits no layout of the machine is refused."""
    for gib, heads, tokens in itertools.product((5, 18, 30, 60), (1, 3, 7, 24), (0, 4608, 75_600)):
        facts = mock_facts(gib, heads=heads, tokens=tokens)
        for machine in MACHINES:
            try:
                layout = planned(facts, strategy, mock_cards(*machine, linked=links))
            except Refusal:
                cards = sorted(machine)[-heads:]
                assert gib > sum(cards) * 0.85 * heads / (heads + len(cards) - 1)
            else:
                assert layout.spec.replica == layout.spec.stage == 1
                equal = len(set(machine)) == 1 and (gib < 20 or heads == 24)
                equal = equal and (strategy != "prefer tensor" or heads >= len(machine))
                assert not equal or 2 * layout.spec.world_size >= min(len(machine), 8)


@pytest.mark.parametrize("axis", ["tensor", "ulysses", "ring"])
def test_a_class_without_a_plan_is_refused_by_name(axis: str) -> None:
    facts = mock_facts(transformer_class="UNet2DConditionModel")
    with refused("UNet2DConditionModel", f"{axis} 2", "verified", "Works instead: one rank."):
        planner.plan(facts, manual(**{axis: 2}), mock_cards(24, 24))


@pytest.mark.parametrize("config", [*ADAPTIVE, manual()], ids=[*ADAPTIVE, "manual"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_class_without_a_plan_runs_on_one_rank(config: ParallelConfig | str, count: int) -> None:
    facts = mock_facts(transformer_class="UNet2DConditionModel")
    layout = planned(facts, config, mock_cards(*[24.0] * count))
    assert layout.spec == ParallelSpec()
    if count > 1 and isinstance(config, str):
        assert "UNet2DConditionModel" in layout.reason


@pytest.mark.parametrize(
    ("config", "needs"),
    [(manual(), "one rank needs 30.0 GB"), (manual(ulysses=2), "ulysses 2 needs 30.0 GB")],
    ids=["one rank", "ulysses 2"],
)
def test_manual_degrees_that_have_no_room_are_refused_with_the_card(
    config: ParallelConfig, needs: str
) -> None:
    with refused(needs, "GPU 1 Mock has 20.0 GB", "Works instead: tensor 2."):
        planner.plan(mock_facts(30), msgspec.structs.replace(config, devices="1,0"), mock_cards(20, 20))


# ---- a user's own tensor plan


@pytest.mark.parametrize("strategy", ADAPTIVE)
@pytest.mark.parametrize("gib", [10, 30])
def test_a_tensor_plan_asks_for_the_tensor_axis(strategy: str, gib: int) -> None:
    config = ParallelConfig(strategy=strategy, tensor_plan=PLAN)
    layout = planned(mock_facts(gib), config, mock_cards(24, 24))
    assert layout.spec == ParallelSpec(tensor=2, tensor_plan=PLAN)
    assert "tensor plan" in layout.reason


@pytest.mark.parametrize(
    ("strategy", "tokens", "described"),
    [
        ("auto", 4608, "tensor 4"),
        ("auto", 75_600, "tensor 2 x ulysses 2"),
        ("prefer tensor", 75_600, "tensor 4"),
        ("prefer context", 4608, "tensor 2 x ulysses 2"),
    ],
)
@pytest.mark.parametrize("gib", [10, 30])
def test_beside_a_tensor_plan_the_sequence_may_be_divided(
    strategy: str, tokens: int, described: str, gib: int
) -> None:
    config = ParallelConfig(strategy=strategy, tensor_plan=PLAN)
    layout = planned(mock_facts(gib, tokens=tokens), config, mock_cards(24, 24, 24, 24))
    assert layout.spec.describe() == described
    assert "as the tensor plan says" in layout.reason


def test_a_tensor_plan_opens_no_class_that_was_never_verified() -> None:
    facts = mock_facts(transformer_class="NewTransformer2DModel")
    adaptive = ParallelConfig(strategy="auto", tensor_plan=PLAN)
    assert planned(facts, adaptive, mock_cards(24, 24)).spec == ParallelSpec()
    with refused("NewTransformer2DModel cannot run with tensor 2", "verified", "Works instead: one rank"):
        planner.plan(facts, manual(tensor=2, plan=PLAN), mock_cards(24, 24))


@pytest.mark.parametrize("config", [*ADAPTIVE, "manual"])
def test_on_one_rank_a_tensor_plan_is_not_needed(config: str) -> None:
    """The same workflow runs on any machine."""
    layout = planned(mock_facts(), ParallelConfig(strategy=config, tensor_plan=PLAN), mock_cards(24))
    assert layout.spec == ParallelSpec()
    assert "the tensor plan is not needed" in layout.reason


def test_a_tensor_plan_goes_with_manual_degrees() -> None:
    assert planned(mock_facts(), manual(plan=PLAN, tensor=3), mock_cards(24, 24, 24)).spec == ParallelSpec(
        tensor=3, tensor_plan=PLAN
    )
    layout = planned(mock_facts(), manual(plan=PLAN, ulysses=2), mock_cards(24, 24))
    assert layout.spec == ParallelSpec(ulysses=2)
    assert "the tensor plan is not needed" in layout.reason


@pytest.mark.parametrize("strategy", [*ADAPTIVE, "manual"])
@pytest.mark.parametrize("text", ["{", "[]", '{"a": "sideways"}'])
def test_a_malformed_tensor_plan_is_refused_before_anything_else(strategy: str, text: str) -> None:
    with refused("tensor plan"):
        planner.check_config(ParallelConfig(strategy=strategy, tensor_plan=text))


# ---- strategies, attention, devices


@pytest.mark.parametrize("strategy", ["", "fastest", "Auto", "tensor"])
def test_an_unknown_strategy_is_refused_with_all_that_exist(strategy: str) -> None:
    with refused(f"'{strategy}'", "auto", "prefer tensor", "prefer context", "manual"):
        planner.check_config(ParallelConfig(strategy=strategy))


@pytest.mark.parametrize("attention", ["auto", "native"])
def test_attention_of_pytorch_is_accepted(attention: str) -> None:
    layout = planned(mock_facts(), ParallelConfig(attention=attention), mock_cards(24, 24))
    assert layout.spec.attention == "native"


@pytest.mark.parametrize("attention", ["", "hub/kernel", "flash_hub"])
@pytest.mark.parametrize("strategy", ["auto", "manual"])
def test_attention_that_does_not_exist_is_refused_by_name(attention: str, strategy: str) -> None:
    with refused(f"'{attention}'", "auto, native"):
        planner.check_config(ParallelConfig(strategy=strategy, attention=attention))


def test_plan_checks_the_config_itself() -> None:
    with refused("stage 2"):
        planner.plan(mock_facts(), manual(stage=2), mock_cards(24, 24))


def test_devices_that_do_not_exist_are_refused() -> None:
    with refused("GPU 7"):
        planner.plan(mock_facts(), ParallelConfig(devices="0,7"), mock_cards(24, 24))


# ---- model, size, tokens


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [("bfloat16", "auto", "bfloat16"), ("float32", "auto", "float32"), ("float32", "float16", "float16")],
)
def test_a_model_is_held_in_its_own_dtype_unless_another_is_asked_for(
    stored: str, asked: str, used: str
) -> None:
    facts = mock_facts(stored=stored)
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


def test_the_planner_is_light_enough_for_the_host() -> None:
    """ComfyUI must start as fast with the pack as without it."""
    heavy = ("torch", "numpy", "diffusers", "transformers", "safetensors", "pynvml")
    code = f"import sys, runtime.planner; print(sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
