"""The guides' table "Choosing a strategy" as code: a test for each row, and what links and lengths change.

What a row recommends and is not built yet is never chosen, and the reason says what is done instead.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest

from runtime.choose import LONG_SEQUENCE, choose, linked
from runtime.room import Situation
from runtime.spec import Device, ParallelSpec
from tests.support.mocks import mock_cards, mock_facts

ADAPTIVE = ("auto", "prefer tensor", "prefer context")
FITS, DOES_NOT_FIT = 10.0, 30.0  # GiB of weights for cards of 24
VIDEO = 75_600  # tokens of 81 frames at 1280x720


def situation(
    gib: float, *cards: float, links: bool | None = True, tokens: int = 4608, heads: int = 24
) -> Situation:
    facts = mock_facts(gib, tokens=tokens, heads=heads)
    return Situation(facts=facts, devices=mock_cards(*cards, linked=links))


# ---- the rows


def test_copies_are_for_who_asks_so_one_picture_is_made_faster() -> None:
    """Row: the model fits and there are many prompts; of those, and of CFG, the planner knows nothing."""
    spec, reason = choose(situation(FITS, 24, 24, 24, 24), "auto")
    assert spec == ParallelSpec(ulysses=4)
    assert reason == "the weights fit on each card used, so the sequence is divided for speed"


def test_device_map_is_not_built_so_weights_are_divided_over_slow_links() -> None:
    """Row: it does not fit and the links are slow."""
    spec, reason = choose(situation(DOES_NOT_FIT, 24, 24, links=False), "auto")
    assert spec == ParallelSpec(tensor=2)
    assert reason == (
        "the weights do not fit one card and the cards reach each other only through the host, where dividing "
        "layers would be better, which is not built yet, so the weights are divided"
    )


@pytest.mark.parametrize("links", [None, True, False])
@pytest.mark.parametrize("tokens", [0, 4608, VIDEO])
def test_context_parallelism_for_a_sequence_on_cards_that_hold_all_weights(
    links: bool | None, tokens: int
) -> None:
    """Row: long sequences. Short ones gain too, as long as the weights fit."""
    spec, reason = choose(situation(FITS, 24, 24, links=links, tokens=tokens), "auto")
    assert spec == ParallelSpec(ulysses=2)
    assert "the sequence is divided" in reason


def test_tensor_parallelism_for_weights_that_do_not_fit_over_fast_links() -> None:
    """Row: one component's weights do not fit and the links are fast."""
    spec, reason = choose(situation(DOES_NOT_FIT, 24, 24), "auto")
    assert spec == ParallelSpec(tensor=2)
    assert reason == "the weights do not fit one card, so the weights are divided"


def test_tensor_with_context_is_not_built_so_weights_are_divided_for_long_sequences() -> None:
    """Row: weights and sequence are both too large."""
    spec, reason = choose(situation(DOES_NOT_FIT, 24, 24, 24, 24, tokens=VIDEO), "auto")
    assert spec == ParallelSpec(tensor=4)
    assert reason == (
        "the weights do not fit one card and the sequence is long, where dividing both would be better, which is "
        "not built yet, so the weights are divided"
    )


def test_what_is_not_built_is_never_chosen() -> None:
    for strategy, gib, count, links, tokens, heads in itertools.product(
        ADAPTIVE, (5, 18, 30, 90), range(1, 9), (None, True, False), (0, VIDEO), (1, 7, 24, 38)
    ):
        here = situation(gib, *[24.0] * count, links=links, tokens=tokens, heads=heads)
        spec, reason = choose(here, strategy)
        assert (spec.replica, spec.stage, spec.ring) == (1, 1, 1)
        assert spec.tensor == 1 or spec.ulysses == 1
        assert spec.world_size <= count
        assert reason and "\n" not in reason and len(reason) < 200


