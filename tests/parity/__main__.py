"""`python -m tests.parity [--json]`: whole pipelines, one line per (family, layout).

`--all [--seed N]`: one forward of every transformer class under the tensor axis instead.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path

from tests.parity import matrix
from tests.parity.cases import FAMILIES, TOLERANCE, Family, Reference, layout_name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--all", action="store_true", help="one forward of every transformer class")
    parser.add_argument("--seed", type=int, default=0, help="draws sizes, weights and inputs of --all")
    parser.add_argument("--only", nargs="+", default=sorted(matrix.CASES), help="these classes of --all")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="sharded-parity-") as directory:
        if arguments.all:
            return _matrix(Path(directory), arguments)
        for family in FAMILIES:
            failed += _rows(family, Path(directory), arguments.json)
    return 1 if failed else 0


def _matrix(directory: Path, arguments: argparse.Namespace) -> int:
    failed = expected = 0
    for row in matrix.rows(directory, arguments.only, arguments.seed):
        failed += not matrix.passes(row)
        expected += 1
        print(json.dumps(row) if arguments.json else matrix.as_text(row), flush=True)
    return 1 if failed or expected != len(arguments.only) * len(matrix.LAYOUTS) else 0


def _rows(family: Family, directory: Path, as_json: bool) -> int:
    reference = Reference(family, directory)
    wrong_split = reference.wrong_split()
    failed = 0
    for degrees in family.layouts:
        outcome = reference.compare(degrees, wrong_split)
        failed += outcome.max_rel > TOLERANCE or wrong_split < 100 * TOLERANCE
        row = {
            "family": family.name,
            "layout": layout_name(degrees),
            "ranks": math.prod(degrees.values()),
            "dtype": "float32",
            "max_abs": outcome.max_abs,
            "max_rel": outcome.max_rel,
            "wrong_split": wrong_split,
        }
        text = "{family:14} {layout:12} max_rel {max_rel:.1e} (a wrong split: {wrong_split:.1e})".format(
            **row
        )
        print(json.dumps(row) if as_json else text, flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
