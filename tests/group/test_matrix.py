"""The matrix on real ranks: a selection of the transformer classes, and the lists of those an axis is open to."""

from __future__ import annotations

from collections.abc import Callable
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
RowOf = Callable[[matrix.Job], dict[str, Any]]


@pytest.fixture(scope="module")
def row_of(tmp_path_factory: pytest.TempPathFactory) -> RowOf:
    """The row of a job. All jobs of as many ranks run with the first of them, in one start."""
    made: dict[int, dict[tuple[str, str], dict[str, Any]]] = {}

    def of(job: matrix.Job) -> dict[str, Any]:
        ranks = job.layout.world_size
        if ranks not in made:
            jobs = [one for one in JOBS if one.layout.world_size == ranks]
            rows = matrix.rows(tmp_path_factory.mktemp("matrix"), jobs, SEED)
            made[ranks] = {(row["family"], row["layout"]): row for row in rows}
        return made[ranks][job.case, matrix.layout_name(job.layout)]

    return of


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            job,
            id=f"{job.case}-{matrix.layout_name(job.layout)}",
            marks=[pytest.mark.slow] * (job.layout.world_size == 2),
        )
        for job in JOBS
    ],
)
def test_one_forward_is_that_of_one_process(row_of: RowOf, job: matrix.Job) -> None:
    row = row_of(job)
    assert matrix.passes(row), row


def test_an_axis_is_open_to_what_the_matrix_verifies() -> None:
    assert set(matrix.CASES) == TENSOR_CLASSES
    assert set(CONTEXT_PLANS) == CONTEXT_CLASSES
    assert CONTEXT_CLASSES <= TENSOR_CLASSES
    assert set(matrix.SELECTION) <= TENSOR_CLASSES
    assert {matrix.ALL[label].name for label in matrix.CONTEXT_SELECTION} <= CONTEXT_CLASSES
