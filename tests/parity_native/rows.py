"""Runs the cases and compares: every native result once, every sharded MODEL of a checkpoint and layout once.

Imported after ComfyUI.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from tests.parity_native.cases import Case, Family
from tests.parity_native.graphs import Setup
from tests.parity_native.host import GraphFailed, Host
from tests.parity_native.models import NATIVE, Degrees, Models
from tests.parity_native.verdict import APART, Row
from tests.support.reference import max_rel


def layout_name(degrees: Degrees) -> str:
    return ", ".join(f"{axis}={degree}" for axis, degree in degrees.items()) or "native"


def mean_rel(a: torch.Tensor, b: torch.Tensor) -> float:
    """The root mean square of a - b over that of b: unlike the largest difference, little moved by chance."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


class Comparison:
    """The cases on one host with one seed."""

    def __init__(self, host: Host, models: Models, seed: int):
        self._host, self._models, self._seed = host, models, seed
        # Found by identity of the run: runs are kept alive with their results.
        self._native: dict[tuple[str, str, int], tuple[Setup, torch.Tensor]] = {}

    def rows(self, family: Family, cases: Sequence[Case], degrees: Degrees) -> Iterator[Row]:
        """A row for each case in one layout. The caller releases the models."""
        for case in cases:
            start = time.perf_counter()
            row: Row = {
                "family": family.name,
                "case": case.name,
                "layout": layout_name(degrees),
                "dtype": case.dtype,
                "max_abs": None,
                "max_rel": None,
            }
            try:
                row |= self._compared(family, case, degrees)
            except GraphFailed as failure:
                row["failed"] = f"native: {failure}"
            yield {**row, "seconds": round(time.perf_counter() - start, 2)}

    def _compared(self, family: Family, case: Case, degrees: Degrees) -> Row:
        native = self._reference(case, case.setup)
        rounded = case.dtype != "float32"
        exact = self._reference(case, case.setup, "float32") if rounded else native
        row: Row = {
            "moves": self._moves(case, native),
            "tolerance": APART * max_rel(native, exact) if rounded else family.tolerance,
        }
        source = self._models.source(case.variant, case.dtype, degrees)
        try:
            ours = self._host.run(case.setup.graph(source), self._seed)
        except GraphFailed as failure:
            allowed = failure.refused and case.refusable
            return {**row, "refused" if allowed else "failed": str(failure)}
        if rounded:
            row |= {"sharded_error": mean_rel(ours, exact), "native_error": mean_rel(native, exact)}
        return {**row, "max_abs": (ours - native).abs().max().item(), "max_rel": max_rel(ours, native)}

    def _reference(self, case: Case, setup: Setup, dtype: str = "") -> torch.Tensor:
        """What the native model makes of a run."""
        key = (case.variant.name, dtype or case.dtype, id(setup))
        if key not in self._native:
            source = self._models.source(case.variant, key[1], NATIVE)
            self._native[key] = setup, self._host.run(setup.graph(source), self._seed)
        return self._native[key][1]

    def _moves(self, case: Case, native: torch.Tensor) -> float:
        if case.without is None:
            return max_rel(native.roll(1, 0), native)
        return max_rel(self._reference(case, case.without), native)


def grouped(cases: Sequence[Case]) -> list[Case]:
    """By checkpoint and dtype, so that a slot is loaded once and not parked for another in between."""
    return sorted(cases, key=lambda case: (case.variant.name, case.dtype))
