"""The matrix on real ranks: a selection of the transformer classes, and the lists of those an axis is open to."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engine.context_plans import CONTEXT_PLANS
from runtime.spec import ParallelSpec
from runtime.verified import CONTEXT_CLASSES, TENSOR_CLASSES
from tests.parity import matrix

SEED = 7
# Two starts. Four ranks divide most head counts drawn unevenly, and so do two cards of which one is twice the other.
TENSOR = (ParallelSpec(tensor=2, tensor_shares=(2, 1)), ParallelSpec(tensor=4))
CONTEXT = (ParallelSpec(ring=2), ParallelSpec(ulysses=2, ring=2), ParallelSpec(tensor=2, ring=2))
JOBS = [
    *matrix.jobs(matrix.SELECTION, TENSOR),
    *matrix.jobs(matrix.CONTEXT_SELECTION, CONTEXT),
]
Rows = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    found = matrix.rows(tmp_path_factory.mktemp("matrix"), JOBS, SEED)
    return {(row["family"], row["layout"]): row for row in found}


@pytest.mark.parametrize("job", JOBS, ids=[f"{job.case}-{matrix.layout_name(job.layout)}" for job in JOBS])
def test_one_forward_is_that_of_one_process(rows: Rows, job: matrix.Job) -> None:
    row = rows[job.case, matrix.layout_name(job.layout)]
    assert matrix.passes(row), row


def test_an_axis_is_open_to_what_the_matrix_verifies() -> None:
    assert set(matrix.CASES) == TENSOR_CLASSES
    assert set(CONTEXT_PLANS) == CONTEXT_CLASSES
    assert CONTEXT_CLASSES <= TENSOR_CLASSES
    assert set(matrix.SELECTION) <= TENSOR_CLASSES
    assert {matrix.ALL[label].name for label in matrix.CONTEXT_SELECTION} <= CONTEXT_CLASSES
