"""The guides' table "Choosing a strategy" as code: a test for each row, and what links, lengths and heads change.

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
    assert spec == ParallelSpec(**{"ring" if links is False and tokens == VIDEO else "ulysses": 2})
    assert "the sequence is divided" in reason


def test_tensor_parallelism_for_weights_that_do_not_fit_over_fast_links() -> None:
    """Row: one component's weights do not fit and the links are fast."""
    spec, reason = choose(situation(DOES_NOT_FIT, 24, 24), "auto")
    assert spec == ParallelSpec(tensor=2)
    assert reason == "the weights do not fit one card, so the weights are divided"


@pytest.mark.parametrize(
    ("count", "spec"),
    [
        (2, {"tensor": 2}),
        (3, {"tensor": 3}),
        (4, {"tensor": 2, "ulysses": 2}),
        (5, {"tensor": 2, "ulysses": 2}),
        (6, {"tensor": 2, "ulysses": 3}),
        (7, {"tensor": 2, "ulysses": 3}),
        (8, {"tensor": 2, "ulysses": 4}),
    ],
)
def test_tensor_with_context_for_weights_and_sequences_that_are_both_large(
    count: int, spec: dict[str, int]
) -> None:
    """Row: weights and sequence are both too large. The weights over as few cards as hold them."""
    chosen, reason = choose(situation(DOES_NOT_FIT, *[24] * count, tokens=VIDEO), "auto")
    assert chosen == ParallelSpec(**spec)
    over = {5: " over 4 of the 5 cards", 7: " over 6 of the 7 cards"}.get(count, "")
    if count > 3:
        assert (
            reason == f"the sequence is long and the weights do not fit one card, so both are divided{over}"
        )


def test_the_weights_take_more_cards_where_that_leaves_fewer_idle() -> None:
    """Three cards hold the weights, but of eight, three twice leave two without work."""
    assert choose(situation(50, *[24] * 6, tokens=VIDEO), "auto")[0] == ParallelSpec(tensor=3, ulysses=2)
    assert choose(situation(50, *[24] * 8, tokens=VIDEO), "auto")[0] == ParallelSpec(tensor=4, ulysses=2)


def test_what_is_not_built_is_never_chosen() -> None:
    for strategy, gib, count, links, tokens, heads in itertools.product(
        ADAPTIVE, (5, 18, 30, 90), range(1, 9), (True, False), (0, VIDEO), (1, 7, 24)
    ):
        here = situation(gib, *[24.0] * count, links=links, tokens=tokens, heads=heads)
        spec, reason = choose(here, strategy)
        assert (spec.replica, spec.stage) == (1, 1)
        assert spec.world_size <= count
        assert reason and "\n" not in reason and len(reason) < 230, reason


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


def test_where_few_cards_hold_the_weights_all_of_them_divide_both_over_slow_links() -> None:
    fast, slow = (choose(situation(FITS, 24, 8, 8, 24, links=links), "auto") for links in (True, False))
    assert fast == (
        ParallelSpec(tensor=4),
        "few of the cards can hold all weights, so the weights are divided",
    )
    assert slow == (
        ParallelSpec(tensor=2, ulysses=2),
        "the cards reach each other only through the host, so weights and sequence are divided, "
        "which exchanges least",
    )
    long = situation(FITS, 24, 8, 8, 24, tokens=VIDEO)
    assert choose(long, "auto")[0] == ParallelSpec(tensor=2, ulysses=2)
    assert choose(long, "prefer context")[0] == ParallelSpec(ulysses=2)


@pytest.mark.parametrize(
    ("tokens", "links", "rings"),
    [
        (4608, False, ()),  # a picture's exchanges are too much to hide
        (VIDEO, None, ()),
        (VIDEO, True, ()),
        (VIDEO, False, (2, 3, 4, 5, 6, 7, 8)),
        (32_760, False, (2, 3, 4, 5)),  # 81 frames at 832x480: the parts of more cards are too short
    ],
)
def test_a_ring_over_slow_links_for_sequences_whose_work_hides_it(
    tokens: int, links: bool | None, rings: tuple[int, ...]
) -> None:
    for count in range(2, 9):
        here = situation(FITS, *[24] * count, links=links, tokens=tokens)
        for strategy in ("auto", "prefer context"):
            spec, reason = choose(here, strategy)
            axis = "ring" if count in rings else "ulysses"
            assert spec == ParallelSpec(**{axis: count})
            assert ("in a ring, whose exchanges hide" in reason) == (count in rings)
    both = choose(situation(DOES_NOT_FIT, *[24] * 4, links=links, tokens=tokens), "prefer context")[0]
    assert both == ParallelSpec(tensor=2, **({"ring": 2} if rings else {"ulysses": 2}))


