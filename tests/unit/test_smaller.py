"""What is proposed, and tried, after a layout ran out of memory: layouts that are accepted and need less."""

from __future__ import annotations

import itertools

import pytest

from runtime import devices
from runtime.accept import problem_of
from runtime.planner import Wanted, plan, smaller_advice, smaller_layouts
from runtime.room import Situation, rank_bytes
from runtime.smaller import smaller
from runtime.spec import Layout, ParallelConfig, ParallelSpec
from tests.support.mocks import GIB, mock_cards, mock_facts

FACTS = mock_facts(gib=22)
FOUR = mock_cards(32, 32, 32, 32)


def words(specs: list[ParallelSpec] | tuple[Layout, ...]) -> list[str]:
    return [(one.spec if isinstance(one, Layout) else one).describe() for one in specs]


def wanted(strategy: str = "auto", **others: object) -> Wanted:
    return Wanted(facts=FACTS, config=ParallelConfig(strategy=strategy, **others))


def layout_of(spec: ParallelSpec, cards=FOUR) -> Layout:
    return Layout(spec=spec, devices=cards[: spec.world_size], reason="")


# ---- which


def test_weights_are_divided_beside_the_sequence_then_instead_of_it() -> None:
    found = words(smaller(Situation(facts=FACTS, devices=FOUR), ParallelSpec(ulysses=4), tried=2 * GIB))
    assert found[:2] == ["tensor 2 x ulysses 2", "tensor 4"]


def test_more_tensor_uses_cards_that_stood_idle() -> None:
    cards = mock_cards(24, 24, 24)
    found = smaller(Situation(facts=FACTS, devices=cards), ParallelSpec(tensor=2), tried=GIB)
    assert words(found) == ["tensor 3"]


def test_nothing_is_smaller_than_all_cards_sharing_the_weights() -> None:
    for tried in (0, GIB, 20 * GIB):
        assert not smaller(Situation(facts=FACTS, devices=FOUR), ParallelSpec(tensor=4), tried=tried)


def test_what_is_computed_with_counts() -> None:
    """A small model and a long video: dividing the weights instead of the sequence would take more, not less."""
    situation = Situation(facts=mock_facts(gib=2, tokens=75_000), devices=FOUR)
    assert "tensor 4" not in words(
        smaller(situation, ParallelSpec(ulysses=4), tried=4 * GIB, computing=20 * GIB)
    )
    assert words(smaller(situation, ParallelSpec(tensor=4), tried=4 * GIB, computing=20 * GIB))[0].startswith(
        "ulysses"
    )


def test_what_saves_too_little_comes_last() -> None:
    situation = Situation(facts=FACTS, devices=FOUR)
    halves = "tensor 2 x ulysses 2"  # frees 11 GiB of weights, and computes with twice as much
    assert words(smaller(situation, ParallelSpec(ulysses=4), tried=2 * GIB))[0] == halves
    missing_more = words(smaller(situation, ParallelSpec(ulysses=4), tried=5 * GIB))
    assert missing_more[0] == "tensor 4"
    assert halves in missing_more[1:]


@pytest.mark.parametrize("tried", [0, GIB, 6 * GIB])
@pytest.mark.parametrize("gib", [2, 12, 22, 60])
def test_whatever_is_proposed_is_accepted_and_another_layout(gib: float, tried: int) -> None:
    for cards in (FOUR, mock_cards(24, 16), mock_cards(80, 24, 24), mock_cards(*[24] * 7)):
        situation = Situation(facts=mock_facts(gib=gib), devices=cards)
        for tensor, ulysses, ring in itertools.product((1, 2, 4), (1, 2, 4), (1, 2)):
            current = ParallelSpec(tensor=tensor, ulysses=ulysses, ring=ring)
            if problem_of(situation, current):
                continue
            for spec in smaller(situation, current, tried=tried):
                assert problem_of(situation, spec) is None
                assert spec != current
                if not tried:
                    assert rank_bytes(situation.facts, "auto", spec) < rank_bytes(
                        situation.facts, "auto", current
                    )


def test_ranks_on_the_cpu_share_one_memory() -> None:
    cpu = Situation(facts=FACTS, devices=devices.cpu_devices(4))
    assert words(smaller(cpu, ParallelSpec(ulysses=2)))[0].startswith("tensor")
    assert not smaller(cpu, ParallelSpec(tensor=2)), "four parts of the weights take what two take"


def test_unequal_cards_keep_weighted_shares() -> None:
    cards = mock_cards(24, 16, 8)
    situation = Situation(facts=mock_facts(gib=30), devices=cards)
    current = plan(situation.facts, ParallelConfig(), cards=cards).spec
    for spec in smaller(situation, current, tried=GIB):
        assert problem_of(situation, spec) is None


# ---- as the nodes ask


def test_backend_and_plan_stay() -> None:
    config = ParallelConfig(strategy="auto", tensor_plan='{"a.*": "columns"}')
    asked = Wanted(facts=FACTS, config=config)
    current = layout_of(ParallelSpec(tensor=2, attention="flash", tensor_plan=config.tensor_plan), FOUR)
    found = smaller_layouts(asked, current, tried=GIB, cards=FOUR)
    assert found
    for one in found:
        assert one.spec.attention == "flash"
        assert one.spec.tensor_plan == (config.tensor_plan if one.spec.tensor > 1 else "")
        assert "tensor 2 ran out of memory" in one.reason


def test_what_was_allocated_beyond_the_weights_was_computed_with() -> None:
    long = Wanted(facts=mock_facts(gib=2, tokens=75_000), config=ParallelConfig())
    current = layout_of(ParallelSpec(tensor=4))
    assert not smaller_layouts(long, current, tried=GIB // 8, cards=FOUR)
    found = smaller_layouts(long, current, tried=GIB // 8, allocated=28 * GIB, cards=FOUR)
    assert words(found)[0].startswith("ulysses")


@pytest.mark.parametrize("strategy", ["auto", "prefer tensor", "prefer context", "manual"])
def test_only_degrees_set_by_hand_are_kept(strategy: str) -> None:
    asked = wanted(strategy, degrees=ParallelSpec(ulysses=4))
    assert asked.may_change == (strategy != "manual")
    layout = plan(FACTS, asked.config, cards=FOUR)
    advice = smaller_advice(asked, layout, smaller_layouts(asked, layout, tried=GIB, cards=FOUR))
    assert ("by itself" in advice) == (strategy == "manual" and "Less memory" in advice)


def test_the_advice_has_figures_and_says_when_there_is_nothing_smaller() -> None:
    asked, layout = wanted("manual"), layout_of(ParallelSpec(tensor=2))
    advice = smaller_advice(asked, layout, smaller_layouts(asked, layout, tried=GIB, cards=FOUR))
    assert "tensor 4 (5.5 GB)" in advice and "11.0 GB in tensor 2" in advice
    whole = layout_of(ParallelSpec(tensor=4))
    assert (
        smaller_advice(asked, whole, ())
        == "No layout of this model on these devices needs less memory than tensor 4."
    )


def test_cards_that_were_not_asked_for_are_not_taken() -> None:
    asked = wanted("auto", devices="0,1")
    layout = layout_of(ParallelSpec(tensor=2))
    assert not smaller_layouts(asked, layout, tried=GIB, cards=FOUR)