# ---- links


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ([(1, 2), (0, 2), (0, 1)], True),
        ([(1,), (0,), ()], False),
        ([(1, 2), (0, 2), None], None),
        ([None, None, None], None),
        ([(1, 2, 3), (0, 2, 3), (0, 1, 3)], True),
    ],
)
def test_cards_are_linked_if_each_reaches_every_other(
    peers: list[tuple[int, ...] | None], expected: bool | None
) -> None:
    cards = [Device(kind="cuda", index=index, peers=reached) for index, reached in enumerate(peers)]
    assert linked(cards) is expected


def test_only_the_links_of_the_cards_used_count() -> None:
    """The small card is left out, and with it the only slow link."""
    a, small, b = mock_cards(24, 4, 24)
    cards = (
        msgspec.structs.replace(a, peers=(2,)),
        msgspec.structs.replace(small, peers=()),
        msgspec.structs.replace(b, peers=(0,)),
    )
    spec, reason = choose(Situation(facts=mock_facts(DOES_NOT_FIT), devices=cards), "auto")
    assert spec == ParallelSpec(tensor=2)
    assert "host" not in reason


@pytest.mark.parametrize("strategy", ADAPTIVE)
@pytest.mark.parametrize("gib", [FITS, DOES_NOT_FIT])
def test_unknown_links_count_as_fast(strategy: str, gib: float) -> None:
    for cards in ((24, 24), (24, 8, 8, 24), (24, 16), (24,) * 7):
        unknown, fast = (choose(situation(gib, *cards, links=links), strategy) for links in (None, True))
        assert unknown == fast
        assert "host" not in unknown[1]


def test_over_slow_links_few_cards_divide_the_sequence_rather_than_many_the_weights() -> None:
    fast, slow = (choose(situation(FITS, 24, 8, 8, 24, links=links), "auto") for links in (True, False))
    assert fast == (
        ParallelSpec(tensor=4),
        "the sequence can be divided over few of the cards only, so the weights are divided",
    )
    assert slow == (
        ParallelSpec(ulysses=2),
        "the cards reach each other only through the host, so the sequence is divided over 2 of the 4 cards",
    )


# ---- reasons that say why not the other


@pytest.mark.parametrize(
    ("strategy", "here", "spec", "reason"),
    [
        ("auto", situation(FITS, 24), {}, "there is only one device"),
        (
            "auto",
            situation(FITS, 24, 4),
            {},
            "the weights fit on one card, and no other has room for a share",
        ),
        ("auto", situation(FITS, 24, 24, heads=1), {}, "a single attention head"),
        ("auto", situation(FITS, 24, 8), {"tensor": 2}, "only one card can hold all weights"),
        ("auto", situation(FITS, 24, 24, heads=7), {"tensor": 2}, "cannot divide the 7 heads"),
        ("prefer context", situation(FITS, 24, 24, heads=7), {"tensor": 2}, "cannot divide the 7 heads"),
        ("auto", situation(FITS, 24, 24, 24, 24, heads=38), {"tensor": 4}, "few of the cards"),
        ("auto", situation(FITS, 24, 24, 24), {"ulysses": 2}, "over 2 of the 3 cards"),
        ("auto", situation(FITS, 0, 0), {"tensor": 2}, "not every card tells its memory"),
        ("prefer context", situation(DOES_NOT_FIT, 24, 24), {"tensor": 2}, "do not fit one card"),
        ("prefer context", situation(FITS, 24, 24), {"ulysses": 2}, "context is preferred"),
        ("prefer tensor", situation(FITS, 24, 24), {"tensor": 2}, "tensor is preferred, so the weights"),
        ("prefer tensor", situation(FITS, 24, 24, links=False), {"tensor": 2}, "though over the host"),
        ("prefer tensor", situation(DOES_NOT_FIT, 24, 24, links=False), {"tensor": 2}, "dividing layers"),
    ],
)
def test_reasons(strategy: str, here: Situation, spec: dict[str, int], reason: str) -> None:
    chosen, why = choose(here, strategy)
    assert chosen == ParallelSpec(**spec)
    assert reason in why


def test_a_picture_of_one_megapixel_is_no_long_sequence() -> None:
    assert mock_facts().tokens < LONG_SEQUENCE < VIDEO
