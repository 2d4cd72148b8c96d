"""`python -m tests.parity [--json]`: whole pipelines, one line per (family, layout).

`--all [--seed N]`: one forward of every transformer class instead, under the tensor and the context axes. Either is
narrowed by `--only`, `--layout` and `--context`.
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
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these families; of --all, these classes or variants"
    )
    parser.add_argument("--layout", nargs="+", metavar="LAYOUT", help="these layouts, as `tensor=2,ring=2`")
    parser.add_argument("--context", action="store_true", help="the layouts with a context axis")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="sharded-parity-") as directory:
        if arguments.all:
            return _matrix(Path(directory), arguments)
        for family in FAMILIES:
            if arguments.only and family.name not in arguments.only:
                continue
            failed += _rows(family, Path(directory), arguments)
    return 1 if failed else 0


def _matrix(directory: Path, arguments: argparse.Namespace) -> int:
    chosen = [
        label
        for label, case in matrix.ALL.items()
        if not arguments.only or {label, case.name} & {*arguments.only}
    ]
    layouts = [
        layout
        for layout in (*matrix.TENSOR_LAYOUTS, *matrix.CONTEXT_LAYOUTS)
        if _wanted(matrix.layout_name(layout), arguments) and (layout.context > 1 or not arguments.context)
    ]
    passed = []
    for row in matrix.rows(directory, matrix.jobs(chosen, layouts), arguments.seed):
        passed.append(matrix.passes(row))
        print(json.dumps(row) if arguments.json else matrix.as_text(row), flush=True)
    return 0 if passed and all(passed) else 1


def _wanted(layout: str, arguments: argparse.Namespace) -> bool:
    wanted = [name.replace(" ", "") for name in arguments.layout or ()]
    return not wanted or layout.replace(" ", "") in wanted


def _rows(family: Family, directory: Path, arguments: argparse.Namespace) -> int:
    reference = Reference(family, directory)
    wrong_split = reference.wrong_split()
    failed = 0
    for degrees in family.layouts:
        if not _wanted(layout_name(degrees), arguments) or (arguments.context and {*degrees} == {"tensor"}):
            continue
        outcome = reference.compare(degrees, wrong_split)
        failed += not (outcome.max_rel <= TOLERANCE and wrong_split >= 100 * TOLERANCE)
        row = {
            "family": family.name,
            "layout": layout_name(degrees),
            "ranks": math.prod(degrees.values()),
            "dtype": "float32",
            "max_abs": outcome.max_abs,
            "max_rel": outcome.max_rel,
            "wrong_split": wrong_split,
        }
        text = "{family:14} {layout:28} max_rel {max_rel:.1e} (wrong_split {wrong_split:.1e})".format(**row)
        print(json.dumps(row) if arguments.json else text, flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
