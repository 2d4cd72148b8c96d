"""`python -m tests.bench wire|overhead|dispatch|load|native|replicas|layouts [--json]`: one line per figure."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator

from tests.bench import dispatch, layouts, load, native, overhead, replicas, wire

BENCHES: dict[str, Callable[[], Iterator[dict[str, object]]]] = {
    "wire": wire.rows,
    "overhead": overhead.rows,
    "dispatch": dispatch.rows,
    "load": load.rows,
    "native": native.rows,
    "replicas": replicas.rows,
    "layouts": layouts.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHES))
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    for row in BENCHES[arguments.name]():
        print(
            json.dumps(row) if arguments.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True
        )


if __name__ == "__main__":
    main()
