"""`python -m tests.parity_native [--json]`: one line per (family, case, layout); the status says whether all pass.

Every case runs in the layouts tensor 2, ulysses 2, ring 2 and replica 2, a sample of each family in more of one axis
and of two (`--all`: every case there too). `--family` and `--case` take parts of names, `--layout` whole ones, such
as tensor=2 or replica=2,tensor=2; the layout `native` compares ComfyUI's own model with itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.parity_native.cases import Case, Family
from tests.parity_native.cases_flux import FLUX
from tests.parity_native.cases_qwen import QWEN_IMAGE
from tests.parity_native.cases_wan import WAN
from tests.parity_native.host import Host
from tests.parity_native.verdict import as_text, passes

FAMILIES = (FLUX, QWEN_IMAGE, WAN)
LAYOUTS = ({"tensor": 2}, {"ulysses": 2}, {"replica": 2}, {"ring": 2})
MORE_LAYOUTS = (
    {"tensor": 3},
    {"ulysses": 3},
    {"replica": 2, "tensor": 2},
    {"replica": 2, "ulysses": 2},
    {"ring": 2, "ulysses": 2},
    {"tensor": 2, "ring": 2},
    {"tensor": 2, "ulysses": 2},
)
QUICK = dict(zip((family.name for family in FAMILIES), LAYOUTS, strict=False))  # each family in one layout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--all", action="store_true", help="every case in every layout")
    parser.add_argument("--quick", action="store_true", help="a sample: each family in a layout of its own")
    parser.add_argument("--seed", type=int, default=0, help="draws weights and inputs")
    for name in ("family", "case", "layout"):
        parser.add_argument(f"--{name}", nargs="+", default=[], metavar="PART", help="only these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sharded-parity-native-") as folder:
        return _run(Path(folder), arguments)


def _run(folder: Path, arguments: argparse.Namespace) -> int:
    host = Host(folder / "comfyui")
    # These import ComfyUI, which is found from here on.
    from tests.parity_native.models import NATIVE, Models
    from tests.parity_native.nodes import node_classes
    from tests.parity_native.rows import Comparison, grouped, layout_name

    models = Models(host, folder, arguments.seed)
    host.add(node_classes(models.load, models.config_of, host.keep))
    comparison = Comparison(host, models, arguments.seed)
    layouts = (NATIVE,) if "native" in arguments.layout else (*LAYOUTS, *MORE_LAYOUTS)
    count = failed = 0
    for degrees in layouts:
        if arguments.layout and _plain(layout_name(degrees)) not in map(_plain, arguments.layout):
            continue
        for family in FAMILIES:
            if arguments.quick and QUICK[family.name] != degrees:
                continue
            cases = grouped(_cases(family, degrees, arguments))
            for row in comparison.rows(family, cases, degrees):
                count += 1
                failed += not passes(row)
                print(json.dumps(row) if arguments.json else as_text(row), flush=True)
        models.release()
    print(f"{count} rows, {failed} failed", file=sys.stderr)
    return 1 if failed or not count else 0


def _cases(family: Family, degrees: Mapping[str, int], arguments: argparse.Namespace) -> list[Case]:
    if not _chosen(family.name, arguments.family):
        return []
    every = arguments.all or (degrees not in MORE_LAYOUTS and not arguments.quick) or arguments.case
    return [case for case in family.cases if (case.core or every) and _chosen(case.name, arguments.case)]


def _chosen(name: str, parts: list[str]) -> bool:
    return not parts or any(_plain(part) in _plain(name) for part in parts)


def _plain(name: str) -> str:
    return name.lower().replace(" ", "")


if __name__ == "__main__":
    raise SystemExit(main())
