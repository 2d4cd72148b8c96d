"""The fault suite's own parts: which rows are asked for, the slope of a row of figures, and who obeys an order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import control
from tests.faults.control import Order
from tests.faults.row import Row, Wanted
from tests.faults.soak import slope


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        ((), True),
        (("kill",), True),
        (("kill/loading",), True),
        (("kill/*/1",), True),
        (("*/loading/1", "stop"), True),
        (("kill/loading/0",), False),
        (("stop",), False),
    ],
)
def test_rows_are_chosen_by_their_beginning_or_with_wildcards(
    patterns: tuple[str, ...], wanted: bool
) -> None:
    assert Wanted(patterns)("kill", "loading", 1) is wanted


def test_a_run_is_resumed_at_what_did_not_pass(tmp_path: Path) -> None:
    rows = [Row("kill", "loading", rank, rank == 0, 1.0, "") for rank in (0, 1)]
    record = tmp_path / "rows.json"
    record.write_text("".join(f"{row.line(as_json=True)}\n" for row in rows) + "a line of another kind\n")
    again = Wanted.of((), record)
    assert [again("kill", "loading", rank) for rank in (0, 1)] == [False, True]
    assert Wanted.of((), tmp_path / "none")("kill", "loading", 0)


def test_the_slope_is_that_of_the_line() -> None:
    assert slope([5.0, 5.0, 5.0]) == 0
    assert slope([1.0, 1.5, 2.0, 2.5]) == pytest.approx(0.5)
    assert slope([4.0, 3.0, 2.0]) == pytest.approx(-1)
    assert slope([7.0]) == 0


def test_an_order_is_obeyed_once_by_its_rank_in_its_stage(tmp_path: Path) -> None:
    control.give(tmp_path, Order("exit", "sampling", 1))
    assert control.reached(tmp_path) is None
    assert control.taken(tmp_path, "sampling", 0) is None
    assert control.taken(tmp_path, "decoding", 1) is None
    assert control.taken(tmp_path, "sampling", 1) == "exit"
    assert control.reached(tmp_path) is not None
    assert control.taken(tmp_path, "sampling", 1) is None
    control.withdraw(tmp_path)
    assert control.reached(tmp_path) is None
