"""A host in a process of its own, for tests that kill hosts: starts a group, samples for ever, prints its pids.

Run as `python -m tests.support.host <pipeline folder> <ranks>`; prints one JSON line once it is sampling.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from runtime.group import GROUPS
from tests.support.groups import layout_of, make_slot, sample
from tests.support.reference import Run


def main() -> None:
    slot = make_slot(Path(sys.argv[1]), layout_of(tensor=int(sys.argv[2])))
    slot.ensure()
    group = GROUPS.groups()[0]
    told = False

    def report(*_: object) -> None:
        nonlocal told
        if not told:
            told = True
            snapshot = group.snapshot()
            assert group._session is not None
            line = {
                "agent": snapshot["agent_pid"],
                "ranks": [rank["pid"] for rank in snapshot["ranks"]],
                "directory": str(group._session.directory),
            }
            print(json.dumps(line), flush=True)

    while True:
        sample(slot, Run(steps=1000), report=report)


if __name__ == "__main__":
    main()
