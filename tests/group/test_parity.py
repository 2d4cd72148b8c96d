"""A selection of the parity suite (all of it: `make parity`): two axes at once, on fresh weights and on the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import FAMILIES, TOLERANCE, Family, Reference, layout_name

DEMO, ODD = FAMILIES[0], FAMILIES[3]
SELECTION = [(DEMO, {"tensor": 2, "ring": 2}), (ODD, {"ulysses": 2, "ring": 2})]


@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        pytest.param(
            family,
            degrees,
            id=f"{family.name}-{layout_name(degrees)}",
            marks=[pytest.mark.slow] * (family is ODD),
        )
        for family, degrees in SELECTION
    ],
)
def test_latents_equal_one_process(family: Family, degrees: dict[str, int], tmp_path: Path) -> None:
    reference = Reference(family, tmp_path)
    outcome = reference.compare(degrees)
    print(f"{family.name} {layout_name(degrees)}: {outcome}")
    assert outcome.max_rel <= TOLERANCE
    assert outcome.wrong_split >= 100 * TOLERANCE, "this comparison would not notice a wrong split"
