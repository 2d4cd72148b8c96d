"""Attention over a divided sequence on real ranks: any lengths, heads and masks, against one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support import attention_probe
from tests.support.attention_probe import CASES_PER_LAYOUT, MASKS, TOLERANCE
from tests.support.torchrun import torchrun

SEED = 20
RANKS = 4
LAYOUTS = (
    "ulysses 2 x ring 1",
    "ulysses 1 x ring 2",
    "ulysses 4 x ring 1",
    "ulysses 1 x ring 4",
    "ulysses 2 x ring 2",
)
Row = Mapping[str, Any]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Row]:
    return list(
        torchrun(tmp_path_factory.mktemp("attention"), RANKS, "tests.support.attention_probe", str(SEED))
    )


def of(rows: Sequence[Row], kind: str, layout: str) -> list[Row]:
    return [row for row in rows if (row["kind"], row["layout"]) == (kind, layout)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_gets_what_one_process_computes(rows: Sequence[Row], layout: str) -> None:
    found = of(rows, "attention", layout)
    assert len(found) >= CASES_PER_LAYOUT
    assert {row["mask"] for row in found} == set(MASKS)
    wrong = [row for row in found if not row["max_rel"] <= row["allowed"]]
    assert not wrong, wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dropped_mask_and_local_attention_would_be_noticed(rows: Sequence[Row], layout: str) -> None:
    long = [row for row in of(rows, "attention", layout) if row["keys"] >= 16]
    assert min(row["no_mask"] for row in long if row["mask"] != "none") >= 100 * TOLERANCE
    assert min(row["local"] for row in long) >= 100 * TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_any_length_are_joined(rows: Sequence[Row], layout: str) -> None:
    (row,) = of(rows, "join", layout)
    assert row["wrong"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_does_not_fit_is_an_error_on_every_rank_and_the_group_goes_on(
    rows: Sequence[Row], layout: str
) -> None:
    faults = {row["what"]: row for row in of(rows, "fault", layout)}
    assert len(faults) >= 7
    assert ("fewer heads than ulysses ranks" in faults) == ("ulysses 1" not in layout)
    assert {what: row["ranks"] for what, row in faults.items()} == dict.fromkeys(faults, RANKS)
    (again,) = of(rows, "afterwards", layout)
    assert again["max_rel"] <= TOLERANCE


def test_the_probe_and_this_file_name_the_same_layouts() -> None:
    named = {f"ulysses {one.ulysses} x ring {one.ring}" for one in attention_probe.LAYOUTS}
    assert named == set(LAYOUTS)
