"""`python -m tests.faults [--json] [--only ...]`: every fault, one line each as it happens.

Parts are ranks, cancels, soak, frames, surroundings and hosts. `--only` takes parts, and rows as fault/stage/rank with
wildcards: `--only frames "kill/*"`. `--resume` leaves out what passed in the JSON lines of an earlier run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.faults import cancels, frames, hosts, ranks, soak, surroundings
from tests.faults.row import Row, Wanted

PARTS: dict[str, Callable[[Wanted], Iterator[Row]]] = {
    "frames": frames.rows,
    "ranks": ranks.rows,
    "cancels": cancels.rows,
    "hosts": hosts.rows,
    "soak": soak.rows,
    "surroundings": surroundings.rows,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", nargs="+", metavar="WHAT", default=[], help="these parts or rows")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="JSON lines of an earlier run")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="of the suites in `surroundings`")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    patterns = [one for one in arguments.only if one not in PARTS]
    failed = made = 0
    for name, rows in PARTS.items():
        if arguments.only and name not in arguments.only and not patterns:
            continue
        if name == "surroundings":
            rows = partial(surroundings.rows, select=arguments.pytest)
        wanted = Wanted.of(() if name in arguments.only else patterns, arguments.resume)
        for row in rows(wanted):
            print(row.line(arguments.json), flush=True)
            made, failed = made + 1, failed + (not row.ok)
    return 1 if failed or not (made or arguments.resume) else 0


if __name__ == "__main__":
    raise SystemExit(main())
