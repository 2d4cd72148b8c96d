"""Whether a row passes, and how it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTICEABLE = 100  # a dropped feature must move the result by so many tolerances
# Below fp32, where rounding takes each result its own way. Two results that are each as far from the exact one as
# rounding takes them lie up to twice that apart; and over the whole latent the sharded one must be no further from
# the exact one than the native one is, but for chance.
APART, FURTHER = 2.0, 1.25
Row = dict[str, Any]


def passes(row: Mapping[str, Any]) -> bool:
    """Whether a row agrees and would have noticed a dropped feature, or is refused where that is an answer."""
    if "failed" in row or row["moves"] < NOTICEABLE * row["tolerance"]:
        return False
    if "refused" in row:
        return True
    rounds_alike = row.get("sharded_error", 0.0) <= FURTHER * row.get("native_error", 0.0)
    return row["max_rel"] <= row["tolerance"] and rounds_alike


def as_text(row: Mapping[str, Any]) -> str:
    start = f"{'ok  ' if passes(row) else 'FAIL'} {row['family']:14} {row['case']:34} {row['layout']:19}"
    for outcome in ("failed", "refused"):
        if outcome in row:
            return f"{start} {outcome}: {' '.join(row[outcome].split())[:300]}"
    figures = "{dtype:8} max_abs {max_abs:.1e} max_rel {max_rel:.1e} of {tolerance:.1e}, moves {moves:.1e}"
    if "native_error" in row:
        figures += ", from fp32 {sharded_error:.1e} (native {native_error:.1e})"
    return f"{start} {figures.format(**row)}, {row['seconds']:.1f} s"