def test_weights_that_are_divided_meet_slow_links_with_as_few_ranks_as_hold_them() -> None:
    spec, reason = choose(situation(DOES_NOT_FIT, *[24] * 5, links=False), "auto")
    assert spec == ParallelSpec(tensor=2, ulysses=2)
    assert reason == (
        "the cards reach each other only through the host, so weights and sequence are divided over 4 of the 5 "
        "cards, which exchanges least"
    )


# ---- heads


@pytest.mark.parametrize(
    ("heads", "count", "tokens", "spec"),
    [
        # Whole heads may be divided unevenly.
        (24, 5, 4608, {"ulysses": 5}),
        (38, 4, VIDEO, {"ulysses": 4}),
        (7, 2, 4608, {"ulysses": 2}),
        # Beyond the heads, a ring.
        (4, 8, 4608, {"ulysses": 4, "ring": 2}),
        (2, 8, VIDEO, {"ulysses": 2, "ring": 4}),
        (4, 6, 4608, {"ulysses": 2, "ring": 3}),
        (1, 3, 4608, {"ring": 3}),
        # It has to make up for what it costs: one card more does not.
        (4, 5, 4608, {"ulysses": 4}),
        (7, 8, 4608, {"ulysses": 7}),
        # Of a long sequence attention counts most, and three heads for two is too uneven.
        (4, 3, 4608, {"ulysses": 3}),
        (4, 3, VIDEO, {"ring": 3}),
    ],
)
def test_ulysses_goes_as_far_as_the_heads_and_a_ring_beyond(
    heads: int, count: int, tokens: int, spec: dict[str, int]
) -> None:
    chosen, reason = choose(situation(FITS, *[24] * count, tokens=tokens, heads=heads), "auto")
    assert chosen == ParallelSpec(**spec)
    assert ("with a ring, for" in reason) == ("ring" in spec)


def test_groups_of_heads_count_where_heads_share_keys_and_values() -> None:
    facts = mock_facts(FITS, heads=24, head_groups=4)
    cards = mock_cards(*[24] * 8)
    spec, reason = choose(Situation(facts=facts, devices=cards), "auto")
    assert spec == ParallelSpec(ulysses=4, ring=2)
    assert reason.endswith("with a ring, for 4 heads do not divide over 8 ranks")


def test_where_the_heads_are_few_for_the_cards_the_sequence_is_divided_too() -> None:
    spec, reason = choose(situation(DOES_NOT_FIT, *[24] * 8, heads=3), "auto")
    assert spec == ParallelSpec(tensor=2, ring=4)
    assert reason == (
        "the weights do not fit one card and 3 heads are few for the cards, so the sequence is divided too, "
        "with a ring, for a single head does not divide over 4 ranks"
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
        ("auto", situation(FITS, 24, 24, heads=1), {"ring": 2}, "a single head does not divide over 2 ranks"),
        ("auto", situation(FITS, 24, 8, heads=1), {}, "a single attention head, and no other card can hold"),
        ("auto", situation(FITS, 24, 8), {"tensor": 2}, "only one card can hold all weights"),
        ("auto", situation(FITS, 24, 24, 8, 8, 8), {"tensor": 5}, "few of the cards"),
        ("auto", situation(FITS, 24, 24, 8), {"ulysses": 2}, "over 2 of the 3 cards"),
        ("auto", situation(FITS, 0, 0), {"tensor": 2}, "not every card tells its memory"),
        ("prefer context", situation(DOES_NOT_FIT, 24, 24), {"tensor": 2}, "do not fit one card"),
        ("prefer context", situation(FITS, 24, 24), {"ulysses": 2}, "context is preferred"),
        (
            "prefer context",
            situation(DOES_NOT_FIT, 24, 24, 24, 24),
            {"tensor": 2, "ulysses": 2},
            "context is preferred, but the weights do not fit one card, so they and the sequence are divided",
        ),
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
