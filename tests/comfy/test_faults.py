"""A few rows of the fault suite on a server of their own; `make faults` has all of them."""

from __future__ import annotations

from tests.faults import ranks
from tests.faults.row import Wanted

CHOSEN = ("exit/starting/1", "memory limit/loading/0", "kill/encoding/1", "exception/decoding/0")


def test_a_rank_that_fails_is_named_and_nothing_is_left_or_lost() -> None:
    rows = list(ranks.rows(Wanted(CHOSEN)))
    for row in rows:
        print(row.line(as_json=False))
    assert {row.key for row in rows} == {*CHOSEN}
    assert not [row.line(as_json=False) for row in rows if not row.ok]
