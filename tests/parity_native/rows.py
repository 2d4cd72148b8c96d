"""Runs the cases and compares: every native result once, every sharded MODEL of a checkpoint and layout once.

Imported after ComfyUI.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tests.parity_native.cases import Case, Family
from tests.parity_native.graphs import Setup
from tests.parity_native.host import GraphFailed, Host
from tests.parity_native.models import NATIVE, Degrees, Models
from tests.support.reference import max_rel

NOTICEABLE = 100  # a dropped feature must move the result by so many tolerances
Row = dict[str, Any]


def passes(row: Mapping[str, Any]) -> bool:
    """Whether a row agrees and would have noticed a dropped feature, or is refused where that is an answer."""
    if "error" in row or row["moves"] < NOTICEABLE * row["tolerance"]:
        return False
    return "refused" in row or row["max_rel"] <= row["tolerance"]


def as_text(row: Mapping[str, Any]) -> str:
    start = f"{'ok  ' if passes(row) else 'FAIL'} {row['family']:14} {row['case']:36} {row['layout']:24}"
    if said := row.get("error") or row.get("refused"):
        kind = "error" if "error" in row else "refused"
        return f"{start} {kind}: {' '.join(said.split())[:300]}"
    figures = "{dtype:8} max_abs {max_abs:.1e} max_rel {max_rel:.1e} of {tolerance:.1e}, moves {moves:.1e}"
    return f"{start} {figures.format(**row)}, {row['seconds']:.1f} s"


def layout_name(degrees: Degrees) -> str:
    return ", ".join(f"{axis}={degree}" for axis, degree in degrees.items()) or "native"


class Comparison:
    """The cases of a host with one seed."""

    def __init__(self, host: Host, models: Models, seed: int):
        self.host, self.models, self.seed = host, models, seed
        self._native: dict[tuple[str, str, int], torch.Tensor] = {}
        self._setups: list[Setup] = []  # kept alive: results are found by identity

    def rows(self, family: Family, cases: Sequence[Case], degrees: Degrees) -> Iterator[Row]:
        """A row for each case in one layout. The caller releases the models."""
        for case in cases:
            start = time.perf_counter()
            row: Row = {
                "family": family.name,
                "case": case.name,
                "layout": layout_name(degrees),
                "dtype": case.dtype,
            }
            try:
                row |= self._compared(family, case, degrees)
            except GraphFailed as failure:
                row |= {"max_abs": None, "max_rel": None, "error": str(failure)}
            yield {**row, "seconds": round(time.perf_counter() - start, 2)}

    def _compared(self, family: Family, case: Case, degrees: Degrees) -> Row:
        reference = self._reference(case, case.setup)
        row: Row = {
            "max_abs": None,
            "max_rel": None,
            "moves": self._moves(case, reference),
            "tolerance": self._tolerance(family, case, reference),
        }
        source = self.models.source(case.variant, case.dtype, degrees)
        try:
            ours = self.host.run(case.setup.graph(source), self.seed)
        except GraphFailed as failure:
            may = failure.refused and any(degrees.get(axis, 1) > 1 for axis in case.refusable)
            return {**row, "refused" if may else "error": str(failure)}
        row["max_abs"] = (ours - reference).abs().max().item()
        row["max_rel"] = max_rel(ours, reference)
        return row

    def _reference(self, case: Case, setup: Setup, dtype: str = "") -> torch.Tensor:
        key = (case.variant.name, dtype or case.dtype, id(setup))
        if key not in self._native:
            source = self.models.source(case.variant, key[1], NATIVE)
            self._setups.append(setup)
            self._native[key] = self.host.run(setup.graph(source), self.seed)
        return self._native[key]

    def _moves(self, case: Case, reference: torch.Tensor) -> float:
        if case.without is None:
            return max_rel(reference.roll(1, 0), reference)
        return max_rel(self._reference(case, case.without), reference)

    def _tolerance(self, family: Family, case: Case, reference: torch.Tensor) -> float:
        """Below fp32: how far the native model in that dtype is from itself in fp32."""
        if case.dtype == "float32":
            return family.tolerance
        return max_rel(reference, self._reference(case, case.setup, "float32"))


def grouped(cases: Sequence[Case]) -> list[Case]:
    """By checkpoint and dtype, so that each is loaded once and few are held at a time."""
    order = sorted(range(len(cases)), key=lambda n: (cases[n].variant.name, cases[n].dtype, n))
    return list(itertools.chain(cases[n] for n in order))
