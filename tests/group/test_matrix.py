"""The tensor axis on real ranks: a selection of the transformer classes, and the list of those it is open to."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.spec import ParallelSpec
from runtime.verified import TENSOR_CLASSES
from tests.parity import matrix

SEED = 7
# Three ranks that no head count drawn divides in most cases, and two cards of which one is twice the other.
LAYOUTS = (ParallelSpec(tensor=3), ParallelSpec(tensor=2, tensor_shares=(2, 1)))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    found = matrix.rows(tmp_path_factory.mktemp("matrix"), matrix.SELECTION, SEED, LAYOUTS)
    return {(row["family"], row["layout"]): row for row in found}


@pytest.mark.parametrize("name", matrix.SELECTION)
@pytest.mark.parametrize("layout", LAYOUTS, ids=matrix.layout_name)
def test_one_forward_is_that_of_one_process(
    rows: dict[tuple[str, str], dict[str, Any]], name: str, layout: ParallelSpec
) -> None:
    row = rows[name, matrix.layout_name(layout)]
    assert matrix.passes(row), row


def test_the_tensor_axis_is_open_to_what_the_matrix_verifies() -> None:
    assert set(matrix.CASES) == TENSOR_CLASSES
    assert set(matrix.SELECTION) <= TENSOR_CLASSES
